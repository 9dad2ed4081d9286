"""An assignment's text, and the notebook with solutions and all tests that it describes.

An assignment is written as MyST Markdown in ``assignments/source/NN_slug.md``. A cell's options say what it is:

- ``:answer: NAME``, a code cell that students fill in; between ``### BEGIN SOLUTION`` and ``### END SOLUTION`` is ours;
- ``:test: NAME`` with ``:points: 2``, the tests of that answer; between ``### BEGIN HIDDEN TESTS`` and
  ``### END HIDDEN TESTS`` are those that students do not get; one that starts with ``# Write it yourself:`` is graded
  while the functions of `dobnb` refuse to work;
- ``+++ {"written": "NAME", "points": 4}``, a Markdown cell that a person marks; its text is the model answer;
- any other code cell is given, and put back as it was before grading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nbformat import NotebookNode, from_dict

from dobnb.book import BookError, read_text, set_parameters

HERE = Path(__file__).parent
ROOT = HERE.parent
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
            cell.metadata = from_dict({} if graded is None else {"nbgrader": graded})
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


def seed_of(cells: Iterable[Mapping[str, Any]]) -> int | None:
    """The number that the first line ``seed = …`` of a notebook's cells gives, if any."""
    for cell in cells:
        source = cell.get("source")
        lines = "".join(line for line in source if isinstance(line, str)) if isinstance(source, list | str) else ""
        for line in lines.splitlines() if cell.get("cell_type") == "code" else ():
            name, _, value = line.partition("=")
            digits = value.split("#")[0].strip()
            if name.strip() == "seed" and digits.isdecimal() and len(digits) < 19:
                return int(digits)
    return None
