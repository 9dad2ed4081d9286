"""Random stochastic matrices, and how often they satisfy the equality condition (book: ch-random).

The samplers draw float64 matrices with independent rows from a ``torch.Generator``, on its device. They use only
uniform, normal and gamma variates, so that one seed gives the same matrices on every processor up to the last bit.
"""

from __future__ import annotations

import json
import math
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import binomtest
from torch import Generator, Tensor

from dobnb import provenance
from dobnb.dobrushin import ATTAINS
from dobnb.equality import EqualityReport, check_equality
from dobnb.files import write_text
from dobnb.stochastic import MatrixError, as_stochastic

LIMIT = 1e100
"""Concentrations and temperatures lie between ``1 / LIMIT`` and `LIMIT`, so that nothing below can overflow."""
CHUNK = 2**20
"""Entries drawn at a time: small enough for the processor's cache to help, and for memory not to matter."""


def _is(kind: type, value: Any) -> bool:
    """Python's and numpy's numbers of that kind, without True and False."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """An argument in one short line."""
    return " ".join(reprlib.repr(value).split())


def _whole(name: str, value: int, least: int) -> int:
    if not _is(Integral, value) or value < least:
        raise MatrixError(f"{name} is {_shown(value)}; it must be a whole number of at least {least}")
    return int(value)


def _shape(n: int, batch: int | Sequence[int]) -> tuple[int, ...]:
    """``(*batch, n, n)``, checked."""
    n = _whole("n", n, 2)
    sizes = batch if isinstance(batch, Sequence) else (batch,)
    if not all(_is(Integral, size) and size >= 0 for size in sizes):
        raise MatrixError(f"batch is {_shown(batch)}; pass a whole number of at least 0, or a sequence of them")
    return (*map(int, sizes), n, n)


def _real(name: str, value: float, least: float, most: float) -> float:
    if not _is(Real, value) or not least <= value <= most:
        raise MatrixError(f"{name} is {_shown(value)}; it must be a number from {least:g} to {most:g}")
    return float(value)


def _device(generator: Generator | None) -> torch.device:
    if not isinstance(generator, Generator | None):
        raise MatrixError(f"generator is {_shown(generator)}; it must be a torch.Generator or None")
    return torch.device("cpu") if generator is None else generator.device


def random_stochastic(
    n: int, batch: int | Sequence[int] = (), concentration: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Matrices whose rows are independent draws from a symmetric Dirichlet distribution (book: sec-drawing).

    At concentration 1 a row is uniform over all distributions on n tokens: the "uniformly random stochastic matrix".
    Below 1 most of a row's mass sits on few tokens; above 1 the rows come close to uniform.

    A Dirichlet row is a row of independent gamma variates ``G(c)`` divided by its sum. For small c these underflow (at
    c = 0.001 nearly half are 0 in float64), and a row of zeros over its sum is NaN. So the logarithm is drawn,
    ``log G(c) = log G(c + 1) + log(U) / c`` with U uniform (Marsaglia and Tsang, 2000), and a softmax divides: the
    distribution is exact, and no row is NaN.

    :param n: number of tokens, at least 2.
    :param batch: leading dimensions.
    :param concentration: the Dirichlet parameter of every entry, from 1e-100 to 1e100.
    :param generator: source of randomness; torch's global one if None.
    :return: float64, shape (*batch, n, n), rows that sum to 1.
    :raises MatrixError: `n` below 2, a negative batch size, `concentration` out of range, or an argument of another
        type.

    >>> A = random_stochastic(3, batch=2, concentration=0.01, generator=torch.Generator().manual_seed(0))
    >>> A.shape, bool((A.sum(-1) - 1).abs().max() < 1e-15)
    (torch.Size([2, 3, 3]), True)
    """
    shape = _shape(n, batch)
    c = _real("concentration", concentration, 1 / LIMIT, LIMIT)
    device = _device(generator)
    # torch.distributions takes no generator; this is the sampler it calls.
    gamma = torch._standard_gamma(torch.full(shape, c + 1, dtype=torch.float64, device=device), generator)
    uniform = torch.rand(shape, dtype=torch.float64, device=device, generator=generator)
    return torch.softmax(gamma.log() + torch.log1p(-uniform) / c, -1)  # 1 - U is never 0


