"""Assignments: text -> what students get and what instructors keep.

An assignment is written as MyST Markdown in ``assignments/source/NN_slug.md``, with solutions and tests in it. A cell's
options say what it is:

- ``:answer: NAME``, a code cell that students fill in; between ``### BEGIN SOLUTION`` and ``### END SOLUTION`` is ours;
- ``:test: NAME`` with ``:points: 2``, the tests of that answer; between ``### BEGIN HIDDEN TESTS`` and
  ``### END HIDDEN TESTS`` are those that students do not get;
- ``+++ {"written": "NAME", "points": 4}``, a Markdown cell that a person marks; its text is the model answer;
- any other code cell is given, and put back as it was before grading.

nbgrader makes the student version and the gradebook with the hidden tests.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbgrader.converters import GenerateAssignment
from nbgrader.converters.base import NbGraderException
from nbgrader.coursedir import CourseDirectory
from traitlets.config import Config

from dobnb.book import BookError, read_text, set_parameters
from dobnb.files import write_text

HERE = Path(__file__).parent
SOURCE = HERE / "source"
RELEASE = HERE / "release"
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}


class AssignmentError(Exception):
    """An assignment's text cannot be turned into notebooks. The message is one line: what, why, what to do."""


def texts(source: Path = SOURCE) -> list[Path]:
    """The texts of the assignments, in order.

    :raises AssignmentError: there are none.
    """
    found = sorted(source.glob("*.md"))
    if not found:
        raise AssignmentError(f"no assignment (*.md) in {source}; name the folder of their texts")
    return found


def _graded(cell: NotebookNode, number: str, given: int) -> dict[str, Any] | None:
    """nbgrader's metadata for a cell of a text; None for prose."""
    options = cell.metadata
    unknown = set(options) - {"answer", "test", "written", "points", "tags"}
    if unknown:
        raise AssignmentError(f"a cell has an unknown option {min(unknown)!r}")
    role = {"schema_version": 3, "cell_type": cell.cell_type, "grade": False, "solution": False, "task": False}
    match cell.cell_type:
        case "code" if "answer" in options:
            return {**role, "grade_id": f"{number}-{options['answer']}-answer", "solution": True, "locked": False}
        case "code" if "test" in options:
            name, points = options["test"], options.get("points")
            if not isinstance(points, int | float) or points <= 0:
                raise AssignmentError(f"the test of {name!r} gives no points; add `:points: 2`")
            return {**role, "grade_id": f"{number}-{name}", "grade": True, "locked": True, "points": points}
        case "code":
            return {**role, "grade_id": f"{number}-given-{given}", "locked": True}
        case "markdown" if "written" in options:
            graded = {"grade_id": f"{number}-{options['written']}", "grade": True, "solution": True, "locked": False}
            return {**role, **graded, "points": options["points"]}
    return None


def instructor_version(text: Path, seed: int | None = None) -> NotebookNode:
    """The notebook of an assignment with its solutions and all its tests, not executed.

    :param seed: takes the place of the text's own; numbers in the questions follow from it.
    :raises AssignmentError: the text is no assignment.
    """
    try:
        notebook = read_text(text)
        if seed is not None:
            set_parameters(notebook, {"seed": seed}, text.stem)
        number, given, seen = text.stem.split("_")[0], 0, set()
        for cell in notebook.cells:
            graded = _graded(cell, f"a{number}", given + 1)
            given += graded is not None and "-given-" in graded["grade_id"]
            cell.metadata = NotebookNode({} if graded is None else {"nbgrader": graded})
            if graded is not None:
                if graded["grade_id"] in seen:
                    raise AssignmentError(f"two cells are called {graded['grade_id']!r}; names are used once")
                seen.add(graded["grade_id"])
                cell.id = graded["grade_id"][:64]
    except (AssignmentError, BookError) as error:
        raise AssignmentError(f"{text.name}: {error}") from None
    notebook.metadata = NotebookNode(kernelspec=KERNELSPEC, language_info=LANGUAGE)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def seed_of(notebook: NotebookNode) -> int | None:
    """The number that the first line ``seed = …`` of a notebook gives, if any."""
    for cell in notebook.cells:
        for line in cell.source.splitlines() if cell.cell_type == "code" else ():
            name, _, value = line.partition("=")
            digits = value.split("#")[0].strip()
            if name.strip() == "seed" and digits.isdecimal() and len(digits) < 19:
                return int(digits)
    return None


