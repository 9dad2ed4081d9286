"""The built pages in headless Chromium, opened as files with the network off: light and dark, screen and phone."""

import re
from collections.abc import Iterable, Iterator
from html import unescape
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[1]
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())


def listed(entries: Iterable[dict]) -> Iterator[str]:
    """Pages of a table of contents, in order, with those below them."""
    for entry in entries:
        yield entry["file"]
        yield from listed(entry.get("sections", ()))


PAGES = [TOC["root"], *(page for part in TOC["parts"] for page in listed(part["chapters"]))]
WIDTHS = {"light": 1280, "dark": 390}
"""Every page is looked at on a light screen and on a dark phone."""


@pytest.fixture
def opened(browser: Browser, request: pytest.FixtureRequest) -> Iterator[tuple[Page, list[str]]]:
    """A page in the scheme that the test is given, and what goes wrong in it: complaints, requests beyond the disk."""
    scheme = request.param
    context = browser.new_context(
        viewport={"width": WIDTHS[scheme], "height": 900}, color_scheme=scheme, offline=True, reduced_motion="reduce"
    )
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda failed: wrong.append(f"not loaded: {failed.url}"))
    page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else wrong.append(asked.url))
    yield page, wrong
    context.close()


def visit(page: Page, file: Path) -> None:
    """Open a page and wait until its mathematics is set."""
    page.goto(file.as_uri())
    page.evaluate("window.MathJax?.startup?.promise")


SCHEMES = pytest.mark.parametrize("opened", WIDTHS, indirect=True)


@pytest.mark.parametrize("opened", ["dark"], indirect=True)
@pytest.mark.parametrize("name", ["book/index", "book/09_dinov2_measured", "book/explorer", "book/notation"])
def test_nothing_is_cut_unseen_on_a_phone(pages: Path, opened: tuple[Page, list[str]], name: str) -> None:
    page, _ = opened
    visit(page, pages / f"{name}.html")

    # a table that goes on beyond the edge fades there, until its end is seen
    hidden = """() => [...document.querySelectorAll('article table')].map(table => {
        for (let place = table.parentElement; place.tagName !== 'ARTICLE'; place = place.parentElement) {
            const scrolls = ['auto', 'scroll'].includes(getComputedStyle(place).overflowX);
            if (scrolls && place.scrollWidth > place.clientWidth + 2)
                return getComputedStyle(place).maskImage !== 'none';
        }
        return null;
    }).filter(fades => fades !== null)"""
    fades = page.evaluate(hidden)
    assert fades and all(fades)
    page.evaluate("document.querySelectorAll('.goes-on').forEach(place => { place.scrollLeft = place.scrollWidth; })")
    page.wait_for_function("document.querySelectorAll('.goes-on').length === 0")
    assert not any(page.evaluate(hidden))

    # a chapter's command and the titles of its neighbours
    for text in page.query_selector_all(".run-this-chapter pre, .prev-next-area .prev-next-title, .prev-next-area a"):
        assert text.evaluate("text => text.scrollWidth <= text.clientWidth")


