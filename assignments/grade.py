"""Grade a folder of submissions: ``python -m assignments.grade SUBMISSIONS``, or ``make grade SUBMISSIONS=…``.

Each submission is a process of its own (:mod:`assignments.worker`) with a sandboxed kernel, so that it can cost nobody
but its own student. What is done stays done: started again, grading goes on where it was broken off, and only what
changed is graded anew.
"""

from __future__ import annotations

import argparse
import csv
import html
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import nbformat
from nbformat import NotebookNode

from assignments.sandbox import ROOT, Limits, Room, own, problem
from assignments.text import HERE, SOURCE, AssignmentError, instructor_version, seed_of, texts
from dobnb.files import write_text
from dobnb.provenance import digest, file_digest

LARGEST = 10 * 2**20
"""Bytes of a submission that is still opened."""
COLUMNS = ("student", "question", "points", "maximum", "status")


class GradingError(Exception):
    """Grading cannot start, or must not go on. The message is one line: what, why, what to do."""


@dataclass(frozen=True)
class Assignment:
    """An assignment as nbgrader knows it, with one seed."""

    name: str
    seed: int | None
    """That numbers in the questions come from."""
    course: Path
    """Folder with the student version, and the gradebook that holds the hidden tests."""
    questions: Mapping[str, float]
    """Maximum by question, in the order of the text."""
    written: frozenset[str]
    """The questions that a person marks."""
    digest: str


@dataclass(frozen=True)
class Submission:
    """One file that was handed in."""

    student: str
    path: Path
    assignment: str | None
    """Its name, where it can be told."""
    trouble: str | None = None
    """Why it cannot be graded."""
    seed: int | None = None
    """That it was handed out with, as far as it says one."""

    @property
    def page(self) -> str:
        """Place of its feedback in the output folder."""
        return f"feedback/{self.student}/{self.assignment or 'unknown'}.html"


def safe(name: str) -> str:
    """A student's name as it is written to tables and paths: no separator, and nothing a spreadsheet would compute."""
    name = unicodedata.normalize("NFC", name)  # macOS takes accents off their letters
    name = re.sub(r"[^\w.@' -]", "_", name).strip()
    return ("_" + name[1:] if name[:1] in "=+-@.'" else name)[:80] or "_"


def shown(path: Path) -> str:
    """A file's name as it is printed: in one line, without what is no text."""
    return re.sub(r"[\x00-\x1f\x7f]", "_", str(path).encode(errors="replace").decode())


