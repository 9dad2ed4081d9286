"""Stochastic matrices: validation, restriction to a subchain, rollout factor, rollout.

Every function takes a tensor, or anything that ``torch.as_tensor`` takes, of shape ``(..., N, N)`` with any leading
batch dimensions, and returns float64 tensors on the same device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dobnb.errors import DobnbError

TOLERANCE = 1e-6
"""How far from 1 a row may sum. A float32 softmax is off by up to 2.6e-7; float16 by 2e-4, which is refused."""

Rows = Literal["stochastic", "substochastic"]


class MatrixError(DobnbError, ValueError):
    """A matrix is not what the mathematics needs; the message names the first offending entry."""


def _first(mask: Tensor) -> tuple[int, ...]:
    """Index of the first true entry of `mask`, in row-major order."""
    return tuple(int(k) for k in mask.nonzero()[0])


def _native(array: np.ndarray) -> np.ndarray:
    """The same numbers in an array that torch takes: of a dtype it knows, writable, with no stride below 0."""
    known = array.dtype.isnative and array.dtype.itemsize <= 8
    array = array if known or array.dtype.kind not in "fiu" else array.astype(np.float64)
    return array if array.flags.writeable and min(array.strides, default=0) >= 0 else array.copy()


def as_square(A: Any, rows: Rows = "stochastic", tolerance: float = TOLERANCE) -> Tensor:
    """The first half of :func:`as_stochastic`: the checks that look at no entry.

    :return: the tensor itself, or the tensor made of an array or lists, shape (..., N, N), real.
    :raises MatrixError: as :func:`as_stochastic`.
    """
    if isinstance(A, np.ma.MaskedArray):
        raise MatrixError("the array is masked; fill or drop what its mask hides first")
    if rows not in ("stochastic", "substochastic"):
        raise MatrixError(f'rows must be "stochastic" or "substochastic", not {rows!r}')
    if not isinstance(tolerance, Real) or not 0 <= tolerance < 1:
        raise MatrixError(f"tolerance is {tolerance!r}; it must be a number, at least 0 and below 1")
    try:
        # numpy keeps Python floats in float64, which torch alone would round to float32.
        A = A if isinstance(A, Tensor) else torch.as_tensor(_native(np.asarray(A)))
    except (TypeError, ValueError, RuntimeError) as error:
        wanted = "pass numbers as a tensor, an array or nested lists; exact_equality takes fractions"
        raise MatrixError(f"not a numeric array: {error}; {wanted}") from None
    if A.layout != torch.strided:
        raise MatrixError("the tensor is sparse; pass its .to_dense()")
    if A.is_complex():
        raise MatrixError(f"entries are {A.dtype}; a stochastic matrix is real, pass its real part if that is meant")
    if A.ndim < 2 or A.shape[-1] != A.shape[-2]:
        raise MatrixError(f"shape {tuple(A.shape)} is not square in its last two dimensions; pass (..., N, N)")
    if A.shape[-1] < 2:
        raise MatrixError(f"N is {A.shape[-1]}; kappa compares two rows, so N must be at least 2")
    return A


def as_stochastic(A: Any, rows: Rows = "stochastic", tolerance: float = TOLERANCE) -> Tensor:
    """Check that `A` is row-stochastic and return it in float64, its rows renormalised.

    This is the first step of the book's definition of kappa (book: def-kappa-float): a row that is off 1 by more than
    the rounding of its own sum, ``N 2**-52``, and by no more than `tolerance`, is divided by its sum. A row within
    rounding of 1 is left as it is: dividing it again would break ties between its entries and those of other rows.
    With ``rows="substochastic"`` the rows may sum to anything up to 1 and are left as they are.

    :param A: shape (..., N, N), N at least 2, entries in [0, 1]; float16, bfloat16, float32, float64, integer or bool.
    :param rows: ``"stochastic"`` or ``"substochastic"``.
    :param tolerance: how far a row sum may be from 1 (above 1, for substochastic rows).
    :return: float64, shape (..., N, N).
    :raises MatrixError: no numbers, not square, N < 2, complex, sparse, NaN, infinite, negative, or a row whose sum is
        off; an unknown `rows`; `tolerance` out of range.

    >>> as_stochastic([[1, 0], [0, 1]]).dtype
    torch.float64
    >>> as_stochastic([[0.5, 0.6], [0.5, 0.5]])
    Traceback (most recent call last):
    dobnb.stochastic.MatrixError: row (0,) sums to 1.1, not to 1 within 1e-06; divide each row by its sum if meant
    """
    A = as_square(A, rows, tolerance)
    A = A.detach().to(torch.float64)
    if not bool(torch.isfinite(A).all()):
        where = _first(~torch.isfinite(A))
        raise MatrixError(f"entry {where} is {A[where].item()}; every entry must be a finite number")
    if bool((A < 0).any()):
        where = _first(A < 0)
        raise MatrixError(f"entry {where} is {A[where].item():.6g}; every entry must be at least 0")
    sums = A.sum(-1)
    if rows == "substochastic":
        if bool((sums > 1 + tolerance).any()):
            where = _first(sums > 1 + tolerance)
            raise MatrixError(f"row {where} sums to {sums[where].item():.9g}, more than 1; substochastic rows may not")
        return A
    off = (sums - 1).abs() > tolerance
    if bool(off.any()):
        where = _first(off)
        raise MatrixError(
            f"row {where} sums to {sums[where].item():.9g}, not to 1 within {tolerance:g}; "
            "divide each row by its sum if meant"
        )
    return _divided(A, sums)


def _divided(A: Tensor, sums: Tensor) -> Tensor:
    """The rows of `A` over their `sums`, but for those whose sum is 1 within its rounding, ``N 2**-52``."""
    rounding = A.shape[-1] * torch.finfo(torch.float64).eps
    return A / sums.where((sums - 1).abs() > rounding, torch.ones_like(sums)).unsqueeze(-1)


def check_alpha(alpha: float) -> float:
    """Return `alpha` if it lies strictly between 0 and 1.

    :raises MatrixError: otherwise; at 0 and 1 the equality condition (book: thm-equality) is void.

    >>> check_alpha(0.5)
    0.5
    """
    if not isinstance(alpha, Real) or not 0 < alpha < 1:
        raise MatrixError(f"alpha is {alpha!r}; it must be a number strictly between 0 and 1")
    return float(alpha)


def rollout_factor(A: Any, alpha: float = 0.5) -> Tensor:
    """The factor ``alpha I + (1 - alpha) A`` of attention rollout (book: eq-factor; Abnar and Zuidema, 2020).

    :param A: row-stochastic, shape (..., N, N).
    :param alpha: weight of the residual stream, strictly between 0 and 1; the paper takes 1/2.
    :return: float64, shape (..., N, N).
    :raises MatrixError: `A` is not row-stochastic, or `alpha` is out of range.

    >>> rollout_factor([[0.0, 1.0], [1.0, 0.0]])
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    A = as_stochastic(A)
    alpha = check_alpha(alpha)
    return alpha * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device) + (1 - alpha) * A


