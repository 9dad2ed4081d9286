"""One submission, in a process of its own: put in order, executed and scored by nbgrader, shown in a feedback page.

The grader starts ``python -m assignments.worker JOB.json`` and reads ``result.json``. Whatever happens here, an
exception, a kill, memory that is not there, costs this one submission.
"""

from __future__ import annotations

import html
import json
import logging
import re
import resource
import secrets
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbconvert.exporters.html
import nbformat
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbconvert.exporters.exporter import ResourcesDict
from nbconvert.filters.markdown_mistune import IPythonRenderer
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from nbgrader.api import Gradebook
from nbgrader.converters import Autograde, GenerateFeedback
from nbgrader.preprocessors import ClearHiddenTests, Execute
from nbgrader.utils import is_grade, is_solution

from assignments.release import course, quiet, reason
from assignments.sandbox import Limits, Room, kernel_manager
from assignments.text import HERE, KERNELSPEC
from dobnb.files import write_text

STUDENT = "student"
"""What every student is called within nbgrader: names from outside stay outside."""
HIDDEN = re.compile(r"^ *### BEGIN HIDDEN TESTS\n(.*?)^ *### END HIDDEN TESTS", re.S | re.M)
LONGEST = 100_000
"""Characters of a cell that are read; of its output that are kept."""
ELSEWHERE = "*Nothing in this cell; there is text in cells of the student's own.*"
"""Stands for a written answer, so that it is marked by hand."""


class UnusableError(Exception):
    """A submission that cannot be graded at all. The message is its status."""


