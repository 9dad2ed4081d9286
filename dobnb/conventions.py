"""The same attention under other conventions: what a verdict owes to how rows are restricted (book: ch-conventions).

The book takes the mean over heads, restricts it to the content tokens and divides each row by what is left of it. The
paper's text does not settle this. Here the other readings are measured beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor, nn

from dobnb.capture import stream_attention
from dobnb.equality import EqualityReport, check_equality
from dobnb.inputs import Inputs
from dobnb.measurement import MeasurementError, percent
from dobnb.stochastic import Rows, restrict
from dobnb.tokens import content_mask, token_roles

BOOK = "mean, restrict, renormalise"
RAW = "mean, restrict"
HEADS_FIRST = "restrict, renormalise, mean"
ALL = "mean, all tokens"
PER_INPUT = (BOOK, RAW, HEADS_FIRST, ALL)
"""How one input's matrix is made: what is done to its heads, in this order. Restricting heads and taking their mean
without renormalising is `RAW` too, since restriction alone is linear."""
HEADS = ("restrict, renormalise", "restrict", "all tokens")
"""What is done to the matrix of a single head; the book's reading first."""
INPUTS_FIRST = "mean over inputs of " + BOOK
INPUTS_HEADS_FIRST = "mean over inputs of " + HEADS_FIRST
AVERAGED = (BOOK, RAW, INPUTS_FIRST, INPUTS_HEADS_FIRST, ALL)
"""How the averaged matrix is made; the mean is over heads and inputs where it comes first."""


@dataclass(frozen=True)
class Conventions:
    """Verdicts of n inputs over L layers of H heads, by convention."""

    per_input: dict[str, dict[str, Tensor]]
    """By the names of `PER_INPUT`: ``holds`` (bool), ``kappa`` and ``margin`` (float64), each (L, n)."""
    heads: dict[str, dict[str, Tensor]]
    """By the names of `HEADS`, the same of single heads, each (L, n, H)."""
    averaged: dict[str, dict[str, Tensor]]
    """By the names of `AVERAGED`, the same of the averaged matrices, each (L,)."""
    special: Tensor
    """The mass that the rows of content tokens hold on special tokens, the mean over rows, in [0, 1], (L, n, H)."""
    spread: Tensor
    """How much that mass differs between the rows of an input's mean over heads: its standard deviation, (L, n)."""


def by_convention(model: nn.Module, inputs: Inputs, batch_size: int = 8) -> Conventions:
    """Measure a model's attention under every convention, all inputs.

    :param model: as :func:`dobnb.capture.stream_attention` takes it, with tokens whose roles can be told.
    :param inputs: of one length, without padding.
    :param batch_size: inputs a forward pass.
    :raises MeasurementError: inputs that differ in which tokens are content.
    :raises CaptureError: the model's attention cannot be streamed.
    :raises TokenError: roles that cannot be told.
    :raises MatrixError: fewer than two content tokens, or a row without mass on them.
    """
    reports: dict[str, list[list[EqualityReport]]] = {name: [] for name in (*PER_INPUT, *HEADS)}
    sums: dict[str, list[Tensor]] = {name: [] for name in (ALL, INPUTS_FIRST, INPUTS_HEADS_FIRST)}
    special: list[list[Tensor]] = []
    spread: list[list[Tensor]] = []
    roles = token_roles(model, inputs.batch(0, 1))[0]
    content = content_mask(roles)

    def sink(layer: int, weights: Tensor) -> None:
        if layer == len(special):
            for of_layers in (special, spread, *reports.values()):
                of_layers.append([])
            for total in sums.values():
                total.append(torch.zeros(()))
        heads = weights.double()
        mean = heads.mean(1)
        made = _made(heads, mean, content)
        for name, (matrices, rows) in made.items():
            reports[name][layer].append(check_equality(matrices, rows=rows))
        for total, name in ((INPUTS_FIRST, BOOK), (INPUTS_HEADS_FIRST, HEADS_FIRST), (ALL, ALL)):
            sums[total][layer] = sums[total][layer] + made[name][0].sum(0)
        lost = heads[:, :, content][..., ~content].sum(-1)  # (B, H, content rows)
        special[layer].append(lost.mean(-1))
        spread[layer].append(lost.mean(1).std(-1))

    for start in range(0, len(inputs), batch_size):
        batch = inputs.batch(start, min(start + batch_size, len(inputs)))
        if any(one != roles for one in token_roles(model, batch)):
            raise MeasurementError("inputs differ in which tokens are content; compare conventions on one length")
        stream_attention(model, batch, sink)

    totals = {name: torch.stack(total) / len(inputs) for name, total in sums.items()}
    whole = totals[ALL]
    averaged: dict[str, tuple[Tensor, Rows]] = {
        BOOK: (restrict(whole, content), "stochastic"),
        RAW: (restrict(whole, content, renormalize=False), "substochastic"),
        **{name: (totals[name], "stochastic") for name in (INPUTS_FIRST, INPUTS_HEADS_FIRST, ALL)},
    }
    values = {name: _values([_joined(layer) for layer in of_layers]) for name, of_layers in reports.items()}
    return Conventions(
        {name: values[name] for name in PER_INPUT},
        {name: values[name] for name in HEADS},
        {name: _of(check_equality(matrices, rows=rows)) for name, (matrices, rows) in averaged.items()},
        torch.stack([torch.cat(layer) for layer in special]),
        torch.stack([torch.cat(layer) for layer in spread]),
    )