def _cells(path: Path) -> list[dict[str, Any]] | None:
    try:
        cells = json.loads(path.read_bytes())["cells"]
        return [cell for cell in cells if isinstance(cell, dict)]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _names(cells: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names of cells that nbgrader gave."""
    names = set()
    for cell in cells:
        metadata = cell.get("metadata")
        told = metadata.get("nbgrader") if isinstance(metadata, dict) else None
        name = told.get("grade_id") if isinstance(told, dict) else None
        names |= {name} if isinstance(name, str) else set()
    return names


def _written(cells: Sequence[NotebookNode]) -> dict[str, float]:
    """The maxima of an assignment's questions that a person marks."""
    told = [cell.metadata.nbgrader for cell in cells if "nbgrader" in cell.metadata]
    return {one["grade_id"]: float(one["points"]) for one in told if one["grade"] and one["solution"]}


def _student(stem: str, assignment: str | None) -> str:
    """Whom a file is from, by its name, less the assignment's and the number that a browser or course gives a copy."""
    if assignment is None:
        return stem
    parts = re.split(re.escape(assignment), stem, maxsplit=1, flags=re.I)
    before, after = (re.sub(r"^[\W_]+|[\W_]+$", "", part) for part in parts)
    if before and re.fullmatch(r"(?i)(copy)?\W*\d{0,2}", after):
        return before
    return "_".join(part for part in (before, after) if part) or stem


def find(folder: Path, known: Mapping[str, set[str]], only: str | None = None) -> tuple[list[Submission], list[str]]:
    """The submissions in `folder`, and the files beside them that are none.

    A file in a subfolder belongs to the student that the subfolder is named after; any other to the one its own name
    tells, less the assignment's. What it is called else does not matter: cells say which assignment they belong to.

    :param known: the names of the cells of each assignment.
    :param only: the assignment that files belong to which do not say.
    :raises GradingError: two names would become one student.
    """
    found: list[Submission] = []
    called: dict[str, tuple[str, Path]] = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts) or (path.is_dir() and not path.is_symlink()):
            continue
        trouble, assignment, seed = None, None, None
        if path.is_symlink() or not path.is_file():
            trouble = "not a file"
        elif path.suffix.lower() != ".ipynb":
            trouble = "not a notebook"
        elif path.stat().st_size > LARGEST:
            trouble = "too large"
        else:
            cells = _cells(path)
            trouble = "unreadable" if cells is None else None if cells else "no cells"
            shared = {name: len(_names(cells or ()) & cells_of) for name, cells_of in known.items()}
            best = max(shared, key=shared.__getitem__)
            assignment = best if shared[best] else None
            seed = seed_of(cells or ())
        named = next((name for name in known if name.lower() in path.stem.lower()), None)
        student = inside.parts[0] if len(inside.parts) > 1 else _student(path.stem, named)
        first, other = called.setdefault(safe(student), (student, inside))
        if first != student:
            both = f"{shown(other)} and {shown(inside)}"
            raise GradingError(f"{both} would both be handed in by {safe(student)!r}; rename one of them")
        found.append(Submission(safe(student), path, assignment or named, trouble, seed))
    said = {one.assignment for one in found} - {None}
    fallback = only or (said.pop() if len(said) == 1 else None)
    found = [one if one.assignment else replace(one, assignment=fallback) for one in found]
    notebooks = {one.student for one in found if one.trouble != "not a notebook"}
    stray = [one for one in found if one.trouble == "not a notebook" and one.student in notebooks]
    found = [one for one in found if one not in stray]
    together: dict[tuple[str, str | None], list[Submission]] = {}
    for one in found:
        together.setdefault((one.student, one.assignment), []).append(one)
    told = []
    for one, *others in together.values():
        if others:
            names = ", ".join(shown(each.path.relative_to(folder)) for each in (one, *others))
            one = replace(one, trouble=f"more than one file: {names}")
        elif one.trouble is None and one.assignment is None:
            one = replace(one, trouble="no cell of an assignment")
        told.append(one)
    return told, [shown(one.path.relative_to(folder)) for one in stray]


