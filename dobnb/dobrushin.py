"""Total variation between rows, the Dobrushin coefficient, the Doeblin bound, leave-one-out scores.

One definition, everywhere (book: def-kappa-float): rows within the tolerance of 1 are renormalised in float64, total
variation is half the L1 distance, and a pair *attains* kappa when its total variation is within `ATTAINS` of the
largest. Tensors of shape ``(..., N, N)`` in, float64 tensors on the same device out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dobnb.stochastic import Rows, as_stochastic

ATTAINS = 1e-12
"""A pair attains kappa when its float64 total variation is within this of the maximum: rounding in a sum of N terms is
about N * 1e-16, so ties of exact arithmetic stay ties."""


def pairwise_total_variation(A: Any, rows: Rows = "stochastic") -> Tensor:
    """Total variation between every two rows, ``TV_ij = 1/2 sum_k |A_ik - A_jk|`` (book: eq-tv).

    :param A: row-stochastic, shape (..., N, N).
    :param rows: ``"stochastic"``, or ``"substochastic"`` for rows that sum to less than 1, which are not renormalised.
    :return: float64, shape (..., N, N), symmetric with a zero diagonal, values in [0, 1].
    :raises MatrixError: see :func:`dobnb.stochastic.as_stochastic`.

    >>> pairwise_total_variation([[1.0, 0.0], [0.25, 0.75]])
    tensor([[0.0000, 0.7500],
            [0.7500, 0.0000]], dtype=torch.float64)
    """
    A = as_stochastic(A, rows)
    # cdist agrees with the definition term by term and holds no N x N x N array; the clamp undoes rounding above 1.
    return torch.cdist(A, A, p=1.0).div(2).clamp(max=1.0)


def dobrushin_coefficient(A: Any) -> Tensor:
    """The Dobrushin coefficient ``kappa(A) = max_ij TV_ij`` (book: def-kappa; Dobrushin, 1956).

    :param A: row-stochastic, shape (..., N, N).
    :return: float64, shape (...), values in [0, 1]: 0 where all rows agree, 1 where two rows have disjoint support.
    :raises MatrixError: see :func:`dobnb.stochastic.as_stochastic`.

    >>> dobrushin_coefficient([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.0, 0.5, 0.5]]).item()
    0.5
    """
    return pairwise_total_variation(A).amax((-2, -1))


def doeblin_bound(A: Any) -> Tensor:
    """The Doeblin bound ``1 - N min_ij A_ij`` on kappa (book: eq-doeblin).

    It reads off one entry what kappa reads off every pair of rows, and needs rows that sum to 1.

    :param A: row-stochastic, shape (..., N, N).
    :return: float64, shape (...), values in [0, 1], at least kappa.
    :raises MatrixError: see :func:`dobnb.stochastic.as_stochastic`.

    >>> doeblin_bound([[0.5, 0.5], [0.25, 0.75]]).item()
    0.5
    """
    A = as_stochastic(A)
    return (1 - A.shape[-1] * A.amin((-2, -1))).clamp(min=0.0)


def attaining_pairs(tv: Tensor) -> Tensor:
    """Which pairs attain kappa: total variation within `ATTAINS` of the largest (book: def-kappa-float).

    :param tv: pairwise total variation, shape (..., N, N), as :func:`pairwise_total_variation` returns it.
    :return: bool, shape (..., N, N), true above the diagonal only (i < j).
    """
    pairs = torch.ones(tv.shape[-2:], dtype=torch.bool, device=tv.device).triu(1)
    return (tv >= tv.amax((-2, -1), keepdim=True) - ATTAINS) & pairs


def leave_one_out(A: Any) -> Tensor:
    """Leave-one-out scores: how far kappa drops when token i is left out of the maximum over pairs (paper, Table 2).

    ``Delta_i = kappa - max_{j, k != i} TV_jk``. The score is positive only for tokens in every attaining pair, so both
    members of a single maximising pair often score, and where two disjoint pairs attain kappa every score is 0.
    With N = 2 no pair is left, so both scores are kappa.

    :param A: row-stochastic, shape (..., N, N).
    :return: float64, shape (..., N), values in [0, kappa].
    :raises MatrixError: see :func:`dobnb.stochastic.as_stochastic`.

    >>> leave_one_out([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.25, 0.25]])
    tensor([0.2500, 0.0000, 0.0000], dtype=torch.float64)
    """
    tv = pairwise_total_variation(A)
    N = tv.shape[-1]
    kappa = tv.amax((-2, -1))
    scores = []
    for i in range(N):
        others = [k for k in range(N) if k != i]
        scores.append(kappa - tv[..., others, :][..., others].amax((-2, -1)))
    return torch.stack(scores, -1)
