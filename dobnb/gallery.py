"""Small stochastic matrices in round fractions, each with one lesson on the equality condition (book: sec-gallery)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Example:
    """A matrix and what it shows."""

    matrix: tuple[tuple[Fraction, ...], ...]
    """Row-stochastic, shape (N, N), exact."""
    lesson: str
    """One sentence; tokens count from 1."""


def _over(denominator: int, lesson: str, *rows: tuple[int, ...]) -> Example:
    return Example(tuple(tuple(Fraction(entry, denominator) for entry in row) for row in rows), lesson)


GALLERY: dict[str, Example] = {
    "plain": _over(
        10,
        "The pair 1, 3 alone attains kappa and is mutually self-dominant: the bound is tight.",
        (6, 3, 1), (2, 5, 3), (1, 2, 7),
    ),
    "both sides fail": _over(
        10,
        "The pair 1, 2 attains kappa and fails on both sides; the pair 1, 3 falls short by less and sets the gap.",
        (1, 8, 1), (6, 2, 2), (3, 3, 4),
    ),
    "one side fails": _over(
        10,
        "The pair 1, 2 attains kappa and is self-dominant on the side of token 2 only, which is not enough.",
        (1, 2, 7), (6, 3, 1), (2, 6, 2),
    ),
    "wrong pair": _over(
        10,
        "The pair 2, 3 is mutually self-dominant but does not attain kappa, so it does not count.",
        (1, 1, 8), (6, 2, 2), (6, 1, 3),
    ),
    "tie": _over(
        10,
        "Two pairs attain kappa, one is mutually self-dominant, one is not: some pair is enough.",
        (2, 1, 7), (1, 7, 2), (4, 5, 1),
    ),
    "largest in its row": _over(
        120,
        "No entry of a row exceeds its diagonal entry, and the bound fails all the same.",
        (48, 24, 48), (40, 40, 40), (30, 45, 45),
    ),
    "symmetric": _over(
        10,
        "Symmetric, hence doubly stochastic, and the relative gap is the largest there is, 200%.",
        (1, 9), (9, 1),
    ),
    "all but oneself": _over(
        2,
        "Each token attends to all the others alike and never to itself: relative gap 200% with three tokens.",
        (0, 1, 1), (1, 0, 1), (1, 1, 0),
    ),
    "transpose": _over(
        10,
        "Doubly stochastic; the bound is tight, and for the transposed matrix it is not.",
        (2, 3, 5), (2, 6, 2), (6, 1, 3),
    ),
    "three in a ring": _over(
        1,
        "Each of three tokens attends to the next: this, its reverse and the swap are the only permutations to fail.",
        (0, 1, 0), (0, 0, 1), (1, 0, 0),
    ),
    "four in a ring": _over(
        1,
        "Each of four tokens attends to the next: tight, but the mean of this head and its transpose is not.",
        (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 0, 0, 0),
    ),
    "left head": _over(
        2,
        "Fails, and so does the right head; their mean does not.",
        (0, 0, 2), (1, 1, 0), (0, 1, 1),
    ),
    "right head": _over(
        2,
        "The left head with tokens 2 and 3 renamed: fails, but the mean of both heads does not.",
        (0, 2, 0), (0, 1, 1), (1, 0, 1),
    ),
    "causal": _over(
        4,
        "No token attends to a later one, so token 1 attends to itself alone: always tight.",
        (4, 0, 0), (3, 1, 0), (1, 2, 1),
    ),
    "special token helps": _over(
        4,
        "Tight thanks to token 1; the subchain on tokens 2 and 3 fails, with a relative gap of 200%.",
        (4, 0, 0), (1, 1, 2), (1, 2, 1),
    ),
    "special token hurts": _over(
        4,
        "Fails because of token 1; the subchain on tokens 2 and 3 is the identity, which is tight.",
        (0, 0, 4), (3, 1, 0), (3, 0, 1),
    ),
}  # fmt: skip
"""The examples by name."""
