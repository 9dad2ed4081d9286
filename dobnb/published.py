"""The paper's tables as data, as far as they are at hand, and the comparison with what we measured.

Every number here is the paper's (P. Rola, 2026), not ours. Percentages are kept as the paper prints them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from dobnb.wording import failing_layers, percent, score

if TYPE_CHECKING:
    from dobnb.measurement import Measurement


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


class Table2Row(NamedTuple):
    """One row of the paper's Table 2: leave-one-out scores of the averaged matrices on all tokens."""

    model: str
    layers: int
    special: int
    """Layers whose carrier is a register or cls."""
    highest: float
    """The largest score of any layer."""
    patch_median: float
    """Median over the layers whose carrier is a patch."""
    modal: str
    """The register or cls token that carries most layers."""
    modal_layers: int
    """Of `special`, those that it carries."""


TABLE_2: dict[str, Table2Row] = {
    row.model: row
    for row in (
        Table2Row("DINOv2-S", 12, 6, 0.163, 8.3e-4, "reg#1", 4),
        Table2Row("DINOv2-B", 12, 7, 0.135, 1.7e-3, "reg#4", 5),
        Table2Row("DINOv2-L", 24, 13, 0.156, 1.2e-3, "reg#1", 8),
    )
}
"""Table 2 by model."""


class Table3Row(NamedTuple):
    """One row of the paper's Table 3: FT-Transformer over three seeds. Shares are percentages."""

    configuration: str
    tokens: int
    metric: str
    reached: tuple[float, float]
    """Lowest and highest test value over the seeds."""
    authors: tuple[float, float] | None
    """The same of the runs by the authors of FT-Transformer; None where there are none."""
    boosting: float
    linear: float
    features_percent: float
    all_percent: float
    averaged_held: int
    averaged_tested: int


TABLE_3: dict[tuple[str, int], Table3Row] = {
    ("california", 3): Table3Row(
        "California, 3 blocks", 9, "RMSE", (0.473, 0.475), (0.463, 0.465), 0.463, 0.731, 18.7, 16.1, 2, 6
    ),
    ("california", 6): Table3Row(
        "California, 6 blocks", 9, "RMSE", (0.468, 0.475), None, 0.463, 0.731, 11.3, 9.8, 3, 15
    ),
    ("higgs", 3): Table3Row(
        "Higgs, 3 blocks", 29, "accuracy", (0.725, 0.728), (0.721, 0.724), 0.716, 0.630, 44.4, 32.3, 3, 6
    ),
}
"""Table 3 by data set and number of blocks. The shares are of row-layer pairs, over 4000 test rows and three seeds."""

ABSTRACT: dict[str, str] = {
    "ViT-B/16": "64%",
    "RoBERTa": "essentially every input",
    "DistilBERT": "essentially every input",
}
"""What the abstract says of the models whose rows of Table 1 are not at hand: per input, on content tokens."""

RANDOM_PERCENT = (24, 30)
"""How often uniformly random stochastic matrices satisfy the condition, in per cent (the paper's abstract)."""

ALL_TOKENS_PERCENT = (82, 97)
"""Per input on all tokens, over DINOv2 and the language models, in per cent (the paper's abstract)."""


def compare_table_1(ours: Sequence[Measurement], theirs: Sequence[str]) -> pd.DataFrame:
    """The paper's rows of Table 1 above the same quantities of our measurements, as printable text.

    :param ours: measurements of this book.
    :param theirs: names of :data:`TABLE_1`.
    :return: one row a system, indexed by system and inputs.
    :raises KeyError: a name that Table 1 does not have.
    """
    from dobnb.measurement import table  # here, because pages are rendered without torch

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