def read_submission(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook from a stranger, as far as they are cells.

    :raises UnusableError: it is no notebook, or has no cells.
    """
    try:
        cells = json.loads(path.read_bytes())["cells"]
        found = [
            cell | {"source": "".join(cell["source"])[:LONGEST].encode(errors="replace").decode()}  # no surrogates
            for cell in cells
            if cell.get("cell_type") in ("code", "markdown", "raw")
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UnusableError("unreadable") from None
    if not found:
        raise UnusableError("no cells")
    return found


def grade_id(cell: Mapping[str, Any]) -> str | None:
    """The name that nbgrader knows a cell by, if it says one."""
    metadata = cell.get("metadata")
    told = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    name = told.get("grade_id") if isinstance(told, dict) else None
    return name if isinstance(name, str) else None


def rebuild(cells: list[dict[str, Any]], master: NotebookNode) -> NotebookNode:
    """The student version `master` with this student's answers in it, and their other cells where they had put them.

    So tests and given cells that were deleted, altered, renamed, doubled or moved are as they were, and nothing of the
    file but the text of its cells goes on: no output, no tag, no attachment. Prose in cells of the student's own may be
    the written answer, so a person has to look.

    :raises UnusableError: no cell belongs to the assignment.
    """
    known = {cell.metadata.nbgrader.grade_id: cell for cell in master.cells if "nbgrader" in cell.metadata}
    answers: dict[str, str] = {}
    others: dict[str | None, list[NotebookNode]] = {}
    last = None
    for cell in cells:
        name = grade_id(cell)
        if name in known and name not in answers:
            answers[name], last = cell["source"], name
        elif cell["cell_type"] == "raw":  # neither code nor prose, unless it is an answer made raw by accident
            continue
        elif name not in known or is_solution(known[name]):  # a copied answer counts as a cell of the student's
            make = new_code_cell if cell["cell_type"] == "code" else new_markdown_cell
            others.setdefault(last, []).append(make(cell["source"]))
    if not answers:
        raise UnusableError("no cell of the assignment")
    ours = {"", *(cell.source.strip() for cell in master.cells)}
    prose = any(one.cell_type == "markdown" and one.source.strip() not in ours for of in others.values() for one in of)
    ordered = others.get(None, [])
    for name, cell in known.items():
        cell = NotebookNode(cell)
        if is_solution(cell):
            answer = answers.get(name, "").strip() and answers[name]
            # An empty stub would undo an answer that stands in a cell of the student's own.
            if cell.cell_type == "markdown" and prose and answer.strip() in ("", cell.source.strip()):
                answer = ELSEWHERE
            cell.source = answer or ("# nothing in this cell" if cell.cell_type == "code" else cell.source)
        ordered += [cell, *others.get(name, ())]
    for number, cell in enumerate(ordered):
        told = cell.metadata.get("nbgrader", {})
        given = told.get("locked") and not told.get("grade")
        cell.id = f"{'given' if given else 'cell'}-{number}"
    return new_notebook(cells=ordered, metadata=NotebookNode(kernelspec=KERNELSPEC))


def _error(name: str, message: str) -> NotebookNode:
    line = (f"{name}: {message}" if message else name)[:2000]
    return nbformat.v4.new_output("error", ename=name, evalue=message[:2000], traceback=[line])


def _executor(room: Room, limits: Limits, sockets: str, statuses: dict[str, str], messages: dict[str, str]) -> Any:
    """nbgrader's step that executes a notebook, with a sandboxed kernel that may die.

    A test counts as passed only if the kernel said so and then, as probes, failed two tests that nothing can pass. What
    tests show on the way is dropped, so that no output of a student's function can pass for a result.
    """
    inside = f"tests_{secrets.token_hex(8)}"

    class SandboxedExecute(Execute):
        early = ""
        """Why the kernel ended before any of the student's code ran, if it did."""

        def __init__(self, **traits: Any) -> None:
            super().__init__(**traits | {"kernel_manager_class": kernel_manager(room, limits, sockets)})
            self.iopub_timeout, self.startup_timeout = 30, 120
            # Given cells load models: on a busy machine that takes long, and is no fault of the student's.
            self.timeout_func = lambda cell: int(limits.whole if cell.id.startswith("given") else limits.cell)
            self.ended, self.written, self.reply, self.hidden = "", 0, {}, None

        def on_cell_executed(self, **said: Any) -> None:
            self.reply = said["execute_reply"]["content"]
            super().on_cell_executed(**said)

        def process_message(self, message: dict[str, Any], cell: NotebookNode, index: int) -> NotebookNode | None:
            self.written += len(str(message["content"]))
            if self.written > limits.output:
                self.km.watch.kill("output limit")
                return None
            return super().process_message(message, cell, index)

        def attempt(self, cell: NotebookNode, index: int) -> None:
            """Execute `cell`, if the kernel still lives; note if it does no longer."""
            self.reply = {}
            if not self.ended:
                try:
                    self.execute_cell(cell, index, store_history=False)
                except (DeadKernelError, CellTimeoutError) as error:
                    late = isinstance(error, CellTimeoutError)
                    self.ended = self.km.watch.reason or ("time limit" if late else "the kernel died")
                    if late:
                        self.km.watch.kill(self.ended)
                except Exception as error:  # what a hostile kernel sends may not be what nbclient expects
                    self.ended = self.km.watch.reason or f"the kernel said nonsense ({type(error).__name__})"
                    self.km.watch.kill(self.ended)

        def preprocess_cell(
            self, cell: NotebookNode, resources: ResourcesDict, index: int
        ) -> tuple[NotebookNode, ResourcesDict]:
            if cell.cell_type != "code":
                return cell, resources
            if self.hidden is None:
                self.hidden = hidden_lines(self.nb.cells)
                self.attempt(_opening(inside, self.nb.cells), index)
                type(self).early = self.ended
            before = self.ended
            self.attempt(_test(inside, cell.source) if is_grade(cell) else cell, index)
            if self.ended and not before and cell.id.startswith("given"):
                self.ended += " in a given cell"
            reply, ended = self.reply, self.ended
            if is_grade(cell):
                status = f"stopped: {ended}" if ended else "passed" if reply.get("status") == "ok" else "failed"
                if reply.get("ename") == "CellTimeoutError":
                    status = "time limit"
                if status == "passed" and not self.fails(index):
                    status = "tampered"
                statuses[cell.metadata.nbgrader.grade_id] = status
                if status != "passed":
                    said = (str(reply.get("ename")), str(reply.get("evalue"))) if status == "failed" else (status, "")
                    cell.outputs = [_error(*(without(part, self.hidden) for part in said))]
                    messages[cell.metadata.nbgrader.grade_id] = cell.outputs[0].traceback[0]
                else:
                    cell.outputs = []
            else:
                cell.outputs = [_plain(output, self.hidden) for output in cell.outputs[:100]]
                if ended and not cell.outputs:
                    cell.outputs = [_error(ended, "this cell did not run to its end")]
            cell.execution_count = None  # without a history all are 1, and a history would hold the hidden tests
            self.nb.cells[index] = cell
            return cell, resources

        def fails(self, index: int) -> bool:
            """Whether tests that must fail do."""
            failed = []
            for make in (new_code_cell, lambda source: _test(inside, source)):
                secret = secrets.token_hex(8)
                self.attempt(make(f"assert 0 == 1, {secret!r}"), index)
                failed.append((self.reply.get("ename"), self.reply.get("evalue")) == ("AssertionError", secret))
            return all(failed)

    return SandboxedExecute


def _opening(name: str, cells: list[NotebookNode]) -> NotebookNode:
    """The first cell of all: it makes a module `name` of :mod:`assignments.inside` and lets it begin."""
    text = (HERE / "inside.py").read_text(encoding="utf-8")
    given = [cell.source for cell in cells if cell.id.startswith("given")]
    source = (
        f"import sys, types\nsys.modules[{name!r}] = types.ModuleType({name!r})\n"
        f"exec({text!r}, vars(sys.modules[{name!r}]))\nsys.modules[{name!r}].begin({given!r})\ndel sys, types"
    )
    cell = new_code_cell(source)
    cell.id = "given-first"  # it loads what given cells load
    return cell


def _test(name: str, source: str) -> NotebookNode:
    """A cell that lets the module `name` run a test."""
    return new_code_cell(f"import {name}\n{name}.test({source!r})")


def hidden_lines(cells: list[NotebookNode]) -> set[str]:
    """What no page may show: lines of hidden tests, as they are and as Python and JSON quote them."""
    parts = [HIDDEN.findall(cell.source) for cell in cells if is_grade(cell) and cell.cell_type == "code"]
    lines = {line.strip() for part in parts for text in part for line in text.splitlines()}
    return {form for line in lines if len(line) > 24 for form in (line, repr(line)[1:-1], json.dumps(line)[1:-1])}


def without(text: str, hidden: set[str]) -> str:
    """`text` without the lines that hold one of `hidden`."""
    lines = text.split("\n")
    return "\n".join("(left out)" if any(form in line for form in hidden) else line for line in lines)


def _plain(output: NotebookNode, hidden: set[str]) -> NotebookNode:
    """An output, reduced to what can do no harm on a page: text and PNG pictures."""
    match output.output_type:
        case "stream":
            return nbformat.v4.new_output("stream", name="stdout", text=without(str(output.text)[:LONGEST], hidden))
        case "error":
            return _error(*(without(str(part), hidden) for part in (output.ename, output.evalue)))
    data = output.get("data", {})
    kept = {kind: str(data[kind])[: 20 * LONGEST] for kind in ("text/plain", "image/png") if kind in data}
    kept |= {"text/plain": without(kept["text/plain"], hidden)} if "text/plain" in kept else {}
    return nbformat.v4.new_output("display_data", data=kept)


def autograde(job: Mapping[str, Any]) -> dict[str, Any]:
    """Execute and score a submission.

    :returns: ``status``, ``questions`` (points, maximum, status and message by name) and ``written`` (by name, the
        answers that a person marks).
    :raises UnusableError: it cannot be graded at all.
    """
    folder, name = Path(job["folder"]), job["assignment"]
    room, limits = Room(**job["room"]), Limits(**job["limits"])
    master = nbformat.read(folder / "release" / name / f"{name}.ipynb", as_version=4)
    submitted = folder / "submitted" / STUDENT / name / f"{name}.ipynb"
    submitted.parent.mkdir(parents=True, exist_ok=True)
    notebook = rebuild(read_submission(Path(job["submission"])), master)
    nbformat.write(notebook, submitted)
    statuses: dict[str, str] = {}
    messages: dict[str, str] = {}
    directory, config = course(folder, assignment_id=name, student_id=STUDENT)
    with tempfile.TemporaryDirectory(prefix="k") as sockets:
        execute = _executor(room, limits, sockets, statuses, messages)
        steps = [execute if step is Execute else step for step in Autograde.autograde_preprocessors.default_args[0]]
        config.Autograde.autograde_preprocessors = steps
        with quiet() as errors:
            try:
                Autograde(coursedir=directory, config=config).start()
            except (Exception, SystemExit) as error:
                raise UnusableError(f"not graded: {reason(errors or [str(error)])}") from None
    if execute.early:
        raise UnusableError(f"not graded: {execute.early} before the student's code began")
    questions, written = {}, {}
    with Gradebook(config.CourseDirectory.db_url) as book:
        for grade in book.find_submission_notebook(name, name, STUDENT).grades:
            answer = None
            if grade.name not in statuses:
                answer = next(cell.source for cell in notebook.cells if grade_id(cell) == grade.name)
                statuses[grade.name] = "to be marked" if grade.auto_score is None else "empty"
                written[grade.name] = answer
            questions[grade.name] = {
                "points": grade.auto_score or 0.0,
                "maximum": float(grade.max_score),
                "status": statuses[grade.name],
                "message": messages.get(grade.name, ""),
            }
    return {"status": "graded", "questions": questions, "written": written}


class Prose(IPythonRenderer):
    """Students' prose as prose: no HTML of theirs, no link that is code, no picture that tells somebody it was seen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"escape": True, "allow_harmful_protocols": None})

    def block_mermaidjs(self, code: str) -> str:
        return f"<pre>{html.escape(code)}</pre>"

    def image(self, text: str, url: str, title: str | None = None) -> str:
        return f"[picture: {html.escape(url)}]"


def headings(cells: list[NotebookNode]) -> dict[str, str]:
    """For each question the heading that it stands under, without its points; its name where there is none."""
    found, heading = {}, ""
    for cell in cells:
        if is_grade(cell):
            found[cell.metadata.nbgrader.grade_id] = heading or cell.metadata.nbgrader.grade_id
        elif cell.cell_type == "markdown":
            for line in re.findall(r"^#+ +(.+)$", cell.source, re.M):
                heading = re.sub(r" *\([^()]*\bpoints?\b[^()]*\)$", "", line.strip())
    return found


def titled(page: str, titles: Mapping[str, str]) -> str:
    """A feedback page of nbgrader's that speaks to a student: questions by their headings."""
    link = r'(<a href="#([\w-]+)">)(?:Test cell|Written response)(?=</a>)'
    page = re.sub(link, lambda found: found[1] + html.escape(titles.get(found[2], found[2])), page)
    label = '<span class="nbgrader-label">'
    page = page.replace(f"{label}Student's answer", f"{label}Your answer")
    return page.replace(f"{label}Grade cell:", f"{label}Tests:")


def feedback(job: Mapping[str, Any]) -> None:
    """Write the feedback page, with the points that a person gave."""
    folder, name = Path(job["folder"]), job["assignment"]
    directory, config = course(folder, assignment_id=name, student_id=STUDENT)
    with Gradebook(config.CourseDirectory.db_url) as book:
        for grade in book.find_submission_notebook(name, name, STUDENT).grades:
            if grade.name in job["marks"] or grade.manual_score is not None:  # given, or taken back
                marked = job["marks"].get(grade.name, {"points": None, "comment": None})
                grade.manual_score, grade.needs_manual_grade = marked["points"], marked["points"] is None
                book.find_comment(grade.name, name, name, STUDENT).manual_comment = marked["comment"]
        book.db.commit()
        grades = book.find_submission_notebook(name, name, STUDENT).grades
        waiting = {grade.name for grade in grades if grade.auto_score is None and grade.manual_score is None}
    config.GenerateFeedback.preprocessors = [ClearHiddenTests, *GenerateFeedback.preprocessors.default_args[0]]
    nbconvert.exporters.html.IPythonRenderer = Prose
    config.GenerateFeedback.force = True
    with quiet() as errors:
        try:
            GenerateFeedback(coursedir=directory, config=config).start()
        except (Exception, SystemExit) as error:
            raise UnusableError(f"no feedback page: {reason(errors or [str(error)])}") from None
    page = folder / "feedback" / STUDENT / name / f"{name}.html"
    titles = headings(nbformat.read(folder / "release" / name / f"{name}.ipynb", as_version=4).cells)
    titles |= {question: f"{titles[question]}, not marked yet" for question in waiting}
    write_text(job["page"], titled(page.read_text(encoding="utf-8"), titles))


def main() -> int:
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_DATA, (2**31, resource.getrlimit(resource.RLIMIT_DATA)[1]))  # kernels set theirs
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    result = Path(job["folder"]) / "result.json"
    try:
        if not result.exists():
            found = autograde(job)
            write_text(result, json.dumps(found))
        feedback(job)
    except UnusableError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
