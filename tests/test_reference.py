"""The API reference: complete, linked, and out of the source; errors and their page say the same."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import dobnb
from dobnb import pages, reference
from dobnb.errors import DobnbError

ROOT = Path(__file__).parents[1]
BOOK = pages.Book(ROOT)
TO = BOOK.context


def test_every_module_is_on_exactly_one_page() -> None:
    found = [
        module
        for page in sorted((ROOT / "book").glob("api*.md"))
        for asked in pages.GENERATED.finditer(page.read_text())
        if asked[1] == "api"
        for module in re.findall(r"^\(api-(\w+)\)=$", pages.api(BOOK, page, *asked[2].split()), re.MULTILINE)
    ]
    assert sorted(found) == reference.modules()


@pytest.mark.parametrize("module", ["stochastic", "equality", "measurement", "weights", "capture"])
def test_what_is_documented_is_what_there_is(module: str) -> None:
    """Names, and the names of arguments, are those that Python itself finds after an import."""
    imported = importlib.import_module(f"dobnb.{module}")
    page = reference.module_page(module, TO)
    own = {
        name: value
        for name, value in vars(imported).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == imported.__name__ and value.__doc__
    }
    functions = {name: value for name, value in own.items() if inspect.isfunction(value)}
    assert functions
    for name, value in functions.items():
        (signature,) = re.findall(rf"^\.\. py:function:: {name}(\(.*)$", page, re.MULTILINE)
        arguments = ast.parse(f"def f{signature.partition(' -> ')[0]}: ...").body[0].args
        there = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        assert there == list(inspect.signature(value).parameters), name
    for name, value in own.items():
        if inspect.isclass(value):
            kind = "exception" if issubclass(value, Exception) else "class"
            assert f".. py:{kind}:: {name}\n" in page


def test_a_docstring_becomes_links_and_code() -> None:
    to = reference.Context(frozenset({"thm-a", "eq-b"}), {"02_x": "y = g(1)"})
    line = "By thm-a and (eq-b), not thm-c, `x` is :func:`g` (*batch)."
    assert reference._line(line, to) == (
        "By :prf:ref:`thm-a` and (:eq:`eq-b`), not thm-c, ``x`` is :func:`g` (\\*batch)."
    )
    assert reference._chapters("g", to)[-1] == "In the book: :doc:`/book/02_x`."
    assert reference._chapters("h", to) == []


def test_names_in_roles_exist() -> None:
    """``:func:`name``` without a module means a name of the same module, or of a class in it."""
    missing = []
    for module in reference.modules():
        source = (ROOT / "dobnb" / f"{module}.py").read_text()
        body = ast.parse(source).body
        own = {name for _, name, _ in reference._documented(body)}
        own |= {node.id for one in body if isinstance(one, ast.Assign) for node in ast.walk(one.targets[0])
                if isinstance(node, ast.Name)}  # fmt: skip
        lines = re.findall(r"^\s*from dobnb\S* import (.+)$", source, re.MULTILINE)
        imported = set(re.findall(r"\w+", " ".join(lines)))
        for kind, name in re.findall(r":(func|class|data|exc|mod):`~?([\w.]+)`", source):
            home, _, last = name.rpartition(".")
            if kind == "mod":
                if name.startswith("dobnb.") and last not in reference.modules():
                    missing.append((module, name))
            elif home.startswith("dobnb."):
                place = (ROOT / "dobnb" / f"{home.split('.')[1]}.py").read_text()
                if last not in {one for _, one, _ in reference._documented(ast.parse(place).body)}:
                    missing.append((module, name))
            elif not home and name not in own | imported:
                missing.append((module, name))
    assert missing == []


def test_the_overview_lists_what_import_dobnb_offers() -> None:
    listed = re.findall(r"~dobnb\.\w+\.(\w+)`\n", reference.overview(TO))
    assert sorted(listed) == dobnb.__all__


def test_every_public_name_links_to_the_book() -> None:
    """The functions of the mathematics cite a definition, theorem or equation, and say which chapters use them."""
    for name in ("check_equality", "dobrushin_coefficient", "doeblin_bound", "rollout", "restrict", "depth_bounds"):
        module = dobnb._HOME[name]
        page = reference.module_page(module, TO)
        entry = page.split(f".. py:function:: {name}(")[1].split("\n.. py:")[0]
        assert re.search(r":prf:ref:`|:eq:`", entry), name
        assert "In the book: :doc:" in entry and ":return:" in entry, name


def errors() -> set[str]:
    """Every class of error, and the warning, that the package defines."""
    found: set[str] = {"DobnbError", "CrossAttentionSkipped"}
    trees = [ast.parse(path.read_text()) for path in (ROOT / "dobnb").glob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for _ in classes:  # until families are complete
        found |= {one.name for one in classes if {ast.unparse(base) for base in one.bases} & found}
    return found


def test_errors_and_their_page_say_the_same() -> None:
    assert len(errors()) > 20 and issubclass(dobnb.errors.PaddingError, DobnbError)
    text = (ROOT / "book" / "troubleshooting.md").read_text()
    entries = re.findall(r"^### `(\w+)`$", text, re.MULTILINE)
    assert len(entries) == len(set(entries))
    assert set(entries) == errors()
    for entry in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        whole = all(part in entry for part in ("*What happened.*", "*Why.*", "*What to do.*"))
        assert whole or entry.startswith(("`CaptureError", "`DobnbError", "`CrossAttentionSkipped")), entry[:30]