def layers_and_factors(matrices: Sequence[Any] | Tensor, alpha: float = 0.5) -> Iterator[tuple[Any, Tensor]]:
    """Each layer's matrix as given, with its rollout factor, first layer first.

    :raises MatrixError: as :func:`rollout`.
    """
    try:
        layers = iter(matrices)
    except TypeError:
        raise MatrixError(f"matrices is a {type(matrices).__name__}; pass a sequence of one matrix a layer") from None
    shape: torch.Size | None = None
    for layer, A in enumerate(layers):
        factor = rollout_factor(A, alpha)
        if shape is not None and factor.shape != shape:
            shapes = f"{tuple(factor.shape)}, the layers before it {tuple(shape)}"
            raise MatrixError(f"layer {layer} has shape {shapes}; all layers must agree")
        shape = factor.shape
        yield A, factor
    if shape is None:
        raise MatrixError("no matrices; a rollout needs at least one layer")


def rollout(matrices: Sequence[Any] | Tensor, alpha: float = 0.5) -> Tensor:
    """Attention rollout: the product of the layers' factors, the first layer rightmost (book: eq-rollout).

    :param matrices: one row-stochastic matrix a layer, first layer first, each of shape (..., N, N).
    :param alpha: weight of the residual stream, strictly between 0 and 1.
    :return: float64, shape (..., N, N), row-stochastic.
    :raises MatrixError: no matrix, shapes that differ, or a matrix that is not row-stochastic.

    >>> rollout([[[0.0, 1.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]])
    tensor([[0.5000, 0.5000],
            [0.2500, 0.7500]], dtype=torch.float64)
    """
    factors = (factor for _, factor in layers_and_factors(matrices, alpha))
    return reduce(lambda product, factor: factor @ product, factors)