def read_table(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The lines of a CSV file that has at least `columns`.

    :raises GradingError: it cannot be read, or a column is missing.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        head = text.partition("\n")[0]
        between = ";" if ";" in head and "," not in head else ","  # as spreadsheets save where the comma is decimal
        table = csv.DictReader(io.StringIO(text), delimiter=between)
        missing = [name for name in columns if name not in (table.fieldnames or ())]
        if missing:
            raise GradingError(f"{path} has no column {missing[0]!r}; its first line must name {', '.join(columns)}")
        return [{name: (value or "").strip() for name, value in row.items() if name} for row in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise GradingError(f"{path} cannot be read as a table ({error}); save it as CSV, UTF-8") from None


def read_seeds(path: Path) -> dict[str, int]:
    """The seed of each student.

    :raises GradingError: a line without a seed, or a student with two.
    """
    seeds: dict[str, int] = {}
    for row in read_table(path, ("student", "seed")):
        student = safe(row["student"])
        if student in seeds or not re.fullmatch(r"\d{1,9}", row["seed"]):
            raise GradingError(f"{path}: the seed of {student!r} is {row['seed']!r}; one whole number for each student")
        seeds[student] = int(row["seed"])
    return seeds


def read_marks(path: Path, maxima: Mapping[str, float]) -> dict[tuple[str, str], dict[str, Any]]:
    """The points given by hand, by student and question; lines whose points are empty are not yet marked.

    :param maxima: of the questions that are marked by hand.
    :raises GradingError: a question that is not marked by hand, points outside its range, or a question marked twice.
    """
    marks: dict[tuple[str, str], dict[str, Any]] = {}
    for row in read_table(path, ("student", "question", "points")):
        if not row["points"]:
            continue
        student, question = safe(row["student"]), row["question"]
        if question not in maxima:
            raise GradingError(f"{path}: {question!r} is not marked by hand; those are {', '.join(maxima)}")
        try:
            points = float(row["points"].replace(",", "."))
        except ValueError:
            points = -1
        if not 0 <= points <= maxima[question]:
            raise GradingError(
                f"{path}: {student} has {row['points']!r} for {question}; points go from 0 to {maxima[question]:g}"
            )
        if (student, question) in marks:
            raise GradingError(f"{path}: {student} is marked twice for {question}; keep one line")
        marks[student, question] = {"points": points, "comment": row.get("comment") or None}
    return marks


class Grader:
    """Grades submissions into the folder `out`."""

    def __init__(self, out: Path, source: Path, room: Room, limits: Limits) -> None:
        self.out, self.source, self.room, self.limits = out.resolve(), source, room, limits
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock, self._stopped = threading.Lock(), False
        code = [path.read_bytes() for path in sorted((*HERE.glob("*.py"), *(ROOT / "dobnb").glob("*.py")))]
        self.code = digest(json.dumps(asdict(limits)).encode(), str(room.sandboxed).encode(), *code)
        self._made: dict[tuple[str, int | None], Assignment] = {}

    def assignment(self, text: Path, seed: int | None = None) -> Assignment:
        """The assignment of `text` with this seed.

        :raises AssignmentError: the text is no assignment.
        """
        if (text.stem, seed) not in self._made:
            mark = digest(self.code.encode(), text.read_bytes(), str(seed).encode())
            course = self.out / "work" / f"course-{mark[:16]}"
            notebook = instructor_version(text, seed)
            if not (course / "done").exists():
                from assignments.release import generate  # needs nbgrader, which the rest of this module does not

                shutil.rmtree(course, ignore_errors=True)
                generate(notebook, text.stem, course)
                (course / "done").touch()
            graded = [told for cell in notebook.cells if (told := cell.metadata.get("nbgrader")) and told["grade"]]
            maxima = {told["grade_id"]: float(told["points"]) for told in graded}
            written = frozenset(told["grade_id"] for told in graded if told["solution"])
            made = Assignment(text.stem, seed_of(notebook.cells), course, maxima, written, mark)
            self._made[text.stem, seed] = made
        return self._made[text.stem, seed]

    def _folder(self, student: str, path: Path, of: Assignment) -> Path:
        return self.out / "work" / digest(of.digest.encode(), student.encode(), path.read_bytes())[:24]

    def grade(
        self, student: str, path: Path, of: Assignment, marks: Mapping[str, Any], page: Path, room: Room
    ) -> dict[str, Any]:
        """What :func:`assignments.worker.autograde` returns for a submission, or a ``status`` that says why not."""
        folder = self._folder(student, path, of)
        result = folder / "result.json"
        if not result.exists():
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "release").mkdir(parents=True)
            shutil.copyfile(of.course / "gradebook.db", folder / "gradebook.db")
            shutil.copytree(of.course / "release" / of.name, folder / "release" / of.name)
        job = {
            "assignment": of.name, "folder": str(folder), "limits": asdict(self.limits), "marks": dict(marks),
            "page": str(page), "room": asdict(room), "submission": str(path.resolve()),
        }  # fmt: skip
        write_text(folder / "job.json", json.dumps(job))
        status = self._work(folder / "job.json")
        if not result.exists():
            return {"status": status or "not graded: it ended without a result", "questions": {}, "written": {}}
        return json.loads(result.read_text(encoding="utf-8")) | {"note": status}

    def _work(self, job: Path) -> str:
        """Run a worker on `job`; what it complained of."""
        environment = {"HOME": str(job.parent), "LANG": "C.UTF-8", "PATH": os.environ.get("PATH", "/usr/bin:/bin")}
        environment |= {"PYTHONPATH": str(ROOT), "JUPYTER_PLATFORM_DIRS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        with open(job.parent / "log", "w+b") as log:
            with self._lock:
                if self._stopped:
                    return "not graded: broken off"
                worker = subprocess.Popen(
                    [sys.executable, "-m", "assignments.worker", str(job)], cwd=job.parent, env=environment,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
                )  # fmt: skip
                self._running.add(worker)
            try:
                worker.wait(self.limits.whole + 180)
            except subprocess.TimeoutExpired:
                return "stopped: time limit"
            finally:
                with self._lock:
                    self._running.discard(worker)
                _kill(worker)
            if worker.returncode:
                log.seek(0)
                said = log.read(2**16).decode(errors="replace").strip().splitlines()
                return said[-1][:200] if said else f"not graded: ended with {worker.returncode}"
        return ""

    def stop(self) -> None:
        """End all workers, and with them their sandboxes."""
        with self._lock:
            self._stopped = True
            for worker in self._running:
                _kill(worker)

    def calibrate(self, of: Assignment, text: Path, say: Callable[[str], None]) -> None:
        """Grade the reference solution, which compiles what students' kernels take over, and must get all points.

        :raises GradingError: it does not.
        """
        path = of.course / "reference.ipynb"
        nbformat.write(instructor_version(text, of.seed), path)
        start = time.monotonic()
        room = replace(self.room, fill=True)
        own(Path(room.cache), room)
        found = self.grade("reference", path, of, {}, of.course / "reference.html", room)
        lost = [name for name in of.questions if name not in of.written and _status(found, name) != "passed"]
        if lost:
            graded = found["questions"].get(lost[0], found)
            why = graded.get("message") or graded["status"]
            (self._folder("reference", path, of) / "result.json").unlink(missing_ok=True)  # another time it may pass
            raise GradingError(
                f"the reference solution of {of.name} fails {lost[0]} on this machine ({why}); students would too. "
                "If the machine is busy, wait; if weights are missing, run `python -m dobnb fetch`; "
                f"else run {of.name} by hand in the book's environment"
            )
        say(f"{of.name}: the reference solution gets all points ({time.monotonic() - start:.0f} s)")


def _status(found: Mapping[str, Any], question: str) -> str:
    return found["questions"].get(question, {}).get("status", found["status"])


def _kill(worker: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except OSError:
        return
    worker.wait()


def rows(one: Submission, found: Mapping[str, Any], of: Assignment | None, marks: Mapping[str, Any]) -> list[list[Any]]:
    """The lines of one submission in ``grades.csv``."""
    if of is None:
        return [[one.student, "", 0, 0, found["status"]]]
    told = []
    for question, maximum in of.questions.items():
        graded = found["questions"].get(question)
        points, status = (graded["points"], graded["status"]) if graded else (0, found["status"])
        if question in marks:  # of a file that cannot be graded too: a person may have read it
            points, status = marks[question]["points"], "marked"
        told.append([one.student, question, f"{points:g}", f"{maximum:g}", status])
    return told


def table(lines: Sequence[Sequence[Any]], columns: Sequence[str]) -> str:
    """A CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([columns, *lines])
    return text.getvalue()


ADVICE = {
    "not a notebook": "Hand in the notebook itself, a file that ends in .ipynb.",
    "unreadable": "The file is damaged, or no Jupyter notebook. Download it anew and open it before you hand it in.",
    "no cells": "The notebook is empty.",
    "no cell of the assignment": "Answer in the notebook that was handed out; do not copy the answers to another.",
    "no cell of an assignment": "Answer in the notebook that was handed out; do not copy the answers to another.",
    "more than one file": "These files from you are for one assignment. Say which one counts.",
    "no seed": "Whoever marks the course has no seed for you. Tell them your name as it stands on your files.",
    "not graded": "The grader stopped with an error. Whoever marks the course can tell more, and grade it again.",
    "too large": f"The file has more than {LARGEST // 2**20} MB. Clear the outputs, save, and hand it in again.",
}


def plain_page(status: str, marks: Mapping[str, Mapping[str, Any]]) -> str:
    """The feedback page of a submission that could not be graded, with the points that a person gave all the same."""
    kind, _, why = status.partition(":")
    said = [ADVICE.get(kind, "Ask whoever marks the course.")]
    said += [f"{name}: {mark['points']:g} points. {mark['comment'] or ''}".strip() for name, mark in marks.items()]
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in said)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Not graded</title></head><body>'
        f"<h1>Not graded: {html.escape(why.strip() if kind == 'not graded' else status)}</h1>{lines}</body></html>\n"
    )


def tidy(out: Path, written: Mapping[str, str]) -> list[str]:
    """Remove the pages that an earlier grading wrote into `out` and this one did not.

    :param written: digests of the pages of this grading, by their places in `out`.
    :returns: the files beside them that stay: changed since, or not made here.
    """
    record = out / "work" / "pages.json"
    before = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    for name in set(before) - set(written):
        page = out / name
        if page.is_file() and file_digest(page) == before[name]:
            page.unlink()
            with suppress(OSError):  # something else is in the folder
                page.parent.rmdir()
    write_text(record, json.dumps(written, indent=1))
    files = [path for path in sorted((out / "feedback").rglob("*")) if not path.is_dir()]
    return [shown(path.relative_to(out)) for path in files if str(path.relative_to(out)) not in written]


def weights_of(python: str) -> Path:
    """Folder of the fetched weights, as the book's environment sees it.

    :raises GradingError: `python` has no `dobnb`.
    """
    code = "from dobnb.weights import home; print(home())"
    told = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if told.returncode:
        why = (told.stderr.strip().splitlines() or ["it says no more"])[-1]
        raise GradingError(f"{python} cannot import the book's package ({why}); install the environment: make html")
    return Path(told.stdout.strip())


def run(given: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Grade as asked; the exit code.

    :raises GradingError: grading cannot start.
    """
    if not given.submissions.is_dir():
        raise GradingError(f"there is no folder {given.submissions}; pass the one that the submissions are in")
    if shutil.which(given.python) is None:
        raise GradingError(f"there is no {given.python}; install the book's environment: make html")
    out = given.out.resolve()
    if given.submissions.resolve() == out or given.submissions.resolve().is_relative_to(out):
        raise GradingError("the submissions lie in the output folder; keep them apart")
    os.umask(0o022)
    cache = out / "work" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    python = str(Path(shutil.which(given.python)).absolute())
    weights = given.weights.absolute() if given.weights else weights_of(python)
    room = Room(python, str(weights), str(cache), sandboxed=not given.unsandboxed)
    if given.unsandboxed:
        say("NO SANDBOX: students' code runs as you, with your files and your network. Only for code you trust")
    elif why := problem(room):
        raise GradingError(
            f"no sandbox here: {why}. Grade where there is one, or, for code that you trust, pass UNSANDBOXED=1 "
            "(--unsandboxed): it then runs as you, with your files"
        )
    limits = Limits(given.cell_seconds, given.seconds, int(given.memory_gb * 2**30))
    grader = Grader(out, given.source, room, limits)
    sources = {text.stem: text for text in texts(given.source)}
    if given.assignment and given.assignment not in sources:
        raise GradingError(f"there is no assignment {given.assignment!r}; there are {', '.join(sources)}")
    seeds = read_seeds(given.seeds) if given.seeds else {}
    whole = {name: instructor_version(text).cells for name, text in sources.items()}
    known = {name: _names(cells) for name, cells in whole.items()}
    found, stray = find(given.submissions, known, given.assignment)
    if not found:
        raise GradingError(f"no submission in {given.submissions}")
    maxima = {name: points for cells in whole.values() for name, points in _written(cells).items()}
    marks = read_marks(given.marks, maxima) if given.marks else {}
    strangers = {student for student, _ in marks} - {one.student for one in found}
    if strangers:
        raise GradingError(f"{given.marks} marks {min(strangers)!r}, who handed in nothing; mend the name")
    asked = {(one.student, question) for one in found for question in _written(whole.get(one.assignment or "", ()))}
    if lost := sorted(set(marks) - asked):
        student, question = lost[0]
        raise GradingError(f"{given.marks} marks {question} for {student}, who did not hand that in; mend the line")
    for name in sorted({one.assignment for one in found if one.assignment and not one.trouble}):
        grader.calibrate(grader.assignment(sources[name], given.seed), sources[name], say)

    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(given.jobs):
        slots.put(slot)
    results: list[Any] = [None] * len(found)
    done, start = [0], time.monotonic()

    def one_by_one(index: int) -> None:
        one = found[index]
        seed = seeds.get(one.student, given.seed)
        of = grader.assignment(sources[one.assignment], seed) if one.assignment else None
        by_hand = {question: mark for (student, question), mark in marks.items() if student == one.student}
        by_hand = {question: mark for question, mark in by_hand.items() if of and question in of.questions}
        page = out / one.page
        told = {"status": one.trouble, "questions": {}, "written": {}}
        begun = time.monotonic()
        if given.seeds and one.student not in seeds and not one.trouble:
            told["status"] = "no seed"
        elif not one.trouble:
            slot = slots.get()
            try:
                told = grader.grade(one.student, one.path, of, by_hand, page, replace(room, slot=slot))
            except Exception as error:
                told["status"] = f"not graded: {type(error).__name__}"
            finally:
                slots.put(slot)
        if not told["questions"]:
            write_text(page, plain_page(told["status"], by_hand))
        elif told["note"]:
            say(f"{one.student}, {one.assignment}: {told['note']}")
        results[index] = (rows(one, told, of, by_hand), told, of)
        done[0] += 1
        lines = results[index][0]
        left = (time.monotonic() - start) / done[0] * (len(found) - done[0])
        points = f"{sum(float(line[2]) for line in lines):g} of {sum(float(line[3]) for line in lines):g}"
        state = told["status"] if told["status"] != "graded" else _summary(told)
        took = time.monotonic() - begun
        who = f"[{done[0]}/{len(found)}] {one.student}, {one.assignment}"
        say(f"{who}: {points}, {state} ({took:.0f} s; {left:.0f} s left)")

    for one in {(one.assignment, seeds.get(one.student, given.seed)) for one in found if one.assignment}:
        grader.assignment(sources[one[0]], one[1])  # not at once from two threads
    pool = ThreadPoolExecutor(given.jobs)
    try:
        for future in [pool.submit(one_by_one, index) for index in range(len(found))]:
            future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        grader.stop()
        raise
    lines = [line for told in results for line in told[0]]
    write_text(out / "grades.csv", table(lines, COLUMNS))
    to_mark = [
        [one.student, question, "" if question not in given_marks else f"{given_marks[question]['points']:g}",
         f"{of.questions[question]:g}", "" if question not in given_marks else given_marks[question]["comment"] or "",
         one.page]
        for one, (_, told, of) in zip(found, results, strict=True)
        for given_marks in [{question: mark for (student, question), mark in marks.items() if student == one.student}]
        for question in told["written"] if told["questions"][question]["status"] == "to be marked"
    ]  # fmt: skip
    marked = table(to_mark, ("student", "question", "points", "maximum", "comment", "page"))
    write_text(out / "written.csv", "\ufeff" + marked)  # the mark tells spreadsheets that this is UTF-8
    pairs = [(one, of) for one, (_, _, of) in zip(found, results, strict=True)]
    other = [one.student for one, of in pairs if of and one.seed not in (None, of.seed)]
    if other:
        say(f"handed out with another seed than they were graded with: {', '.join(other)}; pass SEED= or SEEDS=")
    for name in stray:
        say(f"left out, not a notebook: {name}")
    if old := tidy(out, {one.page: file_digest(out / one.page) for one in found if (out / one.page).exists()}):
        more = f" and {len(old) - 3} more" if len(old) > 3 else ""
        say(f"not of this grading, left as they are: {', '.join(old[:3])}{more}")
    failed = [line[0] for lines, _, _ in results for line in lines[:1] if line[4].startswith("not graded")]
    if failed:
        say(f"not graded, perhaps through no fault of theirs: {', '.join(failed)}; run the same command again")
    say(f"{len(found)} submissions in {time.monotonic() - start:.0f} s: {out / 'grades.csv'}, {out / 'feedback'}")
    open_marks = sum(not line[2] for line in to_mark)
    if open_marks:
        say(f"{open_marks} written answers to mark: fill in a copy of {out / 'written.csv'} and pass it as MARKS=")
    return 0


def _summary(told: Mapping[str, Any]) -> str:
    count = Counter(question["status"] for question in told["questions"].values())
    return ", ".join(f"{number} {status}" for status, number in sorted(count.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m assignments.grade", description="Grade a folder of submissions.")
    parser.add_argument("submissions", type=Path, help="STUDENT.ipynb, STUDENT_ASSIGNMENT.ipynb or STUDENT/*.ipynb")
    parser.add_argument("--out", type=Path, default=Path("runs/grading"), help="default: %(default)s")
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder of the assignments' texts")
    parser.add_argument("--assignment", help="of files that do not say which they answer")
    parser.add_argument("--marks", type=Path, help="CSV of points given by hand: student, question, points, comment")
    parser.add_argument("--seed", type=int, help="the cohort's, where the assignments were made with one")
    parser.add_argument("--seeds", type=Path, help="CSV: student, seed, where each student has one")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="submissions at once")
    parser.add_argument("--seconds", type=float, default=Limits.whole, help="for a submission (default: %(default)s)")
    parser.add_argument("--cell-seconds", type=float, default=Limits.cell, help="for a cell (default: %(default)s)")
    parser.add_argument("--memory-gb", type=float, default=Limits.memory / 2**30, help="default: %(default)s")
    parser.add_argument("--python", default=str(ROOT / ".venv/bin/python"), help="of the book's environment")
    parser.add_argument("--weights", type=Path, help="folder of fetched weights (default: DOBNB_HOME, or the cache)")
    parser.add_argument("--unsandboxed", action="store_true", help="run students' code without a sandbox, as you")
    given = parser.parse_args(arguments)

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        return run(given, say)
    except (GradingError, AssignmentError) as error:
        print(f"grade: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("grade: broken off; start it again to go on with what is left", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
