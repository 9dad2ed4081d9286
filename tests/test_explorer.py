"""The explorer in a browser: its numbers are those of check_equality, by typing, by dragging and by keyboard."""

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, expect

from dobnb import check_equality, random_stochastic
from dobnb.dobrushin import ATTAINS, pairwise_total_variation
from dobnb.gallery import GALLERY

NUMBERS = ("kappa", "factor_kappa", "bound", "gap", "relative_gap", "margin", "attaining")


@pytest.fixture(scope="module")
def page(pages: Path, browser: Browser) -> Iterator[Page]:
    context = browser.new_context(offline=True)
    opened = context.new_page()
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.goto((pages / "book" / "explorer.html").as_uri())
    yield opened
    assert wrong == []
    context.close()


def part(page: Page, name: str) -> Locator:
    return page.locator(f"#explorer-app [data-part='{name}']")


def type_in(page: Page, text: str) -> None:
    """Use the text field, as a reader does."""
    part(page, "typing").evaluate("details => { details.open = true; }")
    part(page, "text").fill(text)
    part(page, "apply").click()


def choose_alpha(page: Page, alpha: float) -> None:
    part(page, "alpha").evaluate(
        "(slider, alpha) => { slider.value = alpha; slider.dispatchEvent(new Event('input')); }", alpha
    )


def entries(page: Page) -> torch.Tensor:
    """The matrix that the bars show, at full precision."""
    values = page.locator("#explorer-app .explorer-bar").evaluate_all("bars => bars.map(bar => +bar.ariaValueNow)")
    n = math.isqrt(len(values))
    assert n * n == len(values)
    return torch.tensor(values, dtype=torch.float64).reshape(n, n)


def assert_shows(page: Page, A: torch.Tensor, alpha: float) -> None:
    """What the page says about A is what check_equality says: verdict, pair, numbers, and every total variation."""
    report = check_equality(A, alpha)
    shown = {name: float(part(page, name).get_attribute("data-value")) for name in NUMBERS}
    expected = {name: float(getattr(report, name)) for name in NUMBERS}
    assert shown == pytest.approx(expected, abs=1e-9, nan_ok=True)
    verdict = part(page, "verdict")
    assert verdict.get_attribute("data-holds") == str(bool(report.holds)).lower()
    assert verdict.text_content().startswith("Tight." if report.holds else "Not tight.")
    i, j = (token + 1 for token in report.pair.tolist())
    if report.holds or report.attaining == 1:
        assert f"The pair {i}, {j} " in verdict.text_content()
    lines = part(page, "pairs").locator("tr")
    upper = torch.triu_indices(len(A), len(A), 1)
    tv = pairwise_total_variation(A)[*upper]
    shown_tv = lines.evaluate_all("lines => lines.map(line => +line.dataset.tv)")
    assert shown_tv == pytest.approx(tv.tolist(), abs=1e-12)
    marked = lines.evaluate_all("lines => lines.map(line => line.classList.contains('explorer-attains'))")
    assert marked == (tv >= tv.max() - ATTAINS).tolist()
    own = A.diagonal()
    for index, (i, j) in enumerate(upper.T.tolist()):
        sides = lines.nth(index).locator("td")
        assert ("✓" in sides.nth(1).text_content()) == bool(own[i] >= A[j, i])
        assert ("✓" in sides.nth(2).text_content()) == bool(own[j] >= A[i, j])


@pytest.mark.parametrize("n", [2, 3, 3, 3, 4, 5, 7, 12])
@pytest.mark.parametrize("alpha", [0.5, 0.2, 0.83])
def test_random_matrices(page: Page, n: int, alpha: float) -> None:
    generator = torch.Generator().manual_seed(int(1000 * alpha) + n)
    for concentration in (1.0, 0.1):
        A = random_stochastic(n, concentration=concentration, generator=generator).double()
        A /= A.sum(-1, keepdim=True)
        type_in(page, "\n".join(" ".join(map(repr, row)) for row in A.tolist()))
        assert part(page, "problem").text_content() == ""
        choose_alpha(page, alpha)
        assert torch.allclose(entries(page), A, rtol=0, atol=1e-15)
        assert_shows(page, A, alpha)


@pytest.mark.parametrize("name", GALLERY)
def test_presets_are_the_gallery(page: Page, name: str) -> None:
    part(page, "preset").select_option(name)
    choose_alpha(page, 0.5)
    A = torch.tensor([[float(entry) for entry in row] for row in GALLERY[name].matrix], dtype=torch.float64)
    assert torch.allclose(entries(page), A, rtol=0, atol=1e-15)
    assert part(page, "lesson").text_content() == GALLERY[name].lesson
    assert_shows(page, A, 0.5)


