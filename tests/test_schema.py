"""The page that documents a result names every field of one, and no other."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tiny import noise, tiny

from dobnb.measurement import SCHEMA, prepare
from dobnb.runs import run

PAGE = (Path(__file__).parents[1] / "book" / "schema.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A run with everything in it, read as any program would read it."""
    out = tmp_path_factory.mktemp("run") / "out"
    run(prepare(tiny(), noise(3), batch_size=1), out, matrices=True)
    with np.load(out / "matrices.npz", allow_pickle=False) as matrices:
        return json.loads((out / "result.json").read_text()), set(matrices.files)


def documented(title):
    """The fields in the first column of a section's table."""
    section = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)[1]
    first = re.findall(r"^\| (`[^|]*) \|", section, re.M)
    return {name for cell in first for name in re.findall(r"`(\w+)`", cell)}


def test_every_field_is_documented_and_every_documented_field_is_there(result):
    found, _ = result
    sections = {"per_input", "heads", "averaged", "depth", "provenance"}
    assert documented("Counts") | sections == set(found)
    for name in sections:
        assert documented(f"`{name}`") == set(found[name]), name
    for quantiles in (found["per_input"]["all_margin"], found["depth"]["truth"]):
        assert set(quantiles) == {"q05", "median", "q95"}


def test_the_parts_of_the_provenance_are_named(result):
    born = result[0]["provenance"]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.M))
    for name in ("model", "inputs", "settings"):
        assert set(born[name]) - set(re.findall(r"`(\w+)`", rows[name])) == set(), name
    assert set(born["machines"][0]) - set(re.findall(r"`(\w+)`", rows["machines"])) == set()


def test_the_arrays_are_named(result):
    section = PAGE[PAGE.index("## `matrices.npz`") : PAGE.index("## While a run lasts")]
    named = set(re.findall(r"`(\w+)`", section))
    named |= {name.replace("content_", "all_", 1) for name in named if name.startswith("content_")} - {"all_tokens"}
    assert result[1] <= named


def test_the_page_is_of_this_schema():
    assert f"`schema` is {SCHEMA};" in PAGE
