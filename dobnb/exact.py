"""The equality condition in exact arithmetic, for matrices of fractions.

Everything is a whole number over one common denominator, so no step rounds and no tolerance is needed. The factor is
built and its rows are compared, as the definition says. :func:`dobnb.equality.check_equality` reads the same numbers
off the pairs of `A`; the tests hold the one against the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context
from fractions import Fraction
from itertools import combinations
from numbers import Rational
from typing import Any

import numpy as np
from torch import Tensor

from dobnb.stochastic import MatrixError, Rows


@dataclass(frozen=True)
class ExactReport:
    """What :func:`exact_equality` found: the fields of :class:`dobnb.equality.EqualityReport`, none of them rounded."""

    kappa: Fraction
    """The Dobrushin coefficient of A, in [0, 1]."""
    factor_kappa: Fraction
    """The Dobrushin coefficient of ``alpha I + (1 - alpha) A``, in [0, 1]."""
    bound: Fraction
    """The layerwise bound ``alpha + (1 - alpha) kappa`` (book: eq-layer-bound)."""
    gap: Fraction
    """``bound - factor_kappa``, at least 0, and 0 exactly where `holds` (book: thm-equality)."""
    relative_gap: Fraction | None
    """``gap / ((1 - alpha) kappa)``; None where kappa is 0."""
    holds: bool
    """Some pair that attains kappa is mutually self-dominant."""
    pair: tuple[int, int]
    """i < j: the first attaining pair that is mutually self-dominant; where none is, the first attaining pair."""
    attaining: int
    """How many pairs i < j attain kappa."""
    margin: Fraction
    """A change below which the verdict stands: as long as every dominance slack, and every difference of two total
    variations, moves by less, it does (book: def-margin, prop-margin)."""


def exact_equality(A: Any, alpha: Rational = Fraction(1, 2), rows: Rows = "stochastic") -> ExactReport:
    """Is the bound ``kappa(alpha I + (1 - alpha) A) <= alpha + (1 - alpha) kappa(A)`` tight, decided without rounding?

    The verdict is that of the theorem (book: thm-equality), the gap is what the bound exceeds the factor's kappa by.

    :param A: one matrix, shape (N, N), N at least 2: an array or nested lists of ``fractions.Fraction`` or integers.
    :param alpha: weight of the residual stream, a fraction strictly between 0 and 1; the paper takes 1/2.
    :param rows: ``"stochastic"``, or ``"substochastic"`` for rows that sum to less than 1.
    :raises MatrixError: a tensor, not square, N < 2, a float or another inexact entry, a negative entry, a row that
        does not sum to exactly 1 (or sums to more than 1, for substochastic rows); `alpha` no fraction or out of range.

    >>> tenth = Fraction(1, 10)
    >>> report = exact_equality([[tenth, 9 * tenth], [9 * tenth, tenth]])
    >>> report.holds, report.kappa, report.gap, report.relative_gap
    (False, Fraction(4, 5), Fraction(4, 5), Fraction(2, 1))
    """
    if not isinstance(alpha, Rational) or not 0 < alpha < 1:
        raise MatrixError(f"alpha is {alpha!r}; it must be a fraction strictly between 0 and 1, such as Fraction(1, 2)")
    alpha = Fraction(alpha)
    entries, denominator = _whole_numbers(A, rows)
    N = len(entries)
    pairs = list(combinations(range(N), 2))

    # All in units of 1 / (2 denominator), the unit in which total variation is a whole number.
    tv = _distances(entries)
    slack = {(i, j): 2 * min(entries[i, i] - entries[j, i], entries[j, j] - entries[i, j]) for i, j in pairs}
    largest = max(tv[pair] for pair in pairs)
    attaining = [pair for pair in pairs if tv[pair] == largest]
    witnesses = [pair for pair in attaining if slack[pair] >= 0]
    sign = 1 if witnesses else -1
    margin = min(max(sign * slack[pair], largest - tv[pair]) for pair in pairs)

    kept, unit = alpha.numerator, alpha.denominator
    factor = kept * denominator * np.eye(N, dtype=object) + (unit - kept) * entries
    kappa = Fraction(largest, 2 * denominator)
    factor_kappa = Fraction(_distances(factor).max(), 2 * denominator * unit)
    bound = alpha + (1 - alpha) * kappa
    gap = bound - factor_kappa
    return ExactReport(
        kappa=kappa,
        factor_kappa=factor_kappa,
        bound=bound,
        gap=gap,
        relative_gap=gap / ((1 - alpha) * kappa) if kappa else None,
        holds=bool(witnesses),
        pair=(witnesses or attaining)[0],
        attaining=len(attaining),
        margin=Fraction(margin, 2 * denominator),
    )


def shorten(number: Fraction, digits: int = 6) -> str:
    """A fraction as text: exactly where that is short, or else ``about`` and that many significant digits.

    >>> shorten(Fraction(1, 3)), shorten(Fraction(1, 3 * 10**30))
    ('1/3', 'about 3.33333e-31')
    """
    short = max(abs(number.numerator), number.denominator) < 10**20
    return str(number) if short else f"about {rounded(number, digits)}"


def rounded(number: Fraction, digits: int) -> str:
    """A fraction of any size as a decimal of that many significant digits; a float would overflow."""
    context = Context(prec=digits, Emin=MIN_EMIN, Emax=MAX_EMAX)
    decimal = context.divide(number.numerator, number.denominator)
    return f"{context.normalize(decimal):g}"


def _distances(rows: np.ndarray) -> np.ndarray:
    """L1 distance between every two rows of a matrix of Python integers, which do not overflow."""
    return np.stack([abs(row - rows).sum(-1) for row in rows])


def _whole_numbers(A: Any, rows: Rows) -> tuple[np.ndarray, int]:
    """`A` as Python integers over one denominator, checked to be row-stochastic, exactly."""
    if rows not in ("stochastic", "substochastic"):
        raise MatrixError(f'rows must be "stochastic" or "substochastic", not {rows!r}')
    if isinstance(A, Tensor):
        raise MatrixError("A is a tensor, which holds no fractions; use check_equality, or A.tolist() of whole numbers")
    try:
        A = np.array(A, dtype=object)
    except ValueError as error:  # numpy's word for some ragged lists
        raise MatrixError(f"not a matrix: {error}; pass N lists of N fractions") from None
    if A.ndim != 2 or A.shape[0] != A.shape[1]:
        raise MatrixError(f"shape {A.shape} is not one square matrix; pass N lists of N fractions")
    if len(A) < 2:
        raise MatrixError(f"N is {len(A)}; kappa compares two rows, so N must be at least 2")
    for where, entry in np.ndenumerate(A):
        if not isinstance(entry, Rational):
            kind = type(entry).__name__
            raise MatrixError(f"entry {where} is a {kind}; pass fractions or whole numbers, or use check_equality")
        if entry < 0:
            negative = Fraction(int(entry.numerator), int(entry.denominator))
            raise MatrixError(f"entry {where} is {shorten(negative)}; every entry must be at least 0")
    # int(): numpy's integers would overflow.
    denominator = math.lcm(*(int(entry.denominator) for entry in A.flat))
    whole = np.empty(A.shape, dtype=object)
    for where, entry in np.ndenumerate(A):
        whole[where] = int(entry.numerator) * (denominator // int(entry.denominator))
    for where, total in enumerate(whole.sum(-1)):
        if total > denominator or (rows == "stochastic" and total != denominator):
            wanted = "exactly 1" if rows == "stochastic" else "at most 1"
            excess = Fraction(total - denominator, denominator)
            shown = shorten(1 + excess)
            if shown.startswith("about"):  # which may be 1 in as many digits
                shown = f"1 {'+' if excess > 0 else '-'} {shorten(abs(excess)).removeprefix('about ')}"
            raise MatrixError(f"row ({where},) sums to {shown}, not to {wanted}")
    return whole, denominator
