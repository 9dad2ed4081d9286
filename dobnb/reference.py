"""The API reference, read out of the source: signatures and docstrings by :mod:`ast`, so nothing is imported.

A docstring is reStructuredText with Sphinx's fields. Labels of the book in it (``thm-equality``) become links, and each
function names the chapters that use it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent
LABEL = re.compile(r"(?<![\w`-])(?:def|thm|lem|prop|cor|eq|ex|fig|sec|ch)-[a-z][\w-]*\b")
"""A label of the book, as docstrings cite it."""
DEFINED = re.compile(r"^ *(?::label:|:?name:) *([\w-]+)$|^\(([\w-]+)\)=$", re.MULTILINE)
"""Where a text defines a label: an option of a directive, or the line above a heading."""
ROLES = {"eq": "eq", "fig": "numref", "ex": "ref", "sec": "ref", "ch": "ref"}
"""How a label of each kind is linked; those of statements by ``prf:ref``."""
FENCED = re.compile(r"^```\{code-cell\}.*?^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Context:
    """What docstrings are linked to."""

    labels: frozenset[str]
    """Labels that the book defines."""
    code: Mapping[str, str]
    """The code cells of each chapter, by its name."""


def labels(texts: Iterable[str]) -> frozenset[str]:
    """The labels that `texts` define."""
    return frozenset(directive or section for text in texts for directive, section in DEFINED.findall(text))


def context(chapters: Mapping[str, str], pages: Iterable[str] = ()) -> Context:
    """What docstrings link to, in a book of these chapters and other pages, each given as its text."""
    code = {name: "\n".join(FENCED.findall(text)) for name, text in chapters.items()}
    return Context(labels([*chapters.values(), *pages]), code)


def modules() -> list[str]:
    """Names of the package's modules, without those that start with an underscore."""
    return sorted(path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("_"))


def public(module: str) -> Iterator[ast.stmt]:
    """The functions, classes and documented constants of a module that have a docstring and no leading underscore."""
    for statement, name, documented in _documented(_parse(module).body):
        if documented and not name.startswith("_"):
            yield statement


def _parse(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def _documented(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str, str]]:
    """(statement, name, docstring) of each function, class and assignment; the docstring of the last is below it."""
    for statement, below in zip(body, [*body[1:], None], strict=True):
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield statement, name, ast.get_docstring(statement) or ""
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                match below:
                    case ast.Expr(value=ast.Constant(value=str(words))):
                        yield statement, name, words
                    case _:
                        yield statement, name, ""


