"""Text -> what students get and what instructors keep. nbgrader takes the solutions and the hidden tests out."""

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

from assignments.text import RELEASE, SOURCE, AssignmentError, instructor_version, texts
from dobnb.files import write_text


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
    parser.add_argument("--out", type=Path, default=RELEASE, help="for the student versions (default: %(default)s)")
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