def random_attention(
    n: int,
    batch: int | Sequence[int] = (),
    temperature: float = 1.0,
    diagonal: float = 0.0,
    generator: Generator | None = None,
) -> Tensor:
    """Attention with random scores: the softmax of independent standard normal scores over `temperature`.

    The book draws them in sec-other-laws.
    `diagonal` is added to each token's score for itself, after the division: the weight that a token gives itself is
    multiplied by ``exp(diagonal)`` before the row is divided by its sum.

    :param n: number of tokens, at least 2.
    :param batch: leading dimensions.
    :param temperature: from 1e-100 to 1e100; low ones make rows with one large entry, high ones nearly uniform rows.
    :param diagonal: what is added to the diagonal scores, at most 1e100 in absolute value.
    :param generator: source of randomness; torch's global one if None.
    :return: float64, shape (*batch, n, n), rows that sum to 1.
    :raises MatrixError: `n` below 2, a negative batch size, `temperature` or `diagonal` out of range, or an argument of
        another type.

    >>> A = random_attention(4, diagonal=50.0, generator=torch.Generator().manual_seed(0))
    >>> bool((A.diagonal() > 0.999).all())
    True
    """
    shape = _shape(n, batch)
    temperature = _real("temperature", temperature, 1 / LIMIT, LIMIT)
    diagonal = _real("diagonal", diagonal, -LIMIT, LIMIT)
    device = _device(generator)
    scores = torch.randn(shape, dtype=torch.float64, device=device, generator=generator) / temperature
    return torch.softmax(scores + diagonal * torch.eye(n, dtype=torch.float64, device=device), -1)


def shuffle_share(A: Any) -> Tensor:
    """Of all orders of the columns of `A`, the share that satisfies the equality condition (book: lem-shuffle).

    Total variation does not see the order of the columns, so the pair (i, j) that attains kappa stays. What changes is
    which columns are called i and j: every two, equally often. With ``p = A_i`` and ``q = A_j`` the share is the number
    of ordered pairs of columns (k, m) with ``p_k >= q_k`` and ``q_m >= p_m``, over N (N - 1). If the law of a random
    matrix does not depend on the order of its columns, this is the probability of the condition, given everything but
    that order: the average over draws has the mean of the verdicts and far less noise.

    :param A: row-stochastic, shape (..., N, N).
    :return: float64, shape (...), values in [1 / N, 1]; NaN where several pairs attain kappa.
    :raises MatrixError: see :func:`dobnb.stochastic.as_stochastic`.

    >>> shuffle_share([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]]).item() == 2 / 6
    True
    """
    A = as_stochastic(A)
    return _shuffle_share(A, check_equality(A))


def _shuffle_share(A: Tensor, report: EqualityReport) -> Tensor:
    N = A.shape[-1]
    rows = A.gather(-2, report.pair.unsqueeze(-1).expand(*report.pair.shape, N))
    p, q = rows.unbind(-2)
    larger, smaller, equal = ((p >= q).sum(-1), (q >= p).sum(-1), (p == q).sum(-1))
    share = (larger * smaller - equal).double() / (N * (N - 1))
    return share.masked_fill(report.attaining > 1, torch.nan)