def test_every_preset_is_offered(page: Page) -> None:
    offered = json.loads(page.locator("#explorer-presets").text_content())
    assert list(offered) == list(GALLERY)


def test_dragging_moves_one_entry_and_keeps_the_rest_in_proportion(page: Page) -> None:
    part(page, "preset").select_option("plain")
    before = entries(page)
    bar = page.locator(".explorer-bar[data-i='2'][data-k='2']")
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    middle = box["x"] + box["width"] / 2
    page.mouse.move(middle, box["y"] + 0.3 * box["height"])
    page.mouse.down()
    page.mouse.move(middle, box["y"] + 0.6 * box["height"])
    page.mouse.move(middle, box["y"] + 0.8 * box["height"], steps=4)
    page.mouse.up()
    A = entries(page)
    assert A[2, 2] == pytest.approx(0.2, abs=0.011)
    assert A[2].sum() == pytest.approx(1, abs=1e-12)
    assert A[2, 0] / A[2, 1] == pytest.approx(before[2, 0] / before[2, 1])
    assert torch.equal(A[:2], before[:2])
    assert part(page, "preset").input_value() == ""
    assert_shows(page, A, 0.5)


def test_the_keyboard_does_all_of_it(page: Page) -> None:
    part(page, "preset").focus()
    page.keyboard.press("Home")  # the first preset
    part(page, "preset").select_option("plain")
    bar = page.locator(".explorer-bar[data-i='0'][data-k='0']")
    bar.focus()
    for key, value in (("ArrowUp", 0.61), ("ArrowLeft", 0.6), ("PageDown", 0.5), ("End", 1), ("Home", 0)):
        page.keyboard.press(key)
        assert entries(page)[0, 0] == pytest.approx(value, abs=1e-9)
        expect(bar).to_be_focused()
        assert_shows(page, entries(page), 0.5)
    page.keyboard.press("ArrowDown")  # below 0 there is nothing
    assert entries(page)[0, 0] == 0
    page.keyboard.press("Tab")
    expect(page.locator(".explorer-bar[data-i='0'][data-k='1']")).to_be_focused()


def press(page: Page, i: int, k: int, key: str, times: int) -> None:
    page.locator(f".explorer-bar[data-i='{i}'][data-k='{k}']").focus()
    for _ in range(times):
        page.keyboard.press(key)


def test_a_tie_reached_by_keyboard_is_a_tie(page: Page) -> None:
    type_in(page, "0.6 0.4\n0.3 0.7")
    press(page, 0, 0, "ArrowDown", 30)
    assert entries(page).tolist() == [[0.3, 0.7], [0.3, 0.7]]
    assert float(part(page, "kappa").get_attribute("data-value")) == 0
    assert part(page, "verdict").text_content().startswith("Tight.")
    sides = part(page, "pairs").locator("td").all_text_contents()
    assert sides[:3] == ["0.000 = κ", "0.300 ≥ 0.300 ✓", "0.700 ≥ 0.700 ✓"]


def test_steps_leave_fractions(page: Page) -> None:
    """Forty steps from (1/2, 1/3, 1/6): what is left is shared as 2 to 1, whatever was rounded on the way."""
    type_in(page, "1/2 1/3 1/6\n0 1 0\n0 0 1")
    for key, times, moved in (("ArrowUp", 27, Fraction(77, 100)), ("ArrowDown", 40, Fraction(37, 100))):
        press(page, 0, 0, key, times)
        rest = 1 - moved
        assert entries(page)[0].tolist() == [float(moved), float(rest * Fraction(2, 3)), float(rest / 3)]


def test_what_differs_is_shown_to_differ(page: Page) -> None:
    type_in(page, "0.3001 0.6999\n0.3002 0.6998")
    sides = part(page, "pairs").locator("td").all_text_contents()
    assert sides[1:3] == ["0.3001 < 0.3002 ✗", "0.6998 < 0.6999 ✗"]
    type_in(page, "0.3 0.7\n0.30000000000000004 0.7")
    assert part(page, "pairs").locator("td").nth(1).text_content() == "0.300 = 0.300 but for rounding ✗"


@pytest.mark.parametrize(
    "text",
    ["[[0.5,0.5],[0.2,0.8]]", "[[0.5, 0.5],\n [0.2, 0.8]]", "[[0.5 0.5]\n [0.2 0.8]]", "((1/2, .5), (2/10, 8e-1))"],
)
def test_a_pasted_list_is_read(page: Page, text: str) -> None:
    type_in(page, text)
    assert part(page, "problem").text_content() == ""
    assert entries(page).tolist() == [[0.5, 0.5], [0.2, 0.8]]