def course(folder: Path, **traits: Any) -> tuple[CourseDirectory, Config]:
    """nbgrader's course folder, and the settings that go with it."""
    ours = str(Path(sys.executable).parent)  # nbgrader calls `alembic` by its name
    if ours not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([ours, os.environ.get("PATH", os.defpath)])
    config = Config()
    config.CourseDirectory.root = str(folder)
    config.CourseDirectory.db_url = f"sqlite:///{folder / 'gradebook.db'}"
    return CourseDirectory(config=config, **traits), config


@contextmanager
def quiet() -> Iterator[list[str]]:
    """nbgrader's errors in a list instead of on the screen, where each is a page long."""
    errors: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(record.getMessage())

    log = logging.getLogger("traitlets")
    before = log.handlers[:], log.propagate
    log.handlers, log.propagate = [Keep(logging.ERROR)], False
    try:
        yield errors
    finally:
        log.handlers, log.propagate = before


def reason(errors: list[str]) -> str:
    """The line of nbgrader's `errors` that says what went wrong: the last of a traceback, if there is one."""
    said = [error.strip() for error in errors if error.strip()]
    traces = [error for error in said if "Traceback" in error]
    return (traces or said or ["it says no more"])[-1].splitlines()[-1][:200]


def generate(notebook: NotebookNode, name: str, folder: Path) -> Path:
    """Let nbgrader make the student version of `notebook` in the course `folder`, and the gradebook beside it.

    :returns: the student version.
    :raises AssignmentError: nbgrader refuses the notebook.
    """
    target = folder / "source" / name / f"{name}.ipynb"
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    directory, config = course(folder, assignment_id=name)
    with quiet() as errors:
        try:
            GenerateAssignment(coursedir=directory, config=config).start()
        except (NbGraderException, SystemExit):
            raise AssignmentError(f"{name}: nbgrader makes no student version of it: {reason(errors)}") from None
    return folder / "release" / name / f"{name}.ipynb"


def write(source: Path, release: Path, instructor: Path, seed: int | None = None) -> None:
    """Write the student version of every assignment to `release` and the instructor's to `instructor`.

    :raises AssignmentError: a text is no assignment; nothing is written then.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = []
        for text in texts(source):
            notebook = instructor_version(text, seed)
            made.append((text.stem, generate(notebook, text.stem, Path(folder)), notebook))
        for name, student, notebook in made:
            write_text(release / f"{name}.ipynb", student.read_text(encoding="utf-8"))
            write_text(instructor / f"{name}.ipynb", nbformat.writes(notebook) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m assignments.release", description="Make the assignments.")
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder of the texts (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RELEASE, help="where the student versions go (default: %(default)s)")
    parser.add_argument("--instructor", type=Path, default=Path("_build/instructor"), help="and the instructor's")
    parser.add_argument("--seed", type=int, help="this cohort's seed (default: the text's own)")
    parser.add_argument("--seeds", type=Path, help="CSV with the columns student, seed: a folder for each student")
    given = parser.parse_args()
    try:
        if given.seeds:
            from assignments.grade import read_seeds

            for student, seed in read_seeds(given.seeds).items():
                write(given.source, given.out / student, given.instructor / student, seed)
        else:
            write(given.source, given.out, given.instructor, given.seed)
    except AssignmentError as error:
        print(f"assignments: {error}", file=sys.stderr)
        return 2
    print(f"student versions: {given.out}\nwith solutions, not for students: {given.instructor}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