def token_index(tokens: Any, N: int, device: torch.device | None = None) -> Tensor:
    """The tokens of a subchain as indices, int64, at least two.

    :param tokens: boolean mask of shape (N,), or a list of distinct indices in [0, N), kept in the order given.
    :raises MatrixError: as :func:`restrict`.
    """
    try:
        tokens = tokens if isinstance(tokens, Tensor) else _native(np.asarray(tokens))
        tokens = torch.as_tensor(tokens, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MatrixError(f"tokens must be a boolean mask or a list of indices: {error}") from None
    if tokens.dtype == torch.bool:
        if tokens.shape != (N,):
            raise MatrixError(f"the token mask has shape {tuple(tokens.shape)}, the matrix needs ({N},)")
        index = tokens.nonzero().flatten()
    elif tokens.ndim == 1 and (tokens.numel() == 0 or not (tokens.is_floating_point() or tokens.is_complex())):
        index = tokens.long()
        outside = (index < 0) | (index >= N)
        if bool(outside.any()):
            raise MatrixError(f"token {int(index[outside][0])} is outside 0 ... {N - 1}")
        if index.unique().numel() < index.numel():
            raise MatrixError("a token is given twice; each may be kept once")
    else:
        given = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        raise MatrixError(f"tokens must be a boolean mask or a list of indices, not {given}")
    if index.numel() < 2:
        raise MatrixError(f"{index.numel()} tokens kept; a subchain needs at least two")
    return index


def restrict(A: Any, tokens: Any, renormalize: bool = True) -> Tensor:
    """The subchain on `tokens`: their rows and columns, each row divided by what is left of it (book: def-subchain).

    :param A: row-stochastic, shape (..., N, N).
    :param tokens: boolean mask of shape (N,), or a list of distinct indices in [0, N), kept in the order given.
    :param renormalize: divide each row by its remaining mass; if false the result is substochastic.
    :return: float64, shape (..., n, n), n the number of tokens kept.
    :raises MatrixError: `A` is not row-stochastic, fewer than two tokens, an index out of range or given twice, or a
        row with no mass left.

    >>> restrict([[0.5, 0.25, 0.25], [0.2, 0.4, 0.4], [0.2, 0.2, 0.6]], [0, 2])
    tensor([[0.6667, 0.3333],
            [0.2500, 0.7500]], dtype=torch.float64)
    """
    checked = as_stochastic(A)
    index = token_index(tokens, checked.shape[-1], checked.device)
    # A row is divided once, by what is left of it: dividing it by its own sum before would only round twice.
    whole = as_square(A).detach().to(torch.float64) if renormalize else checked
    sub = whole.index_select(-2, index).index_select(-1, index)
    if not renormalize:
        return sub
    mass = sub.sum(-1)
    if bool((mass == 0).any()):
        where = _first(mass == 0)
        raise MatrixError(f"row {where} of the subchain has no mass left; its token attends to dropped tokens only")
    return _divided(sub, mass)