def test_minus_nought_is_nought(page: Page) -> None:
    type_in(page, "1 -0\n-0.0 1")
    assert entries(page).tolist() == [[1, 0], [0, 1]]


def test_the_text_follows_the_matrix(page: Page) -> None:
    part(page, "preset").select_option("plain")
    for change in ("preset", "random", "size"):
        type_in(page, "1 2")
        assert part(page, "problem").text_content() != ""
        if change == "preset":
            part(page, "preset").select_option("tie")
        elif change == "random":
            part(page, "random").click()
        else:
            part(page, "size").fill("4")
            part(page, "size").press("Enter")
        assert part(page, "problem").text_content() == "" and part(page, "text").get_attribute("aria-invalid") is None
        before = entries(page)
        part(page, "apply").click()
        assert torch.allclose(entries(page), before, rtol=0, atol=1e-15)


def test_a_finger_can_scroll_past_and_hold_what_it_tapped(pages: Path, browser: Browser) -> None:
    context = browser.new_context(offline=True, has_touch=True, viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto((pages / "book" / "explorer.html").as_uri())
    bar = page.locator(".explorer-bar[data-i='0'][data-k='0']")
    before = entries(page)
    assert bar.evaluate("bar => getComputedStyle(bar).touchAction") == "pan-y pinch-zoom"
    bar.tap()
    expect(bar).to_be_focused()
    assert torch.equal(entries(page), before)
    assert bar.evaluate("bar => getComputedStyle(bar).touchAction") == "none"
    box = bar.bounding_box()
    bar.tap(position={"x": box["width"] / 2, "y": 0.8 * box["height"]})
    assert entries(page)[0, 0] == pytest.approx(0.2, abs=0.05)  # a finger is placed to the pixel
    context.close()


def test_a_row_of_one_entry_can_be_lowered(page: Page) -> None:
    type_in(page, "1 0 0\n0 1 0\n0 0 1")
    page.locator(".explorer-bar[data-i='0'][data-k='0']").focus()
    page.keyboard.press("PageDown")
    assert entries(page)[0].tolist() == pytest.approx([0.9, 0.05, 0.05])


def test_other_sizes(page: Page) -> None:
    for n in (5, 2, 3):
        part(page, "size").fill(str(n))
        part(page, "size").press("Enter")
        assert entries(page).shape == (n, n)
        assert_shows(page, entries(page), float(part(page, "alpha").input_value()))
    for wrong in ("99", "2.6"):
        part(page, "size").fill(wrong)
        part(page, "size").press("Enter")
        assert entries(page).shape == (3, 3) and part(page, "size").input_value() == "3"
        assert part(page, "size-problem").text_content() == "N is a whole number from 2 to 12."
    part(page, "random").click()
    assert part(page, "size-problem").text_content() == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "0 rows"),
        ("1", "1 row;"),
        ("1 0\n0.5 0.5 0", "Row 2 has 3 entries; it needs 2"),
        ("1 0\n0.5 0.4", "Row 2 sums to 0.9"),
        ("1 0\n-1 2", "Row 2, entry 1: “-1” is no number"),
        ("1 0\nx 1", "Row 2, entry 1: “x” is no number"),
        ("1 0\n1/0 1", "Row 2, entry 1: “1/0” is no number"),
        ("1 0\nNaN 1", "Row 2, entry 1"),
        ("0,5 0,5\n0,2 0,8", "Row 1 has 4 entries; it needs 2, as many as there are rows. A comma stands between"),
    ],
)
def test_bad_input_is_refused_and_the_matrix_stays(page: Page, text: str, problem: str) -> None:
    part(page, "preset").select_option("tie")
    before = entries(page)
    type_in(page, text)
    assert part(page, "problem").text_content().startswith(problem)
    assert part(page, "text").get_attribute("aria-invalid") == "true"
    assert torch.equal(entries(page), before)
    type_in(page, "1/3 2/3\n3/4, 1/4")
    assert part(page, "problem").text_content() == ""
    assert part(page, "text").get_attribute("aria-invalid") is None
    assert_shows(page, torch.tensor([[1 / 3, 2 / 3], [0.75, 0.25]], dtype=torch.float64), 0.5)


def test_typing_starts_from_what_is_shown(page: Page) -> None:
    part(page, "typing").evaluate("details => { details.open = false; }")
    part(page, "preset").select_option("largest in its row")
    page.locator("#explorer-app summary").click()
    expect(part(page, "text")).to_have_value("2/5  1/5  2/5\n1/3  1/3  1/3\n1/4  3/8  3/8")
    before = entries(page)
    part(page, "apply").click()
    assert torch.equal(entries(page), before)
