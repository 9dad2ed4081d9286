"""The paper's tables as data, as far as they are at hand, and the comparison with what we measured.

Every number here is the paper's (P. Rola, 2026), not ours. Percentages are kept as the paper prints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from dobnb.measurement import Measurement, failing_layers, failures, percent, table


class Table1Row(NamedTuple):
    """One row of the paper's Table 1. Shares are percentages; None where the paper's entry is not at hand."""

    model: str
    training: str
    layers: int
    content_held: int
    content_tested: int
    all_percent: float
    heads_percent: float
    averaged_exact: int


TABLE_1: dict[str, Table1Row] = {
    row.model: row
    for row in (
        Table1Row("DINOv2-S", "self-supervised", 12, 6144, 6144, 91.2, 97.2, 12),
        Table1Row("DINOv2-B", "self-supervised", 12, 6137, 6144, 83.8, 95.9, 12),
        Table1Row("DINOv2-L", "self-supervised", 24, 12285, 12288, 81.9, 91.4, 24),
        Table1Row("DINOv2-B, no registers", "self-supervised", 12, 6141, 6144, 97.4, 94.0, 12),
        Table1Row("DeiT-B", "supervised", 12, 5582, 6144, 90.7, 82.3, 11),
    )
}
"""Table 1 by model: input-layer pairs that satisfy the condition, over 512 inputs."""

TABLE_4: dict[str, dict[int, int]] = {
    "DINOv2-S": {},
    "DINOv2-B": {1: 7},
    "DINOv2-L": {1: 3},
    "DINOv2-B, no registers": {1: 2, 11: 1},
    "DeiT-B": {11: 50, 12: 512},
}
"""Table 4 by model: layer (from 1) -> failing inputs out of 512 on content tokens; others have none."""

RANDOM_PERCENT = (24, 30)
"""How often uniformly random stochastic matrices satisfy the condition, in per cent (the paper's abstract)."""


def compare_table_1(ours: Sequence[Measurement], theirs: Sequence[str]) -> pd.DataFrame:
    """The paper's rows of Table 1 above the same quantities of our measurements, as printable text.

    :param ours: measurements of this book.
    :param theirs: names of :data:`TABLE_1`.
    :return: one row a system, indexed by system and inputs.
    :raises KeyError: a name that Table 1 does not have.
    """
    rows = []
    for name in theirs:
        row = TABLE_1[name]
        share = percent(row.content_held, row.content_tested)
        rows.append({
            "system": f"{name} (paper)",
            "inputs": "the paper's",
            "n": row.content_tested // row.layers,
            "per input, content": f"{row.content_held}/{row.content_tested} ({share})",
            "per input, all tokens": f"{row.all_percent}%",
            "heads, content": f"{row.heads_percent}%",
            "averaged, exact layers": f"{row.averaged_exact}/{row.layers}",
        })
    paper = pd.DataFrame(rows).set_index(["system", "inputs"])
    return pd.concat([paper, table(ours)]) if ours else paper


def compare_table_4(ours: Sequence[Measurement], theirs: Sequence[str]) -> pd.DataFrame:
    """The paper's rows of Table 4 above the same of our measurements, as printable text; all tokens are not at hand.

    :param ours: measurements of this book.
    :param theirs: names of :data:`TABLE_4`.
    :return: failing inputs by layer, one row a system, indexed by system and inputs.
    :raises KeyError: a name that Table 4 does not have.
    """
    rows = [
        {"system": f"{name} (paper)", "inputs": "the paper's", "n": 512, "content": failing_layers(TABLE_4[name]),
         "all tokens": "not at hand"}
        for name in theirs
    ]  # fmt: skip
    paper = pd.DataFrame(rows).set_index(["system", "inputs"])
    return pd.concat([paper, failures(ours)]) if ours else paper
