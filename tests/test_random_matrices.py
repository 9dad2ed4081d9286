"""The samplers against the laws they are named after; shares against enumeration of every order of the columns."""

import json
import math
from fractions import Fraction as F
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from matrices import as_floats, exact_kappa, exact_tv, rational_matrices
from scipy import stats

from dobnb import check_equality, random_matrices, random_stochastic
from dobnb.random_matrices import (
    BASELINE,
    baseline,
    flat_pair_share,
    random_attention,
    record_baseline,
    share_bounds,
    share_interval,
    shuffle_share,
    survey,
)
from dobnb.stochastic import MatrixError

RECORD = Path(__file__).parents[1] / "results" / "random_baseline.json"


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("concentration", [1e-100, 0.001, 0.01, 1, 100, 1e100])
def test_rows_are_distributions_at_every_concentration(concentration):
    A = random_stochastic(5, (40, 50), concentration, seeded())
    assert A.shape == (40, 50, 5, 5) and A.dtype == torch.float64
    assert (A >= 0).all() and (A.sum(-1) - 1).abs().max() <= 5 * 2**-52


@pytest.mark.parametrize("concentration", [0.01, 0.3, 1, 30])
def test_entries_have_the_beta_law_of_a_dirichlet_row(concentration):
    """One entry of a symmetric Dirichlet row on N tokens is Beta(c, (N - 1) c)."""
    entries = random_stochastic(4, 5000, concentration, seeded())[:, 0, 0].numpy()
    law = stats.beta(concentration, 3 * concentration)
    for x in (1e-100, 1e-10, 1e-3, 0.1, 0.25, 0.5, 0.9):  # not a test of the whole curve: floats next to 1 are 1
        low, high = share_interval(int((entries <= x).sum()), len(entries), level=0.9999)
        assert low <= law.cdf(x) <= high
    variance = 3 / (16 * (4 * concentration + 1))
    assert entries.var() == pytest.approx(variance, rel=0.1)


@pytest.mark.parametrize("concentration", [0.3, 1, 5])
def test_the_second_moment_is_that_of_a_dirichlet_row(concentration):
    """E[x^2] = (c + 1) / (n (n c + 1)), sharp enough to tell c from 1.02 c."""
    squares = random_stochastic(2, 1_500_000, concentration, seeded()).square().mean(-1).flatten()
    error = squares.std().item() / math.sqrt(len(squares))
    assert error < 2e-4
    assert squares.mean().item() == pytest.approx((concentration + 1) / (2 * (2 * concentration + 1)), abs=4 * error)


def test_rows_and_entries_are_independent():
    A = random_stochastic(3, 20000, generator=seeded())
    assert abs(torch.corrcoef(torch.stack([A[:, 0, 0], A[:, 1, 0]]))[0, 1]) < 0.03
    # entries of one row sum to 1, so any two of N have correlation -1 / (N - 1)
    assert torch.corrcoef(torch.stack([A[:, 0, 0], A[:, 0, 1]]))[0, 1] == pytest.approx(-0.5, abs=0.03)


@pytest.mark.parametrize("temperature", [0.2, 1, 5])
def test_log_ratios_of_attention_are_normal(temperature):
    A = random_attention(3, 5000, temperature, diagonal=1.5, generator=seeded()).log()
    spread = math.sqrt(2) / temperature
    assert stats.kstest((A[:, 0, 0] - A[:, 0, 1]).numpy(), stats.norm(1.5, spread).cdf).pvalue > 1e-3
    assert stats.kstest((A[:, 1, 0] - A[:, 1, 2]).numpy(), stats.norm(0, spread).cdf).pvalue > 1e-3


def test_extreme_temperatures_and_biases_stay_finite():
    for temperature, diagonal in ((1e-100, 0), (1e100, 0), (1, 1e100), (1, -1e100)):
        A = random_attention(4, 10, temperature, diagonal, seeded())
        assert (A.sum(-1) - 1).abs().max() < 1e-15


