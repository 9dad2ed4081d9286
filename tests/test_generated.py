"""What is made when pages are rendered: presets, boxes, linked words, the table at a glance, launch buttons."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dobnb import glance, pages
from dobnb.pages import PageError
from dobnb.published import TABLE_1, TABLE_3

ROOT = Path(__file__).parents[1]
RECORD = {
    "when": "2026-01-02T03:04:05Z",
    "seconds": 61.5,
    "peak_mb": 1234,
    "machine": {"processor": "P", "cores": 2, "system": "Linux", "architecture": "x"},
    "weights": {"minilm-l6": "f" * 64},
}


def lay(root: Path, **texts: str) -> Path:
    """A folder with a book of these pages."""
    (root / "book").mkdir(parents=True)
    (root / "_config.yml").write_text("title: A\n")
    for name, text in texts.items():
        (root / "book" / f"{name}.md").write_text(text)
    return root


# The box of a chapter


def test_a_box_says_command_time_memory_and_download() -> None:
    box = pages.run_box("07_how_fast", RECORD)
    assert "python -m dobnb book run --only 07\n" in box
    assert "took 62 seconds and 1.2 GB of memory, on 2 cores (P), 2 January 2026." in box
    assert "downloads the weights `minilm-l6` (84 MB), once" in box
    assert "<07_how_fast.ipynb>" in box and "<text/07_how_fast.md>" in box
    assert "downloads nothing" in pages.run_box("01", {**RECORD, "weights": {}})
    assert "last run" not in pages.run_box("01", None)


def test_a_box_without_a_record_says_what_is_downloaded() -> None:
    """What the code of the text names is downloaded, not what its prose mentions."""
    text = "`dinov2-small-saliency` is\n```{code-cell} ipython3\nmodel = 'minilm-l6'\n```\nmore `dinov2-small-saliency`"
    box = pages.run_box("07_how_fast", None, text)
    assert "downloads the weights `minilm-l6` (84 MB), once" in box and "dinov2" not in box
    assert "downloads nothing" in pages.run_box("07_how_fast", None, "# minilm-l6\n\n```{code-cell}\n1\n```")


@pytest.mark.parametrize(
    ("source", "before", "after"),
    [
        ("# T\n\nA.\n\n## Time and hardware\n\nCPU.\n\n## Claim\n\nB.", "CPU.", "## Claim"),
        ("# T\n\nA.\n\n## Time and hardware\n\nCPU.", "CPU.", None),
        ("(ch)=\n# T\n\nA.", "# T", "A."),
    ],
)
def test_the_box_has_its_place(source: str, before: str, after: str | None) -> None:
    cells = [{"cell_type": "code", "source": "# Time"}, {"cell_type": "markdown", "source": source.splitlines(True)}]
    pages._add_run_box(cells, "BOX")
    found = "".join(cells[1]["source"])
    assert found.replace("BOX", "").split() == source.split()
    assert re.search(rf"{re.escape(before)}\n\nBOX\n\n{re.escape(after or '')}", found)


# Words of the glossary


def test_the_first_plain_mention_of_a_word_is_linked() -> None:
    source = (
        "# A gap\n\n`gap` $gap$ [gap](x) {prf:ref}`gap` *gap* The Gap and a gap.\n\n```\ngap\n```\n\n"
        "| tight gaps |\n$$\ntight\n$$\nTwo content tokens, tight; a gaping hole."
    )
    cells = [{"cell_type": "code", "source": "gap"}, {"cell_type": "markdown", "source": source}]
    pages._link_terms(cells, ["gap", "tight", "content token", "total variation"])
    expected = source.replace("The Gap and", "The {term}`Gap <gap>` and")
    expected = expected.replace("content tokens,", "{term}`content tokens <content token>`,")
    expected = expected.replace(" tight;", " {term}`tight <tight>`;")
    assert cells[1]["source"] == expected and cells[0]["source"] == "gap"


def test_words_are_linked_in_the_chapters_and_nowhere_else(pages: Path) -> None:
    chapter = (pages / "book" / "02_when_the_bound_is_tight.html").read_text()
    assert chapter.count('href="glossary.html#term-gap"') == 1


# Parts and pages


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    root = lay(tmp_path / "root", index="# A\n\n% generated: nonsense\n")
    with pytest.raises(PageError, match=r"book/index.md: nothing generated is called 'nonsense'; there are at_a"):
        pages.stage(root, tmp_path / "staged")


def test_staging_changes_only_the_copy(tmp_path: Path) -> None:
    root = lay(tmp_path / "root", index="# A\n\n% generated: explorer_presets\n% a comment stays\n")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / "old").touch()
    pages.stage(root, tmp_path / "staged")
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in (tmp_path / "staged").rglob("*")) == ["_config.yml", "book", "index.md"]
    staged = (tmp_path / "staged" / "book" / "index.md").read_text()
    assert "% generated" not in staged and "% a comment stays" in staged and '"explorer-presets"' in staged


def test_every_page_of_this_book_says_what_it_asks_for() -> None:
    asked = {found[1] for page in (ROOT / "book").glob("*.md") for found in pages.GENERATED.finditer(page.read_text())}
    assert asked == set(pages.PARTS)


def test_every_statement_and_exercise_is_listed() -> None:
    book = pages.Book(ROOT)
    texts = "\n".join(book.texts.values())
    labels = re.findall(r"^:label: *((?:def|thm|lem|prop|cor|ex)-[\w-]+)$", texts, re.MULTILINE)
    listed = pages.statements(book, ROOT) + pages.exercises(book, ROOT)
    assert len(labels) > 50
    assert [label for label in labels if f"`{label}`" not in listed] == []


# Launch buttons


def test_launch_buttons_only_with_a_repository() -> None:
    ours = (ROOT / "_config.yml").read_text()
    settings = yaml.safe_load(ours)
    if not settings.get("repository", {}).get("url"):
        assert pages.with_launch_buttons(ours) == ours
    for empty in ("title: A\n", "title: A\nrepository:\n  url: ''\n"):
        assert pages.with_launch_buttons(empty) == empty
    filled = "title: A\nrepository:\n  url: https://example.org/a/b\nhtml:\n  use_edit_page_button: false\n"
    found = yaml.safe_load(pages.with_launch_buttons(filled))
    assert found["launch_buttons"]["binderhub_url"] and found["html"]["use_repository_button"]
    assert found["repository"] == {"url": "https://example.org/a/b"} and not found["html"]["use_edit_page_button"]


# At a glance


def measurement(title: str, name: str, content: list[int], everything: list[int]) -> dict:
    born = {
        "model": {"name": name, "title": title, "source": "here"},
        "inputs": {"name": "10 images"},
        "started": "2026-01-02T03:04:05Z",
    }
    per_input = {"content": content, "all": everything}
    return {"schema": 2, "provenance": born, "layers": len(content), "n": [10] * len(content), "per_input": per_input}


def test_a_measurement_of_the_paper_s_model_stands_in_its_row(tmp_path: Path) -> None:
    (tmp_path / "dinov2-small_ten.json").write_text(
        json.dumps(measurement("DINOv2-S", "dinov2-small", [10, 10], [10, 8]))
    )
    (tmp_path / "dinov2-small_ten_112px.json").write_text(
        json.dumps(measurement("DINOv2-S", "dinov2-small", [0, 0], [0, 0]))
    )
    (tmp_path / "minilm-l6_ten.json").write_text(json.dumps(measurement("MiniLM-L6", "minilm-l6", [9, 10], [5, 5])))
    (tmp_path / "other.json").write_text("{}")
    table = glance.table(tmp_path)
    (row,) = (line for line in table.splitlines() if line.startswith("| DINOv2-S |"))
    assert row == (
        "| DINOv2-S | 100%, 91.2% | 100%, 90.0% | `here`; 10 images; 2 January 2026; "
        "{download}`record <../results/dinov2-small_ten.json>` | +0.0, -1.2 points |"
    )
    (row,) = (line for line in table.splitlines() if "MiniLM" in line)
    assert row.startswith("| *MiniLM-L6* | | 95.0%, 50.0% |") and row.endswith("| stands in for language |")
    assert "DINOv2-S" not in glance.unmeasured(tmp_path) and "RoBERTa" in glance.unmeasured(tmp_path)


def test_a_recorded_share_of_two_tokens_stands_beside_the_exact_one() -> None:
    """Of two tokens exactly a half of the matrices satisfy the condition, of three exactly a third."""
    (row,) = glance._random_row({2: 49.9, 9: 26.9})
    assert "| 49.9% (2 tokens) to 26.9% (9) |" in row and "1/2 for 2 tokens" in row
    (row,) = glance._random_row({3: 33.3, 9: 26.9})
    assert "for 2 tokens" not in row


def test_every_system_of_the_paper_has_a_row(tmp_path: Path) -> None:
    systems = [*TABLE_1, "ViT-B/16", "RoBERTa", "DistilBERT"]
    systems += [f"FT-Transformer, {row.configuration}" for row in TABLE_3.values()]
    for folder in (ROOT / "results", tmp_path):
        rows = [line.split("|")[1].strip() for line in glance.table(folder).splitlines()]
        assert [rows.count(name) for name in [*systems, "uniformly random matrices"]] == [1] * (len(systems) + 1)
    assert glance.unmeasured(tmp_path) == systems


def test_every_paragraph_of_the_opening_page_leads_somewhere() -> None:
    """What states a fact there links to where it is shown."""
    text = re.sub(r"^```\n.*?^```$", "", (ROOT / "book" / "index.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    text, _, _ = text.partition("## How to rerun it")  # from there on it says what to do
    prose = [one for one in re.split(r"\n\n|\n(?=\d+\. )", text) if one.strip() and not one.startswith(("#", "%"))]
    assert len(prose) > 10
    assert [one for one in prose if not re.search(r"\{(doc|numref|eq|ref|prf:ref|cite)\}`", one)] == []


def test_the_table_agrees_with_the_records() -> None:
    record = json.loads((ROOT / "results" / "ft_transformer_california_3.json").read_text())
    held = sum(sum(run["attention"]["features"]["held"]) for run in record["runs"])
    share = 100 * held / sum(2 * run["attention"]["n"] for run in record["runs"])
    (row,) = (line for line in glance.table(ROOT / "results").splitlines() if "California, 3 blocks" in line)
    assert f"| {share:.1f}%, " in row and f"| {share - 18.7:+.1f}, " in row


def test_curves_of_the_paper_are_its_table_4() -> None:
    paper, _ = glance.curves(ROOT / "results")
    ((depth, shares),) = paper["DeiT-B"]
    assert depth[-1] == 1 and shares[-1] == 0 and shares[10] == pytest.approx(100 * (1 - 50 / 512))
    assert set(shares[:10]) == {100} and len(paper["DINOv2, four models"]) == 4


def test_the_figure_is_described() -> None:
    said = glance.description(ROOT / "results")
    assert "DeiT-B of the paper, 0 to 100 per cent" in said and "random matrices" in said
    assert glance.figure(ROOT / "results").axes


def test_staging_this_book_needs_no_torch(tmp_path: Path) -> None:
    poison = tmp_path / "poison"
    poison.mkdir()
    (poison / "torch.py").write_text("raise RuntimeError('torch was imported')\n")
    code = "import sys; from pathlib import Path; from dobnb import pages; pages.stage(*map(Path, sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(poison), str(ROOT)])}
    command = [sys.executable, "-c", code, str(ROOT), str(tmp_path / "staged")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "staged" / "book" / "at_a_glance.png").stat().st_size > 10_000


def test_time_of_grading_is_the_record(tmp_path: Path) -> None:
    book = pages.Book(tmp_path)
    assert "has not been recorded" in pages.grading(book, tmp_path)
    record = {
        "provenance": {"cores": 2, "processor": "P", "load_average": [0.1, 2.5]},
        "submissions": 60,
        "at_once": 3,
        "seconds": 420,
    }
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "grading.json").write_text(json.dumps(record))
    assert pages.grading(book, tmp_path) == (
        "60 submissions, 3 at once, took 7 minutes on 2 cores of P (load average 0.1 at the start, 2.5 at the end)."
    )