def summary(docstring: str) -> str:
    """The first sentence or paragraph of a docstring, on one line."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.?]) (?=[A-Z])", paragraph)[0]


def module_page(module: str, to: Context) -> str:
    """The section of one module, Markdown around reStructuredText."""
    parsed = _parse(module)
    lines = [f".. py:module:: dobnb.{module}", "", *_docstring(ast.get_docstring(parsed) or "", to), ""]
    for statement, name, docstring in _documented(parsed.body):
        if docstring and not name.startswith("_"):
            lines += _entry(statement, name, docstring, to)
    return "\n".join([f"(api-{module})=", f"## `dobnb.{module}`", "", "```{eval-rst}", *lines, "```", ""])


def _entry(statement: ast.stmt, name: str, docstring: str, to: Context) -> list[str]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            head = [f".. py:function:: {name}{_signature(statement)}"]
            body = [*_docstring(docstring, to), *_chapters(name, to)]
        case ast.ClassDef():
            names = [ast.unparse(base) for base in statement.bases if ast.unparse(base) != "NamedTuple"]
            kind = "exception" if any(base.endswith(("Error", "Exception", "Warning")) for base in names) else "class"
            based = [f"Based on {', '.join(f':py:class:`{base}`' for base in names)}.", ""] if names else []
            head = [f".. py:{kind}:: {name}"]
            body = [*_docstring(docstring, to), "", *based, *_chapters(name, to), "", *_members(statement, to)]
        case ast.AnnAssign(annotation=annotation):
            head = [f".. py:data:: {name}", f"   :type: {ast.unparse(annotation)}"]
            body = _docstring(docstring, to)
        case ast.Assign(value=value):
            head = [f".. py:data:: {name}", *_value(value)]
            body = _docstring(docstring, to)
    return [*head, "", *_indented(body), ""]


def _members(statement: ast.ClassDef, to: Context) -> Iterator[str]:
    """Fields, properties and methods of a class that have a docstring."""
    for member, name, docstring in _documented(statement.body):
        if not docstring or name.startswith("_"):
            continue
        match member:
            case ast.AnnAssign(annotation=annotation):
                head = [f".. py:attribute:: {name}", f"   :type: {ast.unparse(annotation)}"]
            case ast.FunctionDef(decorator_list=marks):
                marked = {ast.unparse(mark) for mark in marks}
                if "property" in marked:
                    returned = [f"   :type: {ast.unparse(member.returns)}"] if member.returns else []
                    head = [f".. py:property:: {name}", *returned]
                else:
                    first = [f"   :{mark}:" for mark in ("classmethod", "staticmethod") if mark in marked]
                    head = [f".. py:method:: {name}{_signature(member, method='staticmethod' not in marked)}", *first]
            case _:
                continue
        yield from [*head, "", *_indented(_docstring(docstring, to)), ""]


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef, method: bool = False) -> str:
    """Arguments and result as they are written, without the first of a method."""
    arguments = ast.parse(ast.unparse(function.args).join(("def f(", "): ..."))).body[0].args
    if method:
        (arguments.posonlyargs or arguments.args).pop(0)
    result = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"({ast.unparse(arguments)}){result}"


def _value(value: ast.expr) -> list[str]:
    written = ast.unparse(value)
    return [f"   :value: {written}"] if len(written) <= 60 and "\n" not in written else []


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"   {line}".rstrip() for line in lines)


def qualified(docstring: str, module: str) -> str:
    """`docstring` with every name that a role of it gives without its module written out, as it is shown elsewhere."""
    own = {name for _, name, _ in _documented(_parse(module).body)}
    return re.sub(
        r":(\w+):`([A-Za-z_]\w*)`",
        lambda found: f":{found[1]}:`~dobnb.{module}.{found[2]}`" if found[2] in own else found[0],
        docstring,
    )


def _docstring(docstring: str, to: Context) -> list[str]:
    """A docstring as reStructuredText that Sphinx renders: code as code, labels as links."""
    lines = ast.get_docstring(ast.Module([ast.Expr(ast.Constant(docstring))], [])).splitlines() if docstring else []
    return [line if line.lstrip().startswith((">>>", "...")) else _line(line, to) for line in lines]


def _line(line: str, to: Context) -> str:
    line = re.sub(r"(?<![:`\w])`([^`]+)`(?![`_])", r"``\1``", line).replace("(*", "(\\*")
    return LABEL.sub(lambda found: _link(found[0], to), line)


def _link(label: str, to: Context) -> str:
    return f":{ROLES.get(label.split('-')[0], 'prf:ref')}:`{label}`" if label in to.labels else label


def _chapters(name: str, to: Context) -> list[str]:
    """A line about which chapters' code uses `name`."""
    users = [chapter for chapter, code in to.code.items() if re.search(rf"\b{re.escape(name)}\b", code)]
    return ["", f"In the book: {', '.join(f':doc:`/book/{user}`' for user in users)}."] if users else []


def overview(to: Context) -> str:
    """A table of the names that ``import dobnb`` offers: where each lives, and what it is."""
    (homes,) = (
        ast.literal_eval(statement.value)
        for statement in ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "_HOME"
    )
    lines = ["```{eval-rst}", ".. list-table::", "   :header-rows: 1", "", "   * - name", "     - what it is"]
    for name, module in sorted(homes.items(), key=lambda item: item[0].lower()):
        (docstring,) = (words for _, found, words in _documented(_parse(module).body) if found == name)
        words = qualified(summary(docstring), module)
        lines += [f"   * - :py:obj:`~dobnb.{module}.{name}`", f"     - {' '.join(_docstring(words, to))}"]
    return "\n".join([*lines, "```"])
