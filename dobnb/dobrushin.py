"""Total variation between rows, the Dobrushin coefficient, the Doeblin bound, leave-one-out scores.

One definition, everywhere (book: def-kappa-float): rows within the tolerance of 1 are renormalised in float64, total
variation is half the L1 distance, and a pair *attains* kappa when its total variation is within `ATTAINS` of the
largest. Tensors of shape ``(..., N, N)`` in, float64 tensors on the same device out.

:func:`total_variation` and :func:`attaining_pairs` are the definition, readable, on any device. On the CPU the
coefficient and the scores come from :mod:`dobnb.kernel`, which is compiled and compared with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dobnb import kernel
from dobnb.kernel import ATTAINS
from dobnb.stochastic import TOLERANCE, Rows, as_square, as_stochastic, restrict, token_index


def row_pairs(n: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """The pairs i < j of `n` rows in row-major order, over which kappa is a maximum (book: def-kappa).

    :return: two int64 tensors of shape (P,), P = n (n - 1) / 2.

    >>> row_pairs(3)
    (tensor([0, 0, 1]), tensor([1, 2, 2]))
    """
    i, j = torch.triu_indices(n, n, 1, device=device)
    return i, j


def total_variation(A: Any, rows: Rows = "stochastic") -> Tensor:
    """Total variation ``TV_ij = 1/2 sum_k |A_ik - A_jk|`` of every pair of rows (book: eq-tv), ordered as `row_pairs`.

    :param A: row-stochastic, shape (..., N, N).
    :param rows: ``"stochastic"``, or ``"substochastic"`` for rows that sum to less than 1, which are not renormalised.
    :return: float64, shape (..., P), values in [0, 1].
    :raises MatrixError: see :func:`dobnb.stochastic.as_stochastic`.

    >>> total_variation([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.0, 0.5, 0.5]])
    tensor([0.2500, 0.5000, 0.2500], dtype=torch.float64)
    """
    A = as_stochastic(A, rows)
    N = A.shape[-1]
    # Neither holds an N x N x N array. pdist takes one matrix and visits each pair once; cdist takes many, each twice.
    if N < 64 or A.numel() == 0:
        i, j = row_pairs(N, A.device)
        distance = torch.cdist(A, A, p=1.0)[..., i, j]
    else:
        flat = [torch.pdist(matrix, p=1.0) for matrix in A.reshape(-1, N, N)]
        distance = torch.stack(flat).reshape(*A.shape[:-2], -1)
    return distance.div(2).clamp(max=1.0)  # rounding may leave a distance above 2


def pairwise_total_variation(A: Any, rows: Rows = "stochastic") -> Tensor:
    """The same as a symmetric matrix with a zero diagonal.

    :param A: row-stochastic, shape (..., N, N).
    :param rows: see :func:`total_variation`.
    :return: float64, shape (..., N, N), values in [0, 1].
    :raises MatrixError: see :func:`dobnb.stochastic.as_stochastic`.

    >>> pairwise_total_variation([[1.0, 0.0], [0.25, 0.75]])
    tensor([[0.0000, 0.7500],
            [0.7500, 0.0000]], dtype=torch.float64)
    """
    A = as_stochastic(A, rows)
    i, j = row_pairs(A.shape[-1], A.device)
    tv = torch.zeros_like(A)
    tv[..., i, j] = tv[..., j, i] = total_variation(A, rows)
    return tv


def on_cpu(
    A: Tensor, what: int, alpha: float = 0.5, rows: Rows = "stochastic", tokens: Any = None
) -> kernel.Found | None:
    """What the compiled kernel finds, or None where this is for the definition: another device, or a matrix so close to
    the tolerance that the order of its sum decides.

    :param A: as :func:`dobnb.stochastic.as_square` returns it; the batch is flattened.
    :raises MatrixError: see :func:`dobnb.stochastic.as_stochastic` and :func:`dobnb.stochastic.restrict`.
    """
    if A.device.type != "cpu":
        return None
    N = A.shape[-1]
    if A.dtype not in (torch.float32, torch.float64):
        A = A.to(torch.float64)
    index = None if tokens is None else token_index(tokens, N).numpy()
    stochastic = rows == "stochastic" or tokens is not None
    batch = A.reshape(-1, N, N).contiguous().numpy(force=True)
    found = kernel.pairs_of_rows(batch, index, what=what, alpha=alpha, stochastic=stochastic, tolerance=TOLERANCE)
    if found is None:  # the slow path names the entry
        as_stochastic(A, rows) if tokens is None else restrict(A, tokens)
    return found


def dobrushin_coefficient(A: Any) -> Tensor:
    """The Dobrushin coefficient ``kappa(A) = max_ij TV_ij`` (book: def-kappa; Dobrushin, 1956).

    :param A: row-stochastic, shape (..., N, N).
    :return: float64, shape (...), values in [0, 1]: 0 where all rows agree, 1 where two rows have disjoint support.
    :raises MatrixError: see :func:`dobnb.stochastic.as_stochastic`.

    >>> dobrushin_coefficient([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.0, 0.5, 0.5]]).item()
    0.5
    """
    A = as_square(A)
    found = on_cpu(A, kernel.KAPPA)
    return total_variation(A).amax(-1) if found is None else torch.from_numpy(found.kappa).reshape(A.shape[:-2])


def doeblin_bound(A: Any) -> Tensor:
    """The Doeblin bound ``1 - N min_ij A_ij`` on kappa (book: eq-doeblin).

    It reads off one entry what kappa reads off every pair of rows.

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

    :param tv: shape (..., P), as :func:`total_variation` returns it.
    :return: bool, shape (..., P).

    >>> attaining_pairs(torch.tensor([0.5, 0.5 - 1e-13, 0.25], dtype=torch.float64))
    tensor([ True,  True, False])
    """
    return tv >= tv.amax(-1, keepdim=True) - ATTAINS


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
    A = as_square(A)
    found = on_cpu(A, kernel.SCORES)
    return leave_one_out_anywhere(A) if found is None else torch.from_numpy(found.scores).reshape(A.shape[:-1])


def leave_one_out_anywhere(A: Any) -> Tensor:
    """:func:`leave_one_out` in torch alone, on any device.

    A token that is not in every attaining pair scores 0, so one or two tokens a matrix are left to look at.
    """
    tv = total_variation(A)
    N = torch.as_tensor(A).shape[-1]
    i, j = row_pairs(N, tv.device)
    kappa, attains = tv.amax(-1), attaining_pairs(tv)
    first = attains.to(torch.uint8).argmax(-1)
    scores = tv.new_zeros(*tv.shape[:-1], N)
    for token in (i[first], j[first]):
        without = (i != token.unsqueeze(-1)) & (j != token.unsqueeze(-1))
        others = tv.where(without, torch.zeros_like(tv)).amax(-1)
        alone = ~(attains & without).any(-1)
        scores.scatter_(-1, token.unsqueeze(-1), (kappa - others).where(alone, torch.zeros_like(kappa)).unsqueeze(-1))
    return scores