def compare_null(nulls: Sequence[Mapping[str, Any]], trained: Mapping[str, Measurement]) -> pd.DataFrame:
    """Each architecture with the paper's trained weights, with ours where there are some, and untrained.

    :param nulls: see :func:`dobnb.untrained.measure_untrained`; two draws or more.
    :param trained: title of an architecture -> our measurement of trained weights.
    :return: one row an architecture and weights, printable text. Shares are in per cent of input-layer pairs, and of
        heads; of untrained weights the mean and the standard deviation over draws. kappa is on content tokens, the
        median over inputs (and draws), in the layers with the smallest and the largest.
    """
    from dobnb.untrained import null_table  # here, because pages are rendered without torch

    rows = []
    for null in nulls:
        title = null["provenance"]["model"]["title"]
        paper = {"architecture": title, "weights": "trained, paper"}
        if title in TABLE_1:
            row = TABLE_1[title]
            share = percent(row.content_held, row.content_tested)
            rows.append({**paper, "inputs": row.content_tested // row.layers, "content": share,
                         "all tokens": f"{row.all_percent}%", "heads": f"{row.heads_percent}%"})  # fmt: skip
        elif title in ABSTRACT:
            rows.append({**paper, "inputs": 512, "content": f"{ABSTRACT[title]} (abstract)"})
        if title in trained:
            found = trained[title]
            pairs, median = sum(found.n), found.per_input["content_kappa"]["median"]
            rows.append({
                "architecture": title,
                "weights": "trained, this book",
                "inputs": found.n[0],
                "content": percent(sum(found.per_input["content"]), pairs),
                "all tokens": percent(sum(found.per_input["all"]), pairs),
                "heads": percent(sum(found.heads["content"]), sum(found.heads["tested"])),
                "kappa by layer": f"{min(median):.3f} to {max(median):.3f}",
            })
        (ours,) = null_table([null]).reset_index().to_dict("records")
        weights = f"untrained, {ours['draws']} draws"
        shares = {column: f"{ours[column]}%" for column in ("content", "all tokens", "heads")}
        rows.append({"architecture": title, "weights": weights, "inputs": ours["n"], **shares,
                     "kappa by layer": ours["kappa by layer"]})  # fmt: skip
    return pd.DataFrame(rows).fillna("").set_index(["architecture", "weights"])


def compare_table_2(ours: Sequence[Measurement], theirs: Sequence[str]) -> pd.DataFrame:
    """The paper's rows of Table 2 above the same of our measurements, as printable text. Ties are ours: the paper's
    treatment of them is not at hand.

    :param ours: measurements of this book.
    :param theirs: names of :data:`TABLE_2`.
    :return: leave-one-out carriers, one row a system, indexed by system and inputs.
    :raises KeyError: a name that Table 2 does not have.
    """
    from dobnb.measurement import carriers  # here, because pages are rendered without torch

    rows = []
    for name in theirs:
        row = TABLE_2[name]
        rows.append({
            "system": f"{name} (paper)",
            "inputs": "the paper's",
            "n": 512,
            "layers": str(row.layers),
            "special carrier": str(row.special),
            "content carrier": "-",
            "undecided": "-",
            "tied": "-",
            "max score": score(row.highest),
            "median score, content carrier": score(row.patch_median),
            "modal special carrier": f"{row.modal} ({row.modal_layers}/{row.special})",
        })
    paper = pd.DataFrame(rows).set_index(["system", "inputs"])
    return pd.concat([paper, carriers(ours)]) if ours else paper


def compare_language_models(ours: Sequence[Measurement]) -> pd.DataFrame:
    """What the paper's abstract says of RoBERTa and DistilBERT, above our measurements; their rows of Table 1 are not
    at hand.

    :return: as :func:`compare_table_1`.
    """
    from dobnb.measurement import table  # here, because pages are rendered without torch

    low, high = ALL_TOKENS_PERCENT
    paper = pd.DataFrame([{
        "system": "RoBERTa, DistilBERT (paper)",
        "inputs": "the paper's",
        "n": 512,
        "per input, content": "essentially all",
        "per input, all tokens": f"{low}-{high}%, with DINOv2",
        "heads, content": "not at hand",
        "averaged, exact layers": "not at hand",
    }]).set_index(["system", "inputs"])  # fmt: skip
    return pd.concat([paper, table(ours)]) if ours else paper