def share_interval(held: int, drawn: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's confidence interval for a share (Wilson, 1927; book: sec-drawing).

    :param held: how many of the draws satisfied the condition.
    :param drawn: number of draws, at least 1.
    :param level: confidence level, between 0 and 1.
    :return: both ends, in [0, 1].
    :raises MatrixError: `held` or `drawn` no whole number, `held` not in [0, drawn], no draw, `level` not in (0, 1).

    >>> low, high = share_interval(0, 100)
    >>> low, round(high, 3)
    (0.0, 0.037)
    """
    typed = _is(Integral, held) and _is(Integral, drawn) and _is(Real, level)
    if not (typed and 0 <= held <= drawn and drawn > 0 and 0 < level < 1):
        given = f"{_shown(held)} of {_shown(drawn)} at level {_shown(level)}"
        raise MatrixError(f"{given} is no share; pass whole numbers 0 <= held <= drawn, drawn >= 1, and 0 < level < 1")
    interval = binomtest(int(held), int(drawn)).proportion_ci(level, method="wilson")
    return float(interval.low), float(interval.high)


class Survey(NamedTuple):
    """How often a kind of random matrix satisfies the equality condition: what :func:`survey` counted."""

    drawn: int
    """Matrices drawn."""
    held: int
    """Those that satisfy the condition."""
    tied: int
    """Those in which several pairs attain kappa, within the tolerance of floats (book: def-kappa-float)."""
    shuffled: float
    """Mean of :func:`shuffle_share` over the draws that are not tied; NaN if all are."""
    shuffled_error: float
    """Standard error of that mean; NaN if fewer than two draws are not tied."""
    kappa: float
    """Mean Dobrushin coefficient."""


def survey(sample: Callable[[int], Tensor], draws: int) -> Survey:
    """Draw matrices and count how many satisfy the equality condition (book: thm-equality).

    :param sample: takes a number b and returns b row-stochastic matrices: a tensor or an array of shape (b, N, N).
    :param draws: how many to draw in all, at least 1; they are drawn in chunks, so that memory does not grow with it.
    :raises MatrixError: `draws` below 1; what `sample` returns is of another shape, or not row-stochastic.

    >>> generator = torch.Generator().manual_seed(0)
    >>> found = survey(lambda b: random_stochastic(3, b, generator=generator), 100)
    >>> found.drawn, round(found.shuffled, 12)  # at N = 3 every draw has the share 1/3
    (100, 0.333333333333)
    """
    draws = _whole("draws", draws, 1)
    held = tied = done = 0
    kappa = 0.0
    shares: list[Tensor] = []
    size = 1  # the first draw says how large a matrix is
    while done < draws:
        b = min(size, draws - done)
        drawn = sample(b)
        shape = tuple(drawn.shape) if isinstance(drawn, Tensor | np.ndarray) else None
        if shape is None or len(shape) != 3 or shape[0] != b:  # N x N is for as_stochastic to see
            given = f"a {type(drawn).__name__}" if shape is None else f"shape {shape}"
            raise MatrixError(f"sample({b}) returned {given}; it must return a tensor or an array of shape ({b}, N, N)")
        A = as_stochastic(drawn)
        report = check_equality(A)
        share = _shuffle_share(A, report)
        held += int(report.holds.sum())
        tied += int(share.isnan().sum())
        kappa += float(report.kappa.sum())
        shares.append(share[~share.isnan()])
        done += b
        size = max(1, CHUNK // A[0].numel())
    share = torch.cat(shares)
    error = share.std().item() / math.sqrt(len(share)) if len(share) > 1 else math.nan
    return Survey(done, held, tied, share.mean().item(), error, kappa / done)


def flat_pair_share(n: int) -> float:
    """Probability that rows 1 and 2 of a uniformly random stochastic matrix are mutually self-dominant.

    ``(n - 1) / (4 n - 6)``, exactly (book: prop-flat-pair). It is for a pair chosen beforehand, not the attaining one.

    :param n: number of tokens, at least 2.
    :raises MatrixError: `n` no whole number, or below 2.

    >>> [flat_pair_share(n) for n in (2, 4)]
    [0.5, 0.3]
    """
    n = _whole("n", n, 2)
    return (n - 1) / (4 * n - 6)


def share_bounds(n: int) -> tuple[float, float]:
    """Least and largest value of :func:`shuffle_share` when no two entries of a column agree (book: prop-share-bounds).

    :param n: number of tokens, at least 2.
    :raises MatrixError: `n` no whole number, or below 2.

    >>> share_bounds(3), share_bounds(5)
    ((0.3333333333333333, 0.3333333333333333), (0.2, 0.3))
    """
    n = _whole("n", n, 2)
    return 1 / n, (n // 2) * (n - n // 2) / (n * (n - 1))


BASELINE = {2: 10**5, 3: 10**5, 4: 10**5, 5: 10**5, 6: 10**5, 9: 10**5, 16: 50000, 32: 20000, 64: 10000, 128: 5000,
            256: 2000, 512: 1000}  # fmt: skip
"""Number of tokens -> matrices drawn in the recorded run."""


def baseline(draws: Mapping[int, int] = BASELINE, seed: int = 0) -> dict[str, Any]:
    """Uniformly random stochastic matrices of several sizes, surveyed, with provenance: JSON, as it is recorded.

    Every size starts its own generator from `seed`, so a row does not depend on the other rows.

    :param draws: number of tokens -> matrices to draw.
    :return: ``provenance`` and ``rows``: one dict a size, ``n`` and the fields of :class:`Survey`.
    :raises MatrixError: a number of tokens below 2, or of matrices below 1.

    >>> [row["shuffled"] for row in baseline({2: 100})["rows"]]  # exactly one half
    [0.5]
    """
    started, clock = provenance.now(), time.monotonic()
    rows = []
    for n, count in draws.items():
        generator = torch.Generator().manual_seed(seed)
        rows.append(
            {"n": n, **survey(lambda b, n=n, g=generator: random_stochastic(n, b, generator=g), count)._asdict()}
        )
    return {
        "schema": 1,
        "provenance": {
            "law": "rows independent and uniform over all distributions (flat Dirichlet)",
            "settings": {"seed": seed, "attains": ATTAINS, "threads": torch.get_num_threads()},
            "versions": provenance.versions(),
            "machine": provenance.machine(),
            "commit": provenance.git_commit(Path(__file__).parent),
            "started": started,
            "seconds": round(time.monotonic() - clock, 1),
        },
        "rows": rows,
    }


def record_baseline(path: str | Path, draws: Mapping[int, int] = BASELINE, seed: int = 0) -> None:
    """Write :func:`baseline` to a JSON file, whole or not at all. The default takes about five minutes on one core."""
    write_text(path, json.dumps(baseline(draws, seed), indent=2, allow_nan=False) + "\n")
