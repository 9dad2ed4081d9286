"""The assignments: every question can be answered, tells right from nearly right, and keeps its solution to itself."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
import pytest

from assignments.inside import ALONE
from assignments.text import RELEASE, AssignmentError, instructor_version, seed_of, texts
from dobnb import book, weights
from tests.assignment_answers import WRONG

ROOT = Path(__file__).parents[1]
CLASSROOM = ROOT / ".venv-classroom" / "bin" / "python"
TEXTS = {text.stem: text for text in texts()}
HIDDEN = re.compile(r"^ *### BEGIN (SOLUTION|HIDDEN TESTS)\n(.*?)^ *### END \1", re.S | re.M)


@pytest.fixture(scope="module", autouse=True)
def no_windows() -> None:
    matplotlib.use("agg")


@pytest.fixture(scope="module")
def minilm() -> None:
    if not weights.is_cached("minilm-l6"):
        weights.fetch("minilm-l6")


def release(name: str) -> nbformat.NotebookNode:
    return nbformat.read(RELEASE / f"{name}.ipynb", as_version=4)


@cache
def questions(name: str) -> dict[str, Mapping[str, Any]]:
    """What nbgrader is told about each graded cell of an assignment."""
    told = [cell.metadata.get("nbgrader", {}) for cell in instructor_version(TEXTS[name]).cells]
    return {one["grade_id"]: one for one in told if one.get("grade")}


def failing(name: str, answers: Mapping[str, str], seed: int | None = None, hidden: bool = True) -> set[str]:
    """Run an assignment's cells with `answers` in place of the reference's; the questions whose tests fail."""
    failed, space = set(), {"__name__": "__main__"}
    for cell in instructor_version(TEXTS[name], seed).cells:
        if cell.cell_type != "code":
            continue
        told = cell.metadata.nbgrader
        source = answers.get(told.grade_id.removesuffix("-answer"), cell.source) if told.solution else cell.source
        source = HIDDEN.sub("", source) if told.grade and not hidden else source
        try:
            exec(compile(source, told.grade_id, "exec"), space)
        except Exception as error:
            if told.grade:
                assert str(error), f"{told.grade_id} fails without a word"
                failed.add(told.grade_id)
            elif not answers:  # as a kernel does, go on
                raise
    return failed


@pytest.mark.usefixtures("minilm")
@pytest.mark.parametrize("name", TEXTS)
def test_reference_passes_with_any_seed(name: str) -> None:
    for seed in (None, 0, 123456789):
        assert failing(name, {}, seed) == set(), seed


@pytest.mark.parametrize("seed", range(8, 40))
def test_by_hand_can_be_answered_with_any_seed(seed: int) -> None:
    assert failing("01_kappa_and_rollout", {}, seed) == set()


def test_every_autograded_question_has_wrong_answers_one_of_them_nearly_right() -> None:
    graded = [one for name in TEXTS for one, told in questions(name).items() if not told["solution"]]
    assert list(WRONG) == graded
    assert all(any(told.startswith("nearly") for told in wrong) for wrong in WRONG.values())


CASES = [(question, wrong) for question, answers in WRONG.items() for wrong in answers]


@pytest.mark.usefixtures("minilm")
@pytest.mark.parametrize(("question", "wrong"), CASES)
def test_wrong_answer_loses_that_question_alone(question: str, wrong: str) -> None:
    name = next(name for name in TEXTS if question in questions(name))
    answer = {question: WRONG[question][wrong]}
    assert failing(name, answer) == {question}
    assert failing(name, answer, hidden=False) == (set() if wrong.startswith("nearly") else {question})


@pytest.mark.parametrize("name", TEXTS)
def test_points_and_sections(name: str) -> None:
    cells = release(name).cells
    told = questions(name)
    whole, by_hand = sum(one["points"] for one in told.values()), [one for one in told.values() if one["solution"]]
    front = cells[0].source
    assert f"**Points** {whole}, of which {by_hand[0]['points']} for" in front and len(by_hand) == 1
    for part in ("**You will be able to**", "**Time**", "**Before you start**"):
        assert part in front
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    said = [int(points) for points in re.findall(r"^## \d\. .*?\((\d+) points?", prose, re.M)]
    assert said == [one["points"] for one in told.values()]
    rubric = [int(points) for points in re.findall(r"^\| (\d) \|", prose, re.M)]
    assert sum(rubric) == by_hand[0]["points"]


def test_questions_that_the_package_could_answer_are_tested_without_it() -> None:
    """And students see that: it is the first line of the test."""
    cells = [cell for name in TEXTS for cell in release(name).cells if cell.source.startswith(ALONE)]
    assert [cell.metadata.nbgrader.grade_id for cell in cells] == [
        "a01-total-variation", "a01-kappa", "a01-doeblin", "a01-rollout", "a02-condition", "a02-gap",
        "a03-draw", "a03-wilson", "a04-restrict",
    ]  # fmt: skip
    assert not any("check_equality" in cell.source or "dobnb." in cell.source for cell in cells)


@pytest.mark.parametrize("name", TEXTS)
def test_student_version_is_a_plain_notebook(name: str) -> None:
    notebook = release(name)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}  # no pairing, no toolbar
    assert {key for cell in notebook.cells for key in cell.metadata} <= {"nbgrader", "deletable", "editable"}
    assert not any(cell.get("outputs") for cell in notebook.cells)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert "BEGIN" not in code and code.count("raise NotImplementedError()") == len(questions(name)) - 1
    allowed = {"dobnb", "fractions", "math", "matplotlib", "numpy", "random", "torch"}
    assert set(re.findall(r"^(?:from|import) (\w+)", code, re.M)) <= allowed
    assert seed_of(notebook.cells) == 2026


def secrets(name: str) -> set[str]:
    """Lines of solutions, hidden tests and model answers that stand nowhere else in the assignment."""
    text = TEXTS[name].read_text(encoding="utf-8")
    parts = [part for _, part in HIDDEN.findall(text)]
    parts += re.findall(r'^\+\+\+ {"written".*?}\n(.*?)(?=^## |^```|\Z)', text, re.S | re.M)
    rest = text
    for part in parts:
        rest = rest.replace(part, "")
    lines = {line.strip() for part in parts for line in part.splitlines()}
    return {line for line in lines if len(line) > 24 and line not in rest}


def published() -> list[Path]:
    """What students get or can open: what is handed out, and the book with its sources and search index."""
    files = [path for path in RELEASE.rglob("*") if path.is_file()]
    files += [path for path in (ROOT / "book").rglob("*") if path.suffix in {".md", ".ipynb", ".json"}]
    if not book.is_rendered(ROOT):
        book.html(ROOT)
    kinds = {".html", ".js", ".txt", ".ipynb", ".md"}
    pages = [path for path in (ROOT / "_build" / "html").rglob("*") if path.suffix in kinds]
    assert any(path.name == "searchindex.js" for path in pages) and any("_sources" in path.parts for path in pages)
    return files + pages


def test_nothing_leaks() -> None:
    """By the lines themselves, as JSON and HTML write them too; not by the markers around them."""
    wanted = {name: secrets(name) for name in TEXTS}
    assert all(len(lines) > 20 for lines in wanted.values())
    forms = {
        form: (name, line)
        for name, lines in wanted.items()
        for line in lines
        for form in (line, json.dumps(line)[1:-1], line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
    }
    pattern = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))))
    for path in published():
        found = pattern.search(path.read_text(encoding="utf-8", errors="replace"))
        assert found is None, (path.relative_to(ROOT), forms[found.group()])


def test_leak_test_sees_a_leak() -> None:
    whole = nbformat.writes(instructor_version(TEXTS["01_kappa_and_rollout"]))
    lines = secrets("01_kappa_and_rollout")
    assert all(json.dumps(line)[1:-1] in whole for line in lines)


def test_no_exercise_of_the_book_is_graded() -> None:
    """No sentence of a question stands in an exercise."""
    exercises = "".join(
        part for text in (ROOT / "book" / "text").glob("*.md")
        for part in re.findall(r"^`+{exercise}.*?^`+$", text.read_text(encoding="utf-8"), re.S | re.M)
    )  # fmt: skip
    assert exercises.count("{exercise}") > 25
    shared = " ".join(exercises.split())
    for name in TEXTS:
        prose = " ".join(cell.source for cell in release(name).cells if cell.cell_type == "markdown")
        sentences = [" ".join(one.split()) for one in re.split(r"(?<=[.?:]) ", prose.replace("\n", " "))]
        assert not [one for one in sentences if len(one) > 30 and one in shared]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (":points: 2\n", "", "gives no points"),
        (":answer: kappa", ":reply: kappa", "unknown option 'reply'"),
        (":test: kappa", ":test: doeblin", "two cells are called 'a01-doeblin'"),
    ],
)
def test_text_that_is_no_assignment(tmp_path: Path, before: str, after: str, said: str) -> None:
    text = tmp_path / "01_kappa_and_rollout.md"
    text.write_text(TEXTS[text.stem].read_text().replace(before, after))
    with pytest.raises(AssignmentError, match=said) as error:
        instructor_version(text)
    assert str(error.value).startswith("01_kappa_and_rollout.md: ") and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def classroom() -> Path:
    if not CLASSROOM.exists():
        pytest.skip("no .venv-classroom; `make assignments` installs it")
    return CLASSROOM


def make(classroom: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [classroom, "-m", "assignments.release", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_release_is_what_the_texts_give(classroom: Path, tmp_path: Path) -> None:
    """Byte for byte; and the instructor's version has what the student's has not."""
    done = make(classroom, "--out", tmp_path / "out", "--instructor", tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == list(TEXTS)
    for name in TEXTS:
        assert (tmp_path / "out" / f"{name}.ipynb").read_bytes() == (RELEASE / f"{name}.ipynb").read_bytes(), name
        whole = (tmp_path / "whole" / f"{name}.ipynb").read_text()
        assert all(json.dumps(line)[1:-1] in whole for line in secrets(name))


def test_a_cohort_has_its_seed(classroom: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "01_kappa_and_rollout.md").write_text(TEXTS["01_kappa_and_rollout"].read_text())
    table = tmp_path / "seeds.csv"
    table.write_text("student,seed\nada,7\nbob,8\n")
    whole = ["--source", source, "--instructor", tmp_path / "whole"]
    assert make(classroom, *whole, "--out", tmp_path / "one", "--seed", "5").returncode == 0
    assert make(classroom, *whole, "--out", tmp_path / "each", "--seeds", table).returncode == 0
    seeds = {
        str(path.relative_to(tmp_path)): seed_of(nbformat.read(path, as_version=4).cells)
        for folder in ("one", "each")
        for path in (tmp_path / folder).rglob("*.ipynb")
    }
    name = "01_kappa_and_rollout.ipynb"
    assert seeds == {f"one/{name}": 5, f"each/ada/{name}": 7, f"each/bob/{name}": 8}


def test_release_writes_nothing_when_a_text_is_wrong(classroom: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, text in TEXTS.items():
        (source / f"{name}.md").write_text(text.read_text())
    broken = source / "04_measure_a_model.md"
    broken.write_text(broken.read_text().replace("### END SOLUTION", "", 1))
    done = make(classroom, "--source", source, "--out", tmp_path / "out", "--instructor", tmp_path / "whole")
    assert done.returncode == 2 and done.stderr.startswith("assignments: 04_measure_a_model"), done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_classroom_code_needs_no_nbgrader_to_be_read() -> None:
    code = "import assignments.grade, assignments.text, sys; assert 'nbgrader' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
