"""Random stochastic matrices, and how often they satisfy the equality condition (book: ch-random).

The samplers draw float64 matrices with independent rows from a ``torch.Generator``, on its device. They use only
uniform, normal and gamma variates, so that one seed gives the same matrices on every processor up to the last bit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


def _shape(n: int, batch: int | Sequence[int]) -> tuple[int, ...]:
    """``(*batch, n, n)``, checked."""
    if n < 2:
        raise MatrixError(f"n is {n}; a matrix here has at least 2 rows")
    sizes = (batch,) if isinstance(batch, int) else tuple(batch)
    if any(size < 0 for size in sizes):
        raise MatrixError(f"batch is {sizes}; its sizes must be at least 0")
    return (*sizes, n, n)


def _positive(name: str, value: float) -> float:
    if not 1 / LIMIT <= value <= LIMIT:
        raise MatrixError(f"{name} is {value}; it must be a number from {1 / LIMIT:g} to {LIMIT:g}")
    return float(value)


def _device(generator: Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def random_stochastic(
    n: int, batch: int | Sequence[int] = (), concentration: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Matrices whose rows are independent draws from a symmetric Dirichlet distribution.

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
    :raises MatrixError: `n` below 2, a negative batch size, or `concentration` out of range.

    >>> A = random_stochastic(3, batch=2, concentration=0.01, generator=torch.Generator().manual_seed(0))
    >>> A.shape, bool((A.sum(-1) - 1).abs().max() < 1e-15)
    (torch.Size([2, 3, 3]), True)
    """
    shape = _shape(n, batch)
    c = _positive("concentration", concentration)
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

    `diagonal` is added to each token's score for itself, after the division: the weight that a token gives itself is
    multiplied by ``exp(diagonal)`` before the row is divided by its sum.

    :param n: number of tokens, at least 2.
    :param batch: leading dimensions.
    :param temperature: from 1e-100 to 1e100; low ones make rows with one large entry, high ones nearly uniform rows.
    :param diagonal: what is added to the diagonal scores, at most 1e100 in absolute value.
    :param generator: source of randomness; torch's global one if None.
    :return: float64, shape (*batch, n, n), rows that sum to 1.
    :raises MatrixError: `n` below 2, a negative batch size, `temperature` or `diagonal` out of range.

    >>> A = random_attention(4, diagonal=50.0, generator=torch.Generator().manual_seed(0))
    >>> bool((A.diagonal() > 0.999).all())
    True
    """
    shape = _shape(n, batch)
    temperature = _positive("temperature", temperature)
    if not abs(diagonal) <= LIMIT:
        raise MatrixError(f"diagonal is {diagonal}; it must be a number from {-LIMIT:g} to {LIMIT:g}")
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
    """Wilson's confidence interval for a share (Wilson, 1927).

    :param held: how many of the draws satisfied the condition.
    :param drawn: number of draws, at least 1.
    :param level: confidence level, between 0 and 1.
    :return: both ends, in [0, 1].
    :raises MatrixError: counts or a level that are none.

    >>> low, high = share_interval(0, 100)
    >>> low, round(high, 3)
    (0.0, 0.037)
    """
    if not (0 <= held <= drawn and drawn > 0 and 0 < level < 1):
        raise MatrixError(f"{held} of {drawn} at level {level} is no share; 0 <= held <= drawn, 0 < level < 1")
    interval = binomtest(held, drawn).proportion_ci(level, method="wilson")
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

    :param sample: takes a number b and returns a batch of b row-stochastic matrices, shape (b, N, N).
    :param draws: how many to draw in all, at least 1; they are drawn in chunks, so that memory does not grow with it.
    :raises MatrixError: `draws` below 1; what `sample` returns is not row-stochastic.

    >>> generator = torch.Generator().manual_seed(0)
    >>> found = survey(lambda b: random_stochastic(3, b, generator=generator), 100)
    >>> found.drawn, round(found.shuffled, 12)  # at N = 3 every draw has the share 1/3
    (100, 0.333333333333)
    """
    if draws < 1:
        raise MatrixError(f"draws is {draws}; it must be at least 1")
    held = tied = done = 0
    kappa = 0.0
    shares: list[Tensor] = []
    size = 1  # the first draw says how large a matrix is
    while done < draws:
        A = sample(min(size, draws - done))
        report = check_equality(A)
        share = _shuffle_share(A, report)
        held += int(report.holds.sum())
        tied += int(share.isnan().sum())
        kappa += float(report.kappa.sum())
        shares.append(share[~share.isnan()])
        done += len(A)
        size = max(1, CHUNK // A[0].numel())
    share = torch.cat(shares)
    error = share.std().item() / math.sqrt(len(share)) if len(share) > 1 else math.nan
    return Survey(done, held, tied, share.mean().item(), error, kappa / done)


def flat_pair_share(n: int) -> float:
    """Probability that rows 1 and 2 of a uniformly random stochastic matrix are mutually self-dominant.

    ``(n - 1) / (4 n - 6)``, exactly (book: prop-flat-pair). It is for a pair chosen beforehand, not the attaining one.

    >>> [flat_pair_share(n) for n in (2, 4)]
    [0.5, 0.3]
    """
    return (n - 1) / (4 * n - 6)


def share_bounds(n: int) -> tuple[float, float]:
    """Least and largest value of :func:`shuffle_share` when no two entries of a column agree (book: prop-share-bounds).

    >>> share_bounds(3), share_bounds(5)
    ((0.3333333333333333, 0.3333333333333333), (0.2, 0.3))
    """
    return 1 / n, (n // 2) * (n - n // 2) / (n * (n - 1))


BASELINE = {2: 10**5, 3: 10**5, 4: 10**5, 5: 10**5, 6: 10**5, 9: 10**5, 16: 50000, 32: 20000, 64: 10000, 128: 5000,
            256: 2000, 512: 1000}  # fmt: skip
"""Number of tokens -> matrices drawn in the recorded run."""


def baseline(draws: Mapping[int, int] = BASELINE, seed: int = 0) -> dict[str, Any]:
    """Uniformly random stochastic matrices of several sizes, surveyed, with provenance: JSON, as it is recorded.

    Every size starts its own generator from `seed`, so a row does not depend on the other rows.

    :param draws: number of tokens -> matrices to draw.
    :return: ``provenance`` and ``rows``: one dict a size, ``n`` and the fields of :class:`Survey`.
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
