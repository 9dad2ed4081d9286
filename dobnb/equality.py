"""The equality condition for the layerwise Dobrushin bound, with the exact gap of every pair.

For the factor ``B = alpha I + (1 - alpha) A`` and every pair of rows (book: lem-pair-identity)::

    TV_B(i, j) = alpha + (1 - alpha) TV_A(i, j) - min(alpha, (1 - alpha) (A_ji - A_ii)+)
                                                - min(alpha, (1 - alpha) (A_ij - A_jj)+)

so one look at the pairs of ``A`` gives kappa of both matrices, the gap of the bound, and whether it is tight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dobnb import kernel
from dobnb.dobrushin import attaining_pairs, on_cpu, pairwise_total_variation, row_pairs, total_variation
from dobnb.stochastic import Rows, as_square, as_stochastic, check_alpha, restrict

NEAR_TIE = 1e-6
"""A verdict whose margin is below this could flip within the rounding of a float32 forward pass."""


@dataclass(frozen=True)
class EqualityReport:
    """What :func:`check_equality` found. Every field is a tensor over the batch, shape ``(...)`` unless stated."""

    kappa: Tensor
    """The Dobrushin coefficient of A, float64, in [0, 1]."""
    factor_kappa: Tensor
    """The Dobrushin coefficient of ``alpha I + (1 - alpha) A``, float64, in [0, 1]."""
    bound: Tensor
    """The layerwise bound ``alpha + (1 - alpha) kappa``, float64, ``(1 + kappa) / 2`` at alpha 1/2 (eq-layer-bound)."""
    gap: Tensor
    """``bound - factor_kappa``, float64, at least 0, and exactly 0 where `holds`."""
    relative_gap: Tensor
    """``gap / ((1 - alpha) kappa)``, so gap over kappa/2 at alpha 1/2, as the paper shows it; NaN where kappa is 0."""
    holds: Tensor
    """bool: some pair that attains kappa is mutually self-dominant, so the bound is tight (book: thm-equality). Ties of
    float32 entries may break when rows are renormalised; `margin` is then below :data:`NEAR_TIE`."""
    pair: Tensor
    """int64, shape (..., 2), i < j: the first attaining pair that is mutually self-dominant; where none is, the first
    attaining pair."""
    attaining: Tensor
    """int64: how many pairs i < j attain kappa."""
    margin: Tensor
    """float64, in [0, 1]: a change below which the verdict stands. As long as every dominance slack, and every
    difference of two total variations, moves by less, it does (book: prop-margin). It is the minimum over pairs of
    ``max(s_ij, kappa - TV_ij)``, with ``-s_ij`` where the condition fails (book: def-margin)."""


def dominance_slack(A: Any, rows: Rows = "stochastic") -> Tensor:
    """How far each pair is from losing, or gaining, mutual self-dominance (book: def-self-dominant).

    ``s_ij = min(A_ii - A_ji, A_jj - A_ij)``; the pair is mutually self-dominant where it is at least 0.

    :param A: row-stochastic, shape (..., N, N).
    :return: float64, shape (..., N, N), symmetric, values in [-1, 1].
    :raises MatrixError: see :func:`dobnb.stochastic.as_stochastic`.

    >>> dominance_slack([[0.5, 0.5], [0.75, 0.25]])[0, 1].item()
    -0.25
    """
    A = as_stochastic(A, rows)
    over = A.diagonal(dim1=-2, dim2=-1).unsqueeze(-2) - A  # over[j, i] = A_ii - A_ji
    return torch.minimum(over, over.mT)


def factor_total_variation(A: Any, alpha: float = 0.5, rows: Rows = "stochastic") -> Tensor:
    """Total variation between the rows of ``alpha I + (1 - alpha) A``, from `A` alone (book: lem-pair-identity).

    :param A: row-stochastic, shape (..., N, N).
    :param alpha: weight of the residual stream, strictly between 0 and 1.
    :return: float64, shape (..., N, N), symmetric with a zero diagonal.
    :raises MatrixError: see :func:`dobnb.stochastic.as_stochastic`; `alpha` out of range.

    >>> factor_total_variation([[0.0, 1.0], [0.5, 0.5]])[0, 1].item()  # 1/2 + 1/4 - min(1/2, 1/4) - min(1/2, 1/4)
    0.25
    """
    A = as_stochastic(A, rows)
    alpha = check_alpha(alpha)
    over = A - A.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)  # over[j, i] = A_ji - A_ii
    loss = ((1 - alpha) * over).clamp(0, alpha)
    tv = alpha + (1 - alpha) * pairwise_total_variation(A, rows) - loss - loss.mT
    return tv - tv.diagonal(dim1=-2, dim2=-1).diag_embed()


def check_equality(
    A: Any, alpha: float = 0.5, rows: Rows = "stochastic", tokens: Any = None
) -> EqualityReport:
    """Is the bound ``kappa(alpha I + (1 - alpha) A) <= alpha + (1 - alpha) kappa(A)`` tight, and by how much not?

    The verdict is the theorem's (book: thm-equality): it comes from the signs of ``A_ii - A_ji`` and ``A_jj - A_ij`` on
    the pairs that attain kappa, never from comparing two rounded numbers, and it does not depend on alpha. The gap is
    the minimum over all pairs of ``(1 - alpha) (kappa - TV_ij)`` plus the pair's two losses (book: thm-gap).

    :param A: shape (..., N, N), N at least 2; see :func:`dobnb.stochastic.as_stochastic`.
    :param alpha: weight of the residual stream, strictly between 0 and 1; the paper takes 1/2.
    :param rows: ``"stochastic"``, or ``"substochastic"`` for rows that sum to less than 1, which are not renormalised.
    :param tokens: the report is on ``restrict(A, tokens)``, of stochastic rows, without a copy of the batch.
    :return: an :class:`EqualityReport`, batched like `A`.
    :raises MatrixError: see :func:`dobnb.stochastic.as_stochastic` and, with `tokens`,
        :func:`dobnb.stochastic.restrict`; `alpha` out of range.

    >>> report = check_equality([[0.1, 0.9], [0.9, 0.1]])
    >>> bool(report.holds), round(report.kappa.item(), 3), round(report.gap.item(), 3)
    (False, 0.8, 0.8)
    """
    A = as_square(A, rows)
    alpha = check_alpha(alpha)
    found = on_cpu(A, kernel.REPORT, alpha, rows, tokens)
    if found is None:
        return check_equality_anywhere(A if tokens is None else restrict(A, tokens), alpha, rows)
    batch = A.shape[:-2]
    kappa, gap, holds, attaining, margin = (
        torch.from_numpy(values).reshape(batch)
        for values in (found.kappa, found.gap, found.holds, found.attaining, found.margin)
    )
    return _report(alpha, kappa, gap, holds, torch.from_numpy(found.pair).reshape(*batch, 2), attaining, margin)


def _report(
    alpha: float, kappa: Tensor, gap: Tensor, holds: Tensor, pair: Tensor, attaining: Tensor, margin: Tensor
) -> EqualityReport:
    """The report, with what follows from kappa and the gap."""
    bound = alpha + (1 - alpha) * kappa
    relative = torch.where(kappa > 0, gap / ((1 - alpha) * kappa), torch.nan)
    return EqualityReport(kappa, bound - gap, bound, gap, relative, holds, pair, attaining, margin)


def check_equality_anywhere(A: Any, alpha: float = 0.5, rows: Rows = "stochastic") -> EqualityReport:
    """:func:`check_equality` in torch alone, on any device: the definition, which the compiled kernel is compared with.

    It takes about ten times the memory of a float32 batch; pass a large one in parts.

    :param A: as :func:`check_equality` takes it; so are the others, and what is raised.
    """
    A = as_stochastic(A, rows)
    alpha = check_alpha(alpha)
    i, j = row_pairs(A.shape[-1], A.device)
    own = A.diagonal(dim1=-2, dim2=-1)
    over_i, over_j = own[..., i] - A[..., j, i], own[..., j] - A[..., i, j]
    tv, slack = total_variation(A, rows), torch.minimum(over_i, over_j)
    kappa = tv.amax(-1)
    attains = attaining_pairs(tv)
    witness = attains & (slack >= 0)
    holds = witness.any(-1)

    below = kappa.unsqueeze(-1) - tv
    loss = ((alpha - 1) * over_i).clamp(0, alpha) + ((alpha - 1) * over_j).clamp(0, alpha)
    gap = ((1 - alpha) * below + loss).amin(-1).masked_fill(holds, 0.0)
    first = torch.where(holds.unsqueeze(-1), witness, attains).to(torch.uint8).argmax(-1)
    # A pair flips the verdict once it both attains kappa and lies on the other side of the condition.
    away = torch.where(holds.unsqueeze(-1), slack, -slack)
    pair, margin = torch.stack([i[first], j[first]], -1), torch.maximum(away, below).amin(-1)
    return _report(alpha, kappa, gap, holds, pair, attains.sum(-1), margin)