@SCHEMES
@pytest.mark.parametrize("name", PAGES)
def test_page(pages: Path, opened: tuple[Page, list[str]], name: str) -> None:
    page, wrong = opened
    visit(page, pages / f"{name}.html")

    # mathematics is set, all of it, without an error, and no markup shows through
    formulas = page.evaluate("document.querySelectorAll('.math').length")
    assert page.evaluate("document.querySelectorAll('.math:has(mjx-container svg)').length") == formulas
    broken = '[data-mml-node="merror"], mjx-container [fill="red"]'  # a syntax error; a macro that does not exist
    assert page.evaluate("broken => document.querySelectorAll(broken).length", broken) == 0
    prose = page.evaluate(
        """() => {
            const article = document.querySelector('article').cloneNode(true);
            article.querySelectorAll('pre, code, .sig, script, mjx-container').forEach(node => node.remove());
            return article.textContent;
        }"""
    )
    assert len(prose) > 20
    assert re.findall(r"\\[(\[a-z]|\$\$|\{[a-z:]+\}`|:::|```", prose) == []

    # figures are decoded, described, and on opaque white
    for image in page.query_selector_all("article img"):
        image.scroll_into_view_if_needed()
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
        assert image.get_attribute("alt").strip()
        if page.evaluate("document.documentElement.dataset.theme") == "dark":
            style = image.evaluate("image => [getComputedStyle(image).backgroundColor, getComputedStyle(image).filter]")
            assert style == ["rgb(255, 255, 255)", "none"]

    # one title, and no level of heading is skipped
    levels = page.eval_on_selector_all("article :is(h1, h2, h3, h4, h5, h6)", "all => all.map(one => +one.tagName[1])")
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))

    # nothing is wider than the screen
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert wrong == []

    # axe-core finds nothing serious or critical, contrast included (WCAG AA), with all that is folded opened
    page.evaluate(
        """() => {
            document.querySelectorAll('article details').forEach(one => { one.open = true; });
            document.querySelectorAll('article .toggle-hidden').forEach(one => one.classList.remove('toggle-hidden'));
            return new Promise(resolve => setTimeout(resolve, 600));
        }"""
    )
    found = Axe().run(page, options={"resultTypes": ["violations"], "preload": False}).response
    assert len(found["passes"]) > 10  # it has looked
    bad = [violation for violation in found["violations"] if violation["impact"] in ("serious", "critical")]
    assert [(one["id"], node["html"][:200]) for one in bad for node in one["nodes"]] == []


@SCHEMES
def test_schemes_differ(pages: Path, opened: tuple[Page, list[str]], request: pytest.FixtureRequest) -> None:
    """The page follows the reader's scheme, and its text stands out from its ground: at least 7 to 1 (WCAG AAA)."""
    page, _ = opened
    visit(page, pages / f"{PAGES[1]}.html")
    scheme = page.evaluate("document.documentElement.dataset.theme")
    assert scheme == request.node.callspec.params["opened"]
    text, caption = (
        page.evaluate(f"getComputedStyle(document.querySelector('{where}')).color")
        for where in ("article p", "article figcaption p")
    )
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert contrast(text, ground) > 7 and contrast(caption, ground) > 7


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two CSS colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_of_black_and_white_is_21() -> None:
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)


def test_the_chapters_have_mathematics_and_figures(pages: Path) -> None:
    """What the checks above look at is there: they would pass on an empty page."""
    for name in PAGES[1:4]:
        html = (pages / f"{name}.html").read_text()
        assert 'class="math' in html and "<figcaption" in html, name


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(pages: Path, name: str) -> None:
    """Every link to a place in the book names a file that exists, and an id that is in it."""
    file = pages / f"{name}.html"
    links = {unescape(link) for link in re.findall(r'<a\b[^>]*?\bhref="([^"]+)"', file.read_text())}
    inside = [urlsplit(link) for link in links if not urlsplit(link).scheme]
    assert inside
    for link in inside:
        target = (file.parent / unquote(link.path)).resolve() if link.path else file
        assert target.is_file(), link.geturl()
        if link.fragment and target.suffix == ".html":
            assert f'id="{unquote(link.fragment)}"' in target.read_text(), link.geturl()


@pytest.mark.parametrize("opened", ["light"], indirect=True)
def test_front_door_and_search(pages: Path, opened: tuple[Page, list[str]]) -> None:
    page, wrong = opened
    page.goto((pages / "index.html").as_uri())
    page.wait_for_url(f"**/{TOC['root']}.html")
    assert wrong == []
    # Sphinx fetches each hit's page for a summary, which browsers refuse to files; the hits must still be there
    page.goto((pages / "search.html").as_uri() + "?q=dobrushin")
    page.wait_for_selector("#search-results li a")