def _made(heads: Tensor, mean: Tensor, content: Tensor) -> dict[str, tuple[Tensor, Rows]]:
    """The matrices of B inputs under each convention of `PER_INPUT` and `HEADS`, and the kind of their rows."""
    return {
        BOOK: (restrict(mean, content), "stochastic"),
        RAW: (restrict(mean, content, renormalize=False), "substochastic"),
        HEADS_FIRST: (restrict(heads, content).mean(1), "stochastic"),
        ALL: (mean, "stochastic"),
        HEADS[0]: (restrict(heads, content), "stochastic"),
        HEADS[1]: (restrict(heads, content, renormalize=False), "substochastic"),
        HEADS[2]: (heads, "stochastic"),
    }


def _of(report: EqualityReport) -> dict[str, Tensor]:
    return {"holds": report.holds, "kappa": report.kappa, "margin": report.margin}


def _joined(batches: list[EqualityReport]) -> dict[str, Tensor]:
    parts = [_of(report) for report in batches]
    return {what: torch.cat([part[what] for part in parts]) for what in parts[0]}


def _values(layers: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {what: torch.stack([layer[what] for layer in layers]) for what in layers[0]}


# Tables -------------------------------------------------------------------------------------------------------------


def shares(found: Conventions) -> pd.DataFrame:
    """One row a convention, printable text: first of the mean over heads, input by input, then of single heads.

    Columns: the triples of input, layer and, where there are several, head that satisfy the condition; the verdicts
    that differ from the first row's, which is the book's; the medians of kappa and margin.
    """
    rows = []
    for matrix, of in (("mean over heads", found.per_input), ("single head", found.heads)):
        book = next(iter(of.values()))["holds"]
        for name, values in of.items():
            holds = values["holds"]
            rows.append({
                "matrix": matrix,
                "what is done": name,
                "holds": f"{int(holds.sum())}/{holds.numel()} ({percent(int(holds.sum()), holds.numel())})",
                "differ": "" if holds is book else str(int((holds != book).sum())),
                "median kappa": f"{values['kappa'].median():.3f}",
                "median margin": f"{values['margin'].median():.0e}",
            })
    return pd.DataFrame(rows).set_index(["matrix", "what is done"])


def averaged_layers(found: Conventions) -> pd.DataFrame:
    """Of the averaged matrices: one row a convention, printable text; the layers that fail count from 1."""
    rows = []
    for name, values in found.averaged.items():
        failing = (~values["holds"]).nonzero().flatten() + 1
        rows.append({
            "how the average is made": name,
            "exact layers": f"{int(values['holds'].sum())}/{len(values['holds'])}",
            "layers that fail": ", ".join(map(str, failing.tolist())) or "none",
            "smallest kappa": f"{values['kappa'].min():.3f}",
            "smallest margin": f"{values['margin'].min():.0e}",
        })
    return pd.DataFrame(rows).set_index("how the average is made")


def by_layer(found: Conventions) -> pd.DataFrame:
    """Layer by layer: the inputs that satisfy the condition under each convention, and the mass on special tokens.

    Columns: of `PER_INPUT`, counts of inputs; the mass, mean over inputs and heads, and of the head that has most; its
    standard deviation over rows, the mean over inputs. In per cent of a row.
    """
    special = 100 * found.special.mean(1)  # (L, H)
    columns: dict[str, list] = {name: values["holds"].sum(1).tolist() for name, values in found.per_input.items()}
    columns |= {
        "special, %": [f"{value:.1f}" for value in special.mean(1)],
        "largest head, %": [f"{value:.1f}" for value in special.amax(1)],
        "spread, %": [f"{value:.1f}" for value in 100 * found.spread.mean(1)],
    }
    return pd.DataFrame(columns, index=pd.RangeIndex(1, len(special) + 1, name="layer"))
