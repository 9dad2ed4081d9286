"""Docstrings cite the book by label: each label must be defined there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KINDS = "def|thm|lem|prop|cor|eq|ex|fig|sec|ch"


def defined() -> set[str]:
    """Labels of directives (``:label:``, ``name:``) and of sections (``(label)=``) in the text of the book."""
    texts = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "book" / "text").glob("*.md"))
    found = re.findall(r"^ *(?::label:|:?name:) *([\w-]+)$|^\(([\w-]+)\)=$", texts, re.MULTILINE)
    return {directive or section for directive, section in found}


def cited() -> list[tuple[str, str]]:
    """(module, label) for every label in a string of the package: docstrings of modules, functions and fields."""
    found = set()
    for path in sorted((ROOT / "dobnb").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Expr(value=ast.Constant(value=str(prose))):
                    found |= {(path.name, label) for label in re.findall(rf"\b(?:{KINDS})-[a-z][\w-]*", prose)}
    return sorted(found)


def test_the_package_cites_the_book():
    assert {("equality.py", "thm-equality"), ("dobrushin.py", "def-kappa-float")} <= set(cited())


@pytest.mark.parametrize(("module", "label"), cited())
def test_every_cited_label_is_in_the_book(module, label):
    assert label in defined(), f"dobnb/{module} cites {label}, which no page of book/text defines"
