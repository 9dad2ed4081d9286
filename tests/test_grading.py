"""Grading: honest work gets its points, and hostile work costs nobody but its own student."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode, from_dict
from nbformat.v4 import new_code_cell, new_markdown_cell

from assignments.grade import GradingError, find, read_marks, read_seeds, safe, tidy
from assignments.sandbox import Limits, Room, command, own, problem
from assignments.text import RELEASE, instructor_version, texts
from dobnb.provenance import file_digest
from tests.assignment_answers import WRONG

ROOT = Path(__file__).parents[1]
CLASSROOM = ROOT / ".venv-classroom" / "bin" / "python"
TEXTS = {text.stem: text for text in texts()}
NAME = "01_kappa_and_rollout"
QUESTIONS = {"total-variation": 2, "by-hand": 2, "kappa": 2, "doeblin": 1, "rollout": 3, "in-words": 4}


@pytest.fixture(scope="module")
def classroom() -> Path:
    if not CLASSROOM.exists():
        pytest.skip("no .venv-classroom; `make assignments` installs it")
    return CLASSROOM


@pytest.fixture(scope="module")
def sandbox() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")


def answered(name: str = NAME, **answers: str) -> NotebookNode:
    """The student version of an assignment with the reference's answers, or those given by question."""
    notebook = nbformat.read(RELEASE / f"{name}.ipynb", as_version=4)
    reference = {cell.id: cell.source for cell in instructor_version(TEXTS[name]).cells}
    for cell in notebook.cells:
        told = cell.metadata.get("nbgrader", {})
        if told.get("solution"):
            question = told.grade_id.split("-", 1)[1].removesuffix("-answer").replace("-", "_")
            cell.source = answers.get(question, reference[cell.id])
    return notebook


def grade(
    classroom: Path, submissions: Path, out: Path, *options: str | Path, path: str | None = None, said: int = 0
) -> tuple[list[list[str]], str]:
    """Run the grader; the lines of grades.csv and what it printed."""
    command = [classroom, "-m", "assignments.grade", submissions, "--out", out, "--python", sys.executable]

    environment = dict(os.environ) | ({"PATH": path} if path is not None else {})
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == said, done.stdout + done.stderr
    table = list(csv.reader((out / "grades.csv").read_text().splitlines())) if said == 0 else []
    return table, done.stdout + done.stderr


def scores(table: list[list[str]]) -> dict[str, str]:
    """By student: points of the autograded questions, and what became of each that did not pass."""
    assert table[0] == ["student", "question", "points", "maximum", "status"]
    found: dict[str, list[list[str]]] = {}
    for line in table[1:]:
        found.setdefault(line[0], []).append(line)
    told = {}
    for student, lines in found.items():
        assert [(line[1], line[3]) for line in lines] == [
            (f"a01-{name}", str(most)) for name, most in QUESTIONS.items()
        ]
        assert all((line[4] == "passed") == (line[2] == line[3]) for line in lines[:-1])
        other = [f"{line[1][4:]} {line[4]}" for line in lines[:-1] if line[4] != "passed"]
        same = {line[4] for line in lines}
        points = sum(int(line[2]) for line in lines)
        told[student] = (
            f"{points} {same.pop()}" if len(same) == 1 else f"{points}" + "".join(f"; {one}" for one in other)
        )
    return told