@pytest.mark.parametrize("sample", [random_stochastic, random_attention])
def test_a_seed_gives_the_same_matrices(sample):
    first, second, other = (sample(4, 3, generator=seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert sample(4, generator=seeded()).shape == (4, 4)
    assert sample(4, 0, generator=seeded()).shape == (0, 4, 4)


@pytest.mark.parametrize("concentration", [0, -1, math.nan, math.inf, 1e-101])
def test_concentrations_and_temperatures_out_of_range_are_refused(concentration):
    with pytest.raises(MatrixError, match="concentration"):
        random_stochastic(3, concentration=concentration)
    with pytest.raises(MatrixError, match="temperature"):
        random_attention(3, temperature=concentration)


def test_other_bad_arguments_are_refused():
    with pytest.raises(MatrixError, match="n is 1"):
        random_stochastic(1)
    with pytest.raises(MatrixError, match="batch"):
        random_stochastic(3, (2, -1))
    with pytest.raises(MatrixError, match="diagonal"):
        random_attention(3, diagonal=math.nan)
    with pytest.raises(MatrixError, match="draws"):
        survey(lambda b: random_stochastic(3, b), 0)
    for held, drawn, level in ((3, 2, 0.95), (-1, 2, 0.95), (0, 0, 0.95), (1, 2, 1.0)):
        with pytest.raises(MatrixError, match="share"):
            share_interval(held, drawn, level)


@pytest.mark.parametrize("sample", [random_stochastic, random_attention])
def test_arguments_of_other_types_are_refused(sample):
    assert sample(np.int64(3), np.int64(2)).shape == (2, 3, 3) and sample(3, torch.Size([2, 1])).shape == (2, 1, 3, 3)
    for n in (2.5, "3", None, True, torch.ones(2, 2)):
        with pytest.raises(MatrixError, match=r"^n is .*whole number of at least 2$"):
            sample(n)
    for batch in (True, None, 2.0, "3", (2, None), (2, True), -1):
        with pytest.raises(MatrixError, match=r"^batch is "):
            sample(3, batch)
    for generator in (np.random.default_rng(0), 0):
        with pytest.raises(MatrixError, match=r"^generator is .*torch\.Generator"):
            sample(3, generator=generator)


@pytest.mark.parametrize("value", [None, "1", 1j, True])
def test_parameters_that_are_no_numbers_are_refused(value):
    for sample, name in (
        (random_stochastic, "concentration"), (random_attention, "temperature"), (random_attention, "diagonal")
    ):  # fmt: skip
        with pytest.raises(MatrixError, match=f"^{name} is .* it must be a number"):
            sample(3, **{name: value})
    for held, drawn, level in ((value, 2, 0.5), (1, value, 0.5), (1, 2, value)):
        with pytest.raises(MatrixError, match="share"):
            share_interval(held, drawn, level)


def test_shares_of_what_is_no_count_are_refused():
    with pytest.raises(MatrixError, match=r"1\.5 of 2"):
        share_interval(1.5, 2)
    assert share_interval(np.int64(1), np.int64(2)) == share_interval(1, 2)
    for share in (flat_pair_share, share_bounds):
        for n in (1, 0, 2.5, None, "3", True):
            with pytest.raises(MatrixError, match=r"^n is "):
                share(n)


def exact_condition(A):
    """Theorem thm-equality on a matrix with one attaining pair, in exact arithmetic."""
    i, j = max(combinations(range(len(A)), 2), key=lambda pair: exact_tv(A[pair[0]], A[pair[1]]))
    return A[i][i] >= A[j][i] and A[j][j] >= A[i][j]


@given(rational_matrices(largest=5))
def test_the_shuffle_share_counts_all_orders_of_the_columns(A):
    """Lemma lem-shuffle, with equal entries in a column too, against every one of the N! orders."""
    pairs = list(combinations(range(len(A)), 2))
    assume(sum(exact_tv(A[i], A[j]) == exact_kappa(A) for i, j in pairs) == 1)
    orders = list(permutations(range(len(A))))
    held = sum(exact_condition([[row[k] for k in order] for row in A]) for order in orders)
    assert shuffle_share(as_floats(A)).item() == pytest.approx(held / len(orders), abs=1e-15)


def test_the_shuffle_share_is_not_a_number_where_pairs_tie():
    assert shuffle_share(torch.eye(3)).isnan()
    A = random_stochastic(4, (2, 3), generator=seeded())
    A[1, 2] = torch.eye(4)
    assert shuffle_share(A).isnan().tolist() == [[False] * 3, [False, False, True]]


@pytest.mark.parametrize("n", range(2, 12))
def test_the_share_bounds_are_the_extremes_over_all_counts(n):
    shares = [F(a * (n - a), n * (n - 1)) for a in range(1, n)]
    assert share_bounds(n) == pytest.approx((float(min(shares)), float(max(shares))), abs=1e-15)
    if n >= 5:
        assert max(shares) <= F(3, 10)


@pytest.mark.parametrize("sample", [random_stochastic, random_attention])
def test_two_tokens_give_one_half_and_three_give_one_third(sample):
    for n, share in ((2, 1 / 2), (3, 1 / 3)):
        A = sample(n, 5000, generator=seeded())
        assert (shuffle_share(A) - share).abs().max() < 1e-15
        low, high = share_interval(int(check_equality(A).holds.sum()), 5000, level=0.9999)
        assert low < share < high


@pytest.mark.parametrize("n", [2, 4, 9])
def test_a_uniform_pair_chosen_beforehand(n):
    """Proposition prop-flat-pair: the probability, and the Beta law of total variation given the count."""
    A = random_stochastic(n, 20000, generator=seeded())
    p, q = A[:, 0], A[:, 1]
    held = int(((p[:, 0] > q[:, 0]) & (q[:, 1] > p[:, 1])).sum())
    low, high = share_interval(held, 20000, level=0.9999)
    assert low < flat_pair_share(n) < high
    tv = (p - q).abs().sum(-1) / 2
    for count in range(1, n):
        given_count = tv[(p > q).sum(-1) == count].numpy()
        if len(given_count) > 100:
            assert stats.kstest(given_count, stats.beta(n - 1, n).cdf).pvalue > 1e-3


def test_the_interval_is_wilsons():
    for held, drawn in ((0, 20), (7, 20), (20, 20), (280, 1000)):
        z, share = stats.norm.ppf(0.975), held / drawn
        centre = (share + z * z / (2 * drawn)) / (1 + z * z / drawn)
        half = z / (1 + z * z / drawn) * math.sqrt(share * (1 - share) / drawn + z * z / (4 * drawn**2))
        assert share_interval(held, drawn) == pytest.approx((centre - half, centre + half), abs=1e-12)


def test_a_survey_counts_what_it_draws(monkeypatch):
    monkeypatch.setattr(random_matrices, "CHUNK", 100)  # six matrices of 16 entries at a time
    A = torch.cat([random_stochastic(4, 40, generator=seeded()), torch.eye(4, dtype=torch.float64).expand(3, 4, 4)])
    position, sizes = 0, []

    def sample(b):
        nonlocal position
        position += b
        sizes.append(b)
        return A[position - b : position]

    found = survey(sample, 43)
    shares = shuffle_share(A[:40])
    assert sum(sizes) == 43 and max(sizes) == 6
    assert found.drawn == 43 and found.tied == 3
    assert found.held == int(check_equality(A).holds.sum())
    assert found.shuffled == pytest.approx(shares.mean().item(), abs=1e-15)
    assert found.shuffled_error == pytest.approx(shares.std().item() / math.sqrt(40), rel=1e-12)
    assert found.kappa == pytest.approx(check_equality(A).kappa.mean().item(), abs=1e-15)


@pytest.mark.parametrize(
    ("returned", "given"),
    [
        (torch.eye(3), r"shape \(3, 3\)"),
        (torch.eye(3).expand(2, 3, 3), r"shape \(2, 3, 3\)"),
        (torch.empty(0, 3, 3), r"shape \(0, 3, 3\)"),
        (torch.eye(3).expand(1, 1, 3, 3), r"shape \(1, 1, 3, 3\)"),
        ([[[1.0, 0.0], [0.0, 1.0]]], "a list"),
        (None, "a NoneType"),
    ],
)
def test_a_survey_counts_only_as_many_matrices_as_it_asked_for(returned, given):
    with pytest.raises(MatrixError, match=rf"^sample\(1\) returned {given}; .* \(1, N, N\)$"):
        survey(lambda b: returned, 1)


def test_a_survey_takes_arrays():
    drawn = random_stochastic(4, 50, generator=seeded())
    batches = iter([drawn[:1].numpy(), drawn[1:].numpy()])
    assert survey(lambda b: next(batches), 50).shuffled == pytest.approx(shuffle_share(drawn).mean().item(), abs=1e-15)


def test_a_survey_of_ties_alone_has_no_shuffle_share():
    found = survey(lambda b: torch.eye(4).expand(b, 4, 4), 5)
    assert found.tied == 5 and math.isnan(found.shuffled) and math.isnan(found.shuffled_error)


def test_saturated_rows_tie_and_hold_while_exact_arithmetic_would_not():
    """At concentration 0.01 kappa is 1 to rounding; with N = 9 no exact share exceeds 20/72."""
    found = survey(lambda b: random_stochastic(9, b, 0.01, generator=seeded()), 2000)
    assert found.tied > 1900 and found.held / found.drawn > 0.8 > share_bounds(9)[1]


def test_the_baseline_is_recorded_whole(tmp_path):
    path = tmp_path / "baseline.json"
    record_baseline(path, {3: 200, 2: 100}, seed=5)
    record = json.loads(path.read_text())
    assert [row["n"] for row in record["rows"]] == [3, 2] and [row["drawn"] for row in record["rows"]] == [200, 100]
    assert record["provenance"]["settings"]["seed"] == 5
    assert record["rows"][1] == baseline({2: 100}, seed=5)["rows"][0]  # a row does not depend on the others
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(MatrixError):
        record_baseline(path, {3: 0})
    assert json.loads(path.read_text()) == record and list(tmp_path.iterdir()) == [path]


def test_the_recorded_baseline_is_what_this_code_gives():
    record = json.loads(RECORD.read_text())
    assert {row["n"]: row["drawn"] for row in record["rows"]} == BASELINE
    small = {n: BASELINE[n] for n in (2, 4)}
    for row in baseline(small, record["provenance"]["settings"]["seed"])["rows"]:
        recorded = next(r for r in record["rows"] if r["n"] == row["n"])
        assert row["held"] == recorded["held"] and row["shuffled"] == pytest.approx(recorded["shuffled"], abs=1e-9)