def not_run(names: Sequence[str], ours: Sequence[Measurement], inputs: str, n: int = 512) -> pd.DataFrame:
    """Those of the paper's models that were not measured for this edition, each with the command that does it.

    :param names: keys of :data:`dobnb.models.MODELS`.
    :param ours: what was measured; its models are left out.
    :param inputs: what the command says after ``--inputs``.
    :param n: how many of them.
    """
    from dobnb.models import MODELS  # here, because pages are rendered without torch

    measured = {found.provenance["model"]["name"] for found in ours}
    rows = {
        MODELS[name].title: f"python -m dobnb measure {name} --inputs {inputs} --n {n} --out runs/{name}"
        for name in names
        if name not in measured
    }
    return pd.DataFrame({"not run for this edition; to run it": rows}).rename_axis("system")


def compare_table_3(ours: Mapping[tuple[str, int], Mapping[str, Any]]) -> pd.DataFrame:
    """The paper's Table 3, each row above our evaluation of the same configuration, as printable text.

    :param ours: key of :data:`TABLE_3` -> what :func:`dobnb.ft_transformer.evaluate` returned; what was not run may be
        missing, and is marked so.
    :return: one row a configuration and source. *Features* and *all*: the row-layer pairs that satisfy the condition,
        over rows, layers and seeds. *Averaged*: the layers, over the seeds, whose averaged matrix does, on features.
    :raises KeyError: a key that Table 3 does not have.
    """
    if unknown := set(ours) - set(TABLE_3):
        raise KeyError(f"Table 3 has no {sorted(unknown)[0]}")
    rows = []
    for key, paper in TABLE_3.items():
        configuration = {"configuration": paper.configuration}
        rows.append({
            **configuration,
            "by": "paper",
            "seeds": "3",
            "N": str(paper.tokens),
            "metric": paper.metric,
            "FT-T": _between(paper.reached),
            "authors of FT-T": _between(paper.authors) if paper.authors else "-",
            "boosting": f"{paper.boosting:.3f}",
            "linear": f"{paper.linear:.3f}",
            "features": f"{paper.features_percent}%",
            "all": f"{paper.all_percent}%",
            "averaged": f"{paper.averaged_held}/{paper.averaged_tested}",
        })
        row = _row_3(ours[key]) if key in ours else {"seeds": "not run"}
        rows.append({**configuration, "by": "this book", **row})
    return pd.DataFrame(rows).fillna("").set_index(["configuration", "by"])


def _row_3(record: Mapping[str, Any]) -> dict[str, str]:
    runs = record["runs"]
    reached = [run["metrics"]["test"] for run in runs]
    attention = [run["attention"] for run in runs]
    shares = {}
    for name in ("features", "all"):
        held = sum(sum(one[name]["held"]) for one in attention)
        shares[name] = percent(held, sum(one["n"] * len(one[name]["held"]) for one in attention))
    averaged = [verdict for one in attention for verdict in one["features"]["averaged"]["holds"]]
    return {
        "seeds": str(len(runs)),
        "N": str(len(record["features"]) + 1),
        "metric": runs[0]["metric"],
        "FT-T": _between((min(reached), max(reached))),
        **{name: f"{record['baselines'][name]['test']:.3f}" for name in ("boosting", "linear")},
        **shares,
        "averaged": f"{sum(averaged)}/{len(averaged)}",
    }


def _between(values: tuple[float, float]) -> str:
    low, high = (f"{value:.3f}" for value in values)
    return low if low == high else f"{low}-{high}"


def compare_table_4(ours: Sequence[Measurement], theirs: Sequence[str]) -> pd.DataFrame:
    """The paper's rows of Table 4 above the same of our measurements, as printable text; all tokens are not at hand.

    :param ours: measurements of this book.
    :param theirs: names of :data:`TABLE_4`.
    :return: failing inputs by layer, one row a system, indexed by system and inputs.
    :raises KeyError: a name that Table 4 does not have.
    """
    from dobnb.measurement import failures  # here, because pages are rendered without torch

    rows = [
        {"system": f"{name} (paper)", "inputs": "the paper's", "n": 512, "content": failing_layers(TABLE_4[name]),
         "all tokens": "not at hand"}
        for name in theirs
    ]  # fmt: skip
    paper = pd.DataFrame(rows).set_index(["system", "inputs"])
    return pd.concat([paper, failures(ours)]) if ours else paper