def test_a_folder_of_honest_and_broken_work(classroom: Path, sandbox: None, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()

    def hand_in(file: str, notebook: NotebookNode) -> None:
        (folder / file).parent.mkdir(exist_ok=True)
        nbformat.write(notebook, folder / file)

    hand_in(f"ada_{NAME}.ipynb", answered())
    shutil.copyfile(RELEASE / f"{NAME}.ipynb", folder / f"untouched_{NAME}.ipynb")
    hand_in("Bob Smith/homework, final version.ipynb", answered(kappa=WRONG["a01-kappa"]["nearly: neighbours"]))
    altered = answered(total_variation="import os\n\n\ndef total_variation(p, q):\n    os._exit(0)")
    altered.cells = [cell for cell in altered.cells if not cell.metadata.get("nbgrader", {}).get("grade")]
    hand_in("eve.ipynb", altered)
    (folder / "corrupt.ipynb").write_text('{"cells": [')
    (folder / "pickle.pkl").write_bytes(b"\x80\x04\x95")
    out = tmp_path / "out"
    table, said = grade(classroom, folder, out)
    assert scores(table) == {
        "ada": "10",
        "untouched": "0; total-variation failed; by-hand failed; kappa failed; doeblin failed; rollout failed",
        "Bob Smith": "8; kappa failed",
        "eve": "0; " + "; ".join(f"{name} stopped: the kernel died" for name in list(QUESTIONS)[:-1]),
        "corrupt": "0 unreadable",
        "pickle": "0 not a notebook",
    }
    assert "6 submissions in" in said and "2 written answers to mark" in said
    page = (out / "feedback" / "Bob Smith" / f"{NAME}.html").read_text()
    assert "wrong where the rows that are furthest apart are not neighbours" in page  # why, but not the test itself
    assert "HIDDEN" not in page and "_found = max" not in page
    assert ">3. The Dobrushin coefficient</a> (Score: 0.0 / 2.0)" in page
    assert ">6. In words, not marked yet</a> (Score: 0.0 / 4.0)" in page
    assert "Your answer" in page and "Test cell" not in page and "Student's answer" not in page
    assert "not a notebook" in (out / "feedback" / "pickle" / f"{NAME}.html").read_text()

    written = list(csv.reader((out / "written.csv").read_text(encoding="utf-8-sig").splitlines()))
    assert [line[:2] for line in written[1:]] == [["Bob Smith", "a01-in-words"], ["ada", "a01-in-words"]]
    marks = tmp_path / "marks.csv"
    marks.write_text(
        "student,question,points,comment\nada,a01-in-words,3.5,A clear limit.\nBob Smith,a01-in-words,,\n"
        "corrupt,a01-in-words,2,From your paper copy.\n"
    )
    (folder / "pickle.pkl").unlink()  # who is no longer there has no page
    before = time.time()
    table, said = grade(classroom, folder, out, "--marks", marks)
    assert ["ada", "a01-in-words", "3.5", "4", "marked"] in table
    assert ["Bob Smith", "a01-in-words", "0", "4", "to be marked"] in table
    page = (out / "feedback" / "ada" / f"{NAME}.html").read_text()
    assert "A clear limit." in page and ">6. In words</a> (Score: 3.5 / 4.0)" in page
    by_hand = {line[1]: (line[2], line[4]) for line in table if line[0] == "corrupt"}  # a person may have read it
    assert by_hand.pop("a01-in-words") == ("2", "marked") and set(by_hand.values()) == {("0", "unreadable")}
    page = (out / "feedback" / "corrupt" / f"{NAME}.html").read_text()
    assert "Not graded: unreadable" in page and "a01-in-words: 2 points. From your paper copy." in page
    assert {path.name for path in (out / "feedback").iterdir()} == {"ada", "Bob Smith", "corrupt", "eve", "untouched"}
    grade(classroom, folder, out)  # the marks taken back
    assert "A clear limit." not in (out / "feedback" / "ada" / f"{NAME}.html").read_text()
    results = list((out / "work").glob("*/result.json"))
    assert len(results) == 5 and all(path.stat().st_mtime < before for path in results)  # nothing was run again


HOSTILE = {
    "endless": "while True:\n    pass",
    "stubborn": (
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass"
    ),
    "forkbomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "loud": "while True:\n    print('x' * 1_000_000)",
    "loud-below": "import os\nfor _ in range(500):\n    os.write(1, b'x' * 1_000_000)\n",
    "loud-child": "import subprocess\nsubprocess.run('head -c 500000000 /dev/zero', shell=True)\n",
    "greedy": "hoard = [bytearray(2**28) for _ in range(64)]",
    "full": "for k in range(100):\n    with open(f'file{k}', 'wb') as file:\n        file.write(bytes(2**26))",
    "exit": "import os\nos._exit(0)",
    "killer": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "no-asserts": (
        "import ast\n\n\nclass Drop(ast.NodeTransformer):\n    def visit_Assert(self, node):\n"
        "        return ast.Pass()\n\n\nget_ipython().ast_transformers.append(Drop())\n"
    ),
    "no-running": "get_ipython().run_cell = lambda *a, **k: None\nget_ipython().run_cell_async = None\n",
    "forger": (
        "def total_variation(p, q):\n    ip = get_ipython()\n    ip.display_pub.session.send(\n"
        "        ip.kernel.iopub_socket, 'execute_result',\n"
        "        {'data': {'text/plain': '2.0'}, 'metadata': {}, 'execution_count': 1},\n"
        "        parent=ip.display_pub.parent_header,\n    )\n    return 0"
    ),
    "script": (
        "from IPython.display import HTML, display\ndisplay(HTML('<script>alert(1)</script>'))\n"
        "print('<script>alert(2)</script>')\n"
    ),
}
"""What stands before the answer to the first question, or instead of it."""

SPY = """
import os, socket, subprocess
from pathlib import Path

root, folder = Path({root!r}), Path({folder!r})
seen = [str(path) for path in (root / "assignments", root / "tests", root / ".git", folder / "in") if path.exists()]
seen += [str(path) for path in folder.rglob("*") if path.is_file() and "cache" not in path.parts]
seen += [str(path) for path in Path("/").rglob("*.ipynb") if "site-packages" not in str(path)]
for address in (("127.0.0.1", {port}), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, timeout=1)
        seen.append(address)
    except OSError:
        pass
for path in ("/x", "/usr/x", "/dev/x", "/tmp/x", root / "dobnb" / "x"):
    try:
        open(path, "w")
        seen.append(path)
    except OSError:
        pass
environments = subprocess.run("cat /proc/[0-9]*/environ", shell=True, capture_output=True, text=True).stdout
seen += ["secret"] if "SECRET" in environments + str(os.environ) else []
seen += [name for name in os.listdir("/proc") if name.isdigit() and int(name) > 100]
if seen:
    print(seen)
    os._exit(1)
"""


def test_tricks_with_names_and_answers_in_other_cells(classroom: Path, sandbox: None, tmp_path: Path) -> None:
    """Binding what tests are written with changes no test; an answer counts wherever it stands; prose stays prose."""
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    tricks = "import builtins\nabs = builtins.abs = lambda x: 0\nnp.allclose = lambda *a, **k: True\n"
    zero = "class Zero(float):\n    __sub__ = __rsub__ = __abs__ = lambda s, *a: s\n    __lt__ = lambda s, o: True\n"
    cheat = answered(
        total_variation=f"{tricks}{zero}\n\ndef total_variation(p, q):\n    return 0",
        by_hand="twelfths = np.array([[12, 0, 0, 0], [0, 12, 0, 0]])\nkappa_by_hand = Fraction(1, 12)",
        kappa="def kappa(A):\n    return Zero(0)",
        doeblin="def doeblin(A):\n    return 0",
        rollout="def rollout(layers, alpha=0.5):\n    np.allclose = lambda *a, **k: True\n    return layers[0]",
    )
    nbformat.write(cheat, folder / "cheat.ipynb")
    borrowed = answered(
        kappa="from dobnb import dobrushin_coefficient as d\n\n\ndef kappa(A):\n    return float(d(np.asarray(A)))",
        rollout="def rollout(layers, alpha=0.5):\n    import dobnb as b\n    return b.rollout(layers, alpha).numpy()",
    )
    nbformat.write(borrowed, folder / "borrower.ipynb")
    moved = answered()
    for cell in moved.cells:
        if cell.get("id") == "a01-kappa-answer":
            cell.metadata = NotebookNode()  # deleted, and written anew
        told = cell.metadata.get("nbgrader", {})
        if told.get("solution") and cell.cell_type == "markdown":
            cell.source = "`x < y` and $a<b$ <b>x</b> [c](javascript:alert(2)) ![](http://evil.example/x.png) BAD"
    leak = "H = []\nget_ipython().events.register('pre_run_cell', lambda i: H.append(i.raw_cell))"
    moved.cells.insert(0, new_code_cell(leak))
    moved.cells.append(new_code_cell('print("\\n".join(H), len(H))\nH'))
    text = nbformat.writes(moved).replace(" BAD", " \\ud800")
    (folder / "moved.ipynb").write_text(text)
    before = answered()
    place = next(k for k, cell in enumerate(before.cells) if cell.get("id") == "a01-kappa-answer")
    before.cells.insert(place, new_code_cell(before.cells[place].source))
    before.cells[place + 1].source = ""
    (raw,) = (cell for cell in before.cells if cell.get("id") == "a01-doeblin-answer")
    raw.cell_type = "raw"
    del raw["outputs"], raw["execution_count"]
    before.cells = [cell for cell in before.cells if cell.get("id") != "a01-in-words"]
    before.cells.append(new_markdown_cell("In words, in a cell of my own."))
    nbformat.write(before, folder / "before.ipynb")
    table, _ = grade(classroom, folder, out)
    found = scores(table)
    assert found == {
        "before": "10",
        "borrower": "5; kappa failed; rollout failed",
        "cheat": "0; total-variation failed; by-hand failed; kappa failed; doeblin failed; rollout failed",
        "moved": "10",
    }
    assert ["before", "a01-in-words", "0", "4", "to be marked"] in table
    assert "numpy.allclose was changed" in (out / "feedback" / "cheat" / f"{NAME}.html").read_text()
    page = (out / "feedback" / "borrower" / f"{NAME}.html").read_text()
    assert page.count("write it yourself: dobnb may not be used in this question") == 2
    page = (out / "feedback" / "moved" / f"{NAME}.html").read_text()
    assert "(left out)" in page and "_found = max" not in page and "wrong for four tokens" not in page
    assert "<code>x &lt; y</code>" in page and "$a&lt;b$ &lt;b&gt;x&lt;/b&gt;" in page
    assert "javascript:alert" not in page and 'src="http://evil' not in page and "[picture: http://evil" in page
    marks = tmp_path / "marks.csv"
    marks.write_text("student,question,points\nmoved,a02-two-groups,5\n")
    _, said = grade(classroom, folder, out, "--marks", marks, said=2)
    assert "marks a02-two-groups for moved, who did not hand that in" in said


UNSEEN = """
import ctypes, os, subprocess, threading

for command in ("unshare -U true", "unshare -Urm sh -c 'mount -t tmpfs x /scratch'"):
    print(subprocess.run(command, shell=True, capture_output=True).returncode != 0)
system = ctypes.CDLL(None, use_errno=True)
for call in (lambda: os.memfd_create("x"), lambda: 1 / (1 + system.shmget(0, 4096, 0o1600))):
    try:
        print(call())
    except (OSError, ZeroDivisionError):
        print(True)
thread = threading.Thread(target=print, args=(True,))
thread.start()
thread.join()
"""


def test_no_memory_that_the_limit_cannot_see(sandbox: None, tmp_path: Path) -> None:
    """Not in a file system of one's own, not in a file without a name; threads and processes go on."""
    tmp_path.chmod(0o755)
    room = Room(sys.executable, str(tmp_path / "no weights"), str(tmp_path))
    assert problem(room) is None
    with tempfile.TemporaryDirectory() as sockets:
        own(Path(sockets), room)
        inside = command(room, Limits(), sockets, [sys.executable, "-I", "-c", UNSEEN])
        ran = subprocess.run(inside, capture_output=True, text=True, timeout=60)
    assert ran.stdout.split() == ["True"] * 5, ran.stdout + ran.stderr


@pytest.mark.slow
def test_a_hostile_folder(classroom: Path, sandbox: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty-five submissions, one command, the expected table; honest ones between hostile ones get their points."""
    import socket

    monkeypatch.setenv("SECRET_OF_THE_INSTRUCTOR", "1")
    folder = tmp_path / "in"
    folder.mkdir()
    good = answered()
    answer = next(cell.source for cell in good.cells if cell.get("id") == "a01-total-variation-answer")
    listener = socket.create_server(("127.0.0.1", 0))
    spy = SPY.format(root=str(ROOT), folder=str(tmp_path), port=listener.getsockname()[1])
    for student, code in {**HOSTILE, "spy": spy}.items():
        code = code if student == "forger" else f"{code}\n\n{answer}"
        nbformat.write(answered(total_variation=code), folder / f"{student}.ipynb")
    for student in ("honest-1", "zz-honest-2"):
        nbformat.write(good, folder / f"{student}.ipynb")

    kept = [cell for cell in good.cells if not cell.metadata.get("nbgrader", {}).get("grade")]
    nbformat.write(from_dict({**good, "cells": kept}), folder / "deleted-tests.ipynb")
    wrong = answered(kappa="def kappa(A):\n    return 0.5")
    for cell in wrong.cells:
        told = cell.metadata.get("nbgrader", {})
        cell.metadata.tags = ["skip-execution", "raises-exception"]
        if told.get("grade") and cell.cell_type == "code":
            cell.source, told.points, told.grade_id = "assert True", 100, told.grade_id
        if told.get("locked") and not told.get("grade"):
            cell.source = "raise SystemExit"
    nbformat.write(wrong, folder / "altered-tests.ipynb")
    doubled = answered()
    doubled.cells += [from_dict({**cell, "id": f"again-{k}"}) for k, cell in enumerate(doubled.cells)]
    nbformat.write(doubled, folder / "doubled.ipynb")
    nbformat.write(from_dict({**good, "cells": good.cells[::-1]}), folder / "reversed.ipynb")
    nbformat.write(nbformat.v4.new_notebook(), folder / "no-cells.ipynb")
    nbformat.write(nbformat.v4.new_notebook(cells=[new_code_cell("1 + 1")]), folder / "another.ipynb")
    (folder / "deep.ipynb").write_text('{"cells":' + "[" * 100_000)
    (folder / "huge.ipynb").write_bytes(b" " * (10 * 2**20 + 1))
    (folder / "pickle.pkl").write_bytes(b"\x80\x04\x95")
    (folder / "link.ipynb").symlink_to(RELEASE / f"{NAME}.ipynb")
    for copy in ("a.ipynb", "b.ipynb"):
        (folder / "twice").mkdir(exist_ok=True)
        nbformat.write(good, folder / "twice" / copy)
    nbformat.write(good, folder / "=cmd('rm')<b>.ipynb")

    limits = ["--cell-seconds", "15", "--seconds", "120", "--memory-gb", "2", "--jobs", "2"]
    start = time.monotonic()
    table, said = grade(classroom, folder, tmp_path / "out", *limits)
    listener.close()
    names = list(QUESTIONS)[:-1]

    def stopped(why: str) -> str:
        return "0; " + "; ".join(f"{name} stopped: {why}" for name in names)

    found = scores(table)
    assert found.pop("forkbomb") in {stopped("memory limit"), stopped("time limit"), stopped("the kernel died")}
    assert found.pop("greedy") in {stopped("memory limit"), "8; total-variation failed"}
    # Linux spares who calls kill(-1), and then nobody is left to kill; elsewhere the kernel goes too.
    assert found.pop("killer") in {stopped("the kernel died"), "8; total-variation failed"}
    assert found.pop("no-running").startswith("0")
    assert found == {
        "endless": "8; total-variation failed",
        "stubborn": stopped("time limit"),
        "loud": stopped("output limit"),
        "loud-below": stopped("output limit"),
        "loud-child": stopped("output limit"),
        "full": "8; total-variation failed",
        "exit": stopped("the kernel died"),
        "no-asserts": "0; " + "; ".join(f"{name} tampered" for name in names),
        "forger": "8; total-variation failed",
        "script": "10",
        "spy": "10",
        "honest-1": "10",
        "zz-honest-2": "10",
        "deleted-tests": "10",
        "altered-tests": "8; kappa failed",
        "doubled": "10",
        "reversed": "10",
        "no-cells": "0 no cells",
        "another": "0 no cell of the assignment",
        "deep": "0 unreadable",
        "huge": "0 too large",
        "pickle": "0 not a notebook",
        "link": "0 not a file",
        "twice": "0 more than one file: twice/a.ipynb, twice/b.ipynb",
        "_cmd_'rm'__b_": "10",
    }
    pages = {path.parent.name: path.read_text() for path in (tmp_path / "out" / "feedback").rglob("*.html")}
    assert set(pages) == {line[0] for line in table[1:]}
    assert not any("<script>alert" in page for page in pages.values())
    assert time.monotonic() - start < 900, said


@pytest.mark.slow
def test_every_answer_through_nbgrader(classroom: Path, sandbox: None, tmp_path: Path) -> None:
    """What :mod:`test_assignments` says of bare Python holds of the grader: all, nothing, all but the one question."""
    folder = tmp_path / "in"
    expected: dict[tuple[str, str], set[str]] = {}
    graded: dict[str, list[str]] = {}
    for name, text in TEXTS.items():
        told = [cell.metadata.get("nbgrader", {}) for cell in instructor_version(text).cells]
        graded[name] = [one["grade_id"] for one in told if one.get("grade") and not one["solution"]]
        cases: dict[str, Mapping[str, str]] = {"reference": {}}
        for question in graded[name]:
            nearly = next(answer for case, answer in WRONG[question].items() if case.startswith("nearly"))
            cases[question] = {question.split("-", 1)[1].replace("-", "_"): nearly}
        for student, answers in cases.items():
            (folder / student).mkdir(parents=True, exist_ok=True)
            nbformat.write(answered(name, **answers), folder / student / f"{name}.ipynb")
            expected[student, name] = set(graded[name]) - {student}
        (folder / "untouched").mkdir(exist_ok=True)
        shutil.copyfile(RELEASE / f"{name}.ipynb", folder / "untouched" / f"{name}.ipynb")
        expected["untouched", name] = set()
    table, _ = grade(classroom, folder, tmp_path / "out")
    for (student, name), passed in expected.items():
        lines = [line for line in table[1:] if line[0] == student and line[1] in graded[name]]
        assert len(lines) == len(graded[name])
        assert {line[1] for line in lines if line[2] == line[3]} == passed, (student, name)
        assert all(line[2] == "0" for line in lines if line[1] not in passed)


def test_broken_off_and_taken_up_again(classroom: Path, sandbox: None, tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for student in ("ada", "bob"):
        nbformat.write(answered(), folder / f"{student}.ipynb")
    command = [classroom, "-m", "assignments.grade", folder, "--out", out, "--jobs", "1"]
    command += ["--python", sys.executable]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "gets all points" in process.stdout.readline()
        assert process.stdout.readline().startswith("[1/2] ada")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130 and said == "grade: broken off; start it again to go on with what is left\n"
    assert not (out / "grades.csv").exists()
    before = {path: path.stat().st_mtime for path in (out / "work").glob("*/result.json")}
    table, _ = grade(classroom, folder, out)
    assert scores(table) == {"ada": "10", "bob": "10"}
    assert len(before) >= 2 and all(path.stat().st_mtime == when for path, when in before.items())


def test_no_sandbox_no_grading_unless_told(classroom: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    nbformat.write(answered(), folder / "ada.ipynb")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("env", "sh", "prlimit"):
        (programs / name).symlink_to(shutil.which(name))
    _, said = grade(classroom, folder, tmp_path / "out", path=str(programs), said=2)
    assert said.startswith("grade: no sandbox here: bwrap, setpriv is not installed") and "UNSANDBOXED=1" in said
    table, said = grade(classroom, folder, tmp_path / "out", "--unsandboxed", path=str(programs))
    assert scores(table) == {"ada": "10"} and said.startswith("NO SANDBOX")


def test_reference_that_fails_stops_grading(classroom: Path, sandbox: None, tmp_path: Path) -> None:
    """A question that nobody can answer on this machine costs no student points."""
    source, folder = tmp_path / "source", tmp_path / "in"
    source.mkdir()
    folder.mkdir()
    text = TEXTS[NAME].read_text().replace("return float(1 - len(A) * A.min())", "return float(1 - A.min())")
    (source / f"{NAME}.md").write_text(text)
    nbformat.write(answered(), folder / "ada.ipynb")
    _, said = grade(classroom, folder, tmp_path / "out", "--source", source, said=2)
    assert said.startswith(f"grade: the reference solution of {NAME} fails a01-doeblin on this machine (AssertionError")
    assert not (tmp_path / "out" / "grades.csv").exists()


def test_reference_may_pass_another_time(classroom: Path, sandbox: None, tmp_path: Path) -> None:
    """As when weights were missing, and are fetched: what failed once is tried again."""
    source, folder, weights = tmp_path / "source", tmp_path / "in", tmp_path / "weights"
    for made in (source, folder, weights):
        made.mkdir()
    needs = "import os\n    open(os.environ['DOBNB_HOME'] + '/model')\n    return float(1 - len(A) * A.min())"
    text = TEXTS[NAME].read_text().replace("return float(1 - len(A) * A.min())", needs)
    (source / f"{NAME}.md").write_text(text)
    nbformat.write(answered(), folder / "ada.ipynb")
    whole = ["--source", source, "--weights", weights]
    _, said = grade(classroom, folder, tmp_path / "out", *whole, said=2)
    assert "fails a01-doeblin on this machine (FileNotFoundError" in said and "dobnb fetch" in said
    (weights / "model").write_text("")
    table, _ = grade(classroom, folder, tmp_path / "out", *whole)
    assert scores(table) == {"ada": "10"}


SLOW = """
---
kernelspec: {{name: python3, display_name: Python 3, language: python}}
---

# Slow

```{{code-cell}} ipython3
:tags: [parameters]

seed = 1
```

```{{code-cell}} ipython3
:answer: first

def wait():
    ### BEGIN SOLUTION
    return 1
    ### END SOLUTION
```

```{{code-cell}} ipython3
:test: first
:points: 1

assert callable(wait), "wait must be a function"
```

```{{code-cell}} ipython3
{given}
```

```{{code-cell}} ipython3
:answer: second

### BEGIN SOLUTION
x = 1
### END SOLUTION
```

```{{code-cell}} ipython3
:test: second
:points: 1

assert x == 1, "x must be one"
```
"""
"""An assignment with a given cell that takes its time, where it says."""


def test_time_that_given_cells_take(classroom: Path, sandbox: None, tmp_path: Path) -> None:
    """Before the student's code it is no fault of theirs, and is tried again; later it may be: the cell may call it."""
    source, folder, out = tmp_path / "source", tmp_path / "in", tmp_path / "out"
    source.mkdir()
    (folder / "ada").mkdir(parents=True)
    early = "import os\nimport time\n\ntime.sleep(999 * os.environ['MPLCONFIGDIR'].startswith('/scratch'))"
    for name, given in {"01_early": early, "02_late": "wait()"}.items():
        (source / f"{name}.md").write_text(SLOW.lstrip().format(given=given))
        notebook = instructor_version(source / f"{name}.md")
        for cell in notebook.cells:
            cell.source = cell.source.replace("return 1", "import time\n    time.sleep(999)")
        nbformat.write(notebook, folder / "ada" / f"{name}.ipynb")
    table, said = grade(classroom, folder, out, "--source", source, "--seconds", "30", "--jobs", "2")
    assert table[1:] == [
        ["ada", "a01-first", "0", "1", "not graded: time limit before the student's code began"],
        ["ada", "a01-second", "0", "1", "not graded: time limit before the student's code began"],
        ["ada", "a02-first", "1", "1", "passed"],
        ["ada", "a02-second", "0", "1", "stopped: time limit in a given cell"],
    ]
    assert "not graded, perhaps through no fault of theirs: ada; run the same command again" in said
    assert "Not graded: time limit before the" in (out / "feedback" / "ada" / "01_early.html").read_text()
    assert len(list((out / "work").glob("*/result.json"))) == 3  # two references, and what is kept of ada


# Reading what comes from outside; no kernel

KNOWN = {"01_one": {"a01-x", "a01-given-1"}, "02_two": {"a02-x"}}


def notebook(*names: str, seed: int | None = None) -> str:
    cells = [{"cell_type": "code", "metadata": {"nbgrader": {"grade_id": name}}, "source": "x"} for name in names]
    cells += [{"cell_type": "code", "metadata": {}, "source": [f"seed = {seed}\n"]}] if seed is not None else []
    return json.dumps({"cells": cells})


def test_who_handed_in_what(tmp_path: Path) -> None:
    files = {
        "ada_01_one.ipynb": notebook("a01-x", seed=3),
        "01_one-bob.ipynb": notebook("a01-x"),
        "cyd/whatever.ipynb": notebook("a02-x"),
        "cyd/01_one.ipynb": notebook("a01-x"),
        "cyd/data.csv": "1,2",
        "dan.ipynb": notebook("a02-x", "nonsense"),
        "eve.pkl": "",
        "fay.ipynb": notebook("nonsense"),
        "gus_02_two.ipynb": "{",
        ".hidden/x.ipynb": notebook("a01-x"),
        "hal/.ipynb_checkpoints/x.ipynb": notebook("a01-x"),
        "IDA_01_ONE.IPYNB": notebook("a01-x"),
        "jan/a.ipynb": notebook("a01-x"),
        "jan/b.IPYNB": notebook("a01-x"),
        "lea_01_one-1.ipynb": notebook("a01-x"),
        "mia 01_one (2).ipynb": notebook("a01-x"),
        "nat_01_one-Copy1.ipynb": notebook("a01-x"),
        "01_one_12345.ipynb": notebook("a01-x"),
        "kim.pdf": "",
        "kim.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found, stray = find(tmp_path, KNOWN)
    told = {(one.student, one.assignment, one.trouble) for one in found}
    assert told == {
        ("ada", "01_one", None),
        ("bob", "01_one", None),
        ("cyd", "02_two", None),
        ("cyd", "01_one", None),
        ("dan", "02_two", None),
        ("eve", None, "not a notebook"),
        ("fay", None, "no cell of an assignment"),
        ("gus", "02_two", "unreadable"),
        ("IDA", "01_one", None),
        ("jan", "01_one", "more than one file: jan/a.ipynb, jan/b.IPYNB"),
        ("lea", "01_one", None),
        ("mia", "01_one", None),
        ("nat", "01_one", None),
        ("12345", "01_one", None),
        ("kim", None, "more than one file: kim.pdf, kim.txt"),
    }
    assert stray == ["cyd/data.csv"]
    assert {one.seed for one in found if one.student == "ada"} == {3}
    only, _ = find(tmp_path, KNOWN, "01_one")
    assert {one.assignment for one in only if one.student in ("eve", "fay")} == {"01_one"}


def test_pages_of_earlier_gradings(tmp_path: Path) -> None:
    """What was made here goes with its student; what somebody changed, or put there, stays and is named."""
    names = [f"feedback/{student}/01_one.html" for student in ("ada", "bob", "cyd", "dan")]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    told = {name: file_digest(tmp_path / name) for name in names}
    assert tidy(tmp_path, told) == []
    (tmp_path / "feedback" / "cyd" / "01_one.html").write_text("with a remark of mine")
    (tmp_path / "feedback" / "dan" / "scan.pdf").write_text("")
    for _ in range(2):
        assert tidy(tmp_path, {names[0]: told[names[0]]}) == ["feedback/cyd/01_one.html", "feedback/dan/scan.pdf"]
    left = {str(path.relative_to(tmp_path / "feedback")) for path in (tmp_path / "feedback").rglob("*")}
    assert left == {"ada", "ada/01_one.html", "cyd", "cyd/01_one.html", "dan", "dan/scan.pdf"}


def test_two_names_that_become_one_student(tmp_path: Path) -> None:
    for name in ("ana+x@u.ipynb", "ana_x@u.ipynb"):
        (tmp_path / name).write_text(notebook("a01-x"))
    with pytest.raises(GradingError, match=r"ana\+x@u.ipynb and ana_x@u.ipynb would both be handed in by 'ana_x@u'"):
        find(tmp_path, KNOWN)


@pytest.mark.parametrize(
    ("name", "safely"),
    [
        ("Ada Lovelace", "Ada Lovelace"),
        ("../../x", "_._.._x"),
        ("Zoe\u0308 O'Hara", "Zo\u00eb O'Hara"),
        ("=1+1", "_1_1"),
        ("-x", "_x"),
        ("a\nb", "a_b"),
        ("", "_"),
    ],
)
def test_names_are_safe(name: str, safely: str) -> None:
    assert safe(name) == safely


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("student,points\n", "has no column 'question'"),
        ("student,question,points\nada,a01-kappa,1\n", "'a01-kappa' is not marked by hand"),
        ("student,question,points\nada,a01-in-words,5\n", "points go from 0 to 4"),
        ("student,question,points\nada,a01-in-words,nan\n", "points go from 0 to 4"),
        ("student,question,points\nada,a01-in-words,good\n", "points go from 0 to 4"),
        ("student,question,points\nada,a01-in-words,1\nada,a01-in-words,2\n", "marked twice"),
        ("\x00\n", "no column"),
    ],
)
def test_marks_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "marks.csv").write_text(text)
    with pytest.raises(GradingError, match=said):
        read_marks(tmp_path / "marks.csv", {"a01-in-words": 4})


def test_marks_of_a_spreadsheet(tmp_path: Path) -> None:
    (tmp_path / "marks.csv").write_text('﻿student,question,points,maximum,comment\nada,q,"2,5",4,Good.\nbob,q,,4,\n')
    found = {("ada", "q"): {"points": 2.5, "comment": "Good."}}
    assert read_marks(tmp_path / "marks.csv", {"q": 4}) == found
    (tmp_path / "marks.csv").write_text("\ufeffstudent;question;points;comment\nada;q;2,5;Good.\nbob;q;;\n")
    assert read_marks(tmp_path / "marks.csv", {"q": 4}) == found


def test_seeds(tmp_path: Path) -> None:
    path = tmp_path / "seeds.csv"
    path.write_text("student,seed\nada,1\nbob,22\n")
    assert read_seeds(path) == {"ada": 1, "bob": 22}
    for text in ("student,seed\nada,x\n", "student,seed\nada,1\nada,2\n", "name,seed\n"):
        path.write_text(text)
        with pytest.raises(GradingError):
            read_seeds(path)
