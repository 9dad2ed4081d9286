"""The verdict, the gap and the margin, against exact rational arithmetic that builds the factor itself."""

import random
from fractions import Fraction as F
from itertools import combinations, permutations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from matrices import as_floats, exact_factor, exact_kappa, exact_tv, rational_matrices

from dobnb import check_equality, exact_equality, rollout, rollout_factor
from dobnb.dobrushin import dobrushin_coefficient, pairwise_total_variation
from dobnb.equality import NEAR_TIE, dominance_slack, factor_total_variation
from dobnb.stochastic import MatrixError

HALF = F(1, 2)
ALPHAS = st.sampled_from([F(1, 10), F(1, 3), HALF, F(3, 4)])


def exact_gap(A, alpha=HALF):
    return alpha + (1 - alpha) * exact_kappa(A) - exact_kappa(exact_factor(A, alpha))


@given(rational_matrices(), ALPHAS)
def test_the_verdict_says_whether_the_bound_is_tight(A, alpha):
    """The theorem itself: the condition on A against the bound computed from the factor, both without dobnb's help."""
    assert bool(check_equality(as_floats(A), float(alpha)).holds) == (exact_gap(A, alpha) == 0)


@given(rational_matrices(), ALPHAS)
def test_the_numbers_are_those_of_exact_arithmetic(A, alpha):
    report = check_equality(as_floats(A), float(alpha))
    kappa, gap = exact_kappa(A), exact_gap(A, alpha)
    assert report.kappa.item() == pytest.approx(float(kappa), abs=1e-13)
    assert report.gap.item() == pytest.approx(float(gap), abs=1e-13)
    assert report.factor_kappa.item() == pytest.approx(float(exact_kappa(exact_factor(A, alpha))), abs=1e-13)
    assert report.bound.item() == pytest.approx(float(alpha + (1 - alpha) * kappa), abs=1e-13)
    if kappa == 0:
        assert report.relative_gap.isnan()
    else:
        assert report.relative_gap.item() == pytest.approx(float(gap / ((1 - alpha) * kappa)), abs=1e-9)


def test_ties_between_rows_survive_renormalisation():
    """Rows that permute the same entries tie everywhere, while their float sums differ in the last bit."""
    draw = random.Random(0)
    for _ in range(1500):
        n = draw.randint(2, 12)
        weights = [draw.choice([0, 1, 1, 2, 3, 7]) for _ in range(n - 1)] + [1]
        A = [[F(w, sum(weights)) for w in draw.sample(weights, n)] for _ in range(n)]
        assert bool(check_equality(as_floats(A)).holds) == (exact_gap(A) == 0)


@given(rational_matrices())
def test_the_gap_is_exactly_zero_where_the_bound_is_tight(A):
    report = check_equality(as_floats(A))
    assert (report.gap.item() == 0) == bool(report.holds)


def test_float32_breaks_a_tie_and_the_margin_says_so():
    """Row 2 ties with row 1 in exact arithmetic; in float32 their sums differ, and so do the renormalised entries."""
    A = torch.tensor([[0.2, 0.1, 0.7], [0.1, 0.7, 0.2], [0.4, 0.5, 0.1]])
    assert check_equality(A.double().round(decimals=1)).holds
    assert check_equality(A).margin < NEAR_TIE


@given(rational_matrices())
def test_the_pair_is_the_first_witness(A):
    report = check_equality(as_floats(A))
    attaining = [(i, j) for i, j in combinations(range(len(A)), 2) if exact_tv(A[i], A[j]) == exact_kappa(A)]
    witnesses = [(i, j) for i, j in attaining if A[i][i] >= A[j][i] and A[j][j] >= A[i][j]]
    assert report.attaining.item() == len(attaining)
    assert tuple(report.pair.tolist()) == (witnesses or attaining)[0]


@given(rational_matrices(), ALPHAS)
def test_the_pairwise_identity(A, alpha):
    """Lemma lem-pair-identity, every pair, against the factor built and compared row by row in Fractions."""
    B = exact_factor(A, alpha)
    found = factor_total_variation(as_floats(A), float(alpha))
    for i, j in combinations(range(len(A)), 2):
        assert found[i, j].item() == pytest.approx(float(exact_tv(B[i], B[j])), abs=1e-13)


def exact_margin(A):
    """How far the quantities must move, found by trying each candidate distance (book: def-margin).

    At a distance d, a pair may come to attain kappa if it is within d of it, and may change sides if its slack is
    within d of 0. The verdict can flip as soon as some pair may do both.
    """
    pairs = list(combinations(range(len(A)), 2))
    tv = {p: exact_tv(A[p[0]], A[p[1]]) for p in pairs}
    slack = {(i, j): min(A[i][i] - A[j][i], A[j][j] - A[i][j]) for i, j in pairs}
    kappa = max(tv.values())
    holds = any(slack[p] >= 0 for p in pairs if tv[p] == kappa)
    candidates = {F(0), *(kappa - v for v in tv.values()), *(abs(s) for s in slack.values())}
    for d in sorted(candidates):
        for p in pairs:
            other_side = slack[p] <= d if holds else slack[p] >= -d
            if other_side and kappa - tv[p] <= d:
                return d
    raise AssertionError("no distance flips the verdict")


@given(rational_matrices())
def test_the_margin_is_its_definition(A):
    assert check_equality(as_floats(A)).margin.item() == pytest.approx(float(exact_margin(A)), abs=1e-12)


@given(rational_matrices(largest=6), st.integers(0, 2**32 - 1))
def test_within_the_margin_no_perturbation_flips_the_verdict(A, seed):
    """Entries move by so little that every total variation and every slack stays within half the margin."""
    report = check_equality(as_floats(A))
    assume(report.margin.item() > 1e-6)
    n = len(A)
    noise = torch.rand(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 0.5
    start = torch.tensor(as_floats(A), dtype=torch.float64)
    moved = (start + noise * report.margin / (4 * n)).clamp(min=0)
    moved /= moved.sum(-1, keepdim=True)
    assert (pairwise_total_variation(moved) - pairwise_total_variation(start)).abs().max() <= report.margin / 2
    assert (dominance_slack(moved) - dominance_slack(start)).abs().max() <= report.margin / 2
    assert bool(check_equality(moved).holds) == bool(report.holds)


def test_permutation_matrices_fail_only_for_the_swap_and_the_two_three_cycles():
    for n in range(2, 7):
        for p in permutations(range(n)):
            A = torch.eye(n)[list(p)]
            cycle_of_all = n in (2, 3) and all(p[i] != i for i in range(n))
            assert bool(check_equality(A).holds) == (not cycle_of_all), p


def test_the_swap_has_the_largest_relative_gap():
    report = check_equality([[0.0, 1.0], [1.0, 0.0]])
    assert report.factor_kappa.item() == 0 and report.relative_gap.item() == 2


@given(st.fractions(0, 1, max_denominator=50), st.fractions(0, 1, max_denominator=50))
def test_two_tokens_hold_iff_the_diagonal_sums_to_at_least_one(a, b):
    """Doubles nearest to a + b = 1 straddle the line, so the exact tie is left to the rational tests."""
    assume(a + b != 1)
    A = [[a, 1 - a], [1 - b, b]]
    assert bool(check_equality(as_floats(A)).holds) == (a + b >= 1)


def test_a_largest_diagonal_in_the_row_does_not_suffice():
    A = [[F(2, 5), F(1, 5), F(2, 5)], [F(1, 3), F(1, 3), F(1, 3)], [F(1, 4), F(3, 8), F(3, 8)]]
    assert all(A[i][i] == max(A[i]) for i in range(3))
    assert exact_gap(A) > 0
    assert not check_equality(as_floats(A)).holds


@given(rational_matrices())
def test_a_largest_diagonal_in_the_column_suffices(A):
    n = len(A)
    A = [[max(A[k][j] for k in range(n)) if i == j else a for j, a in enumerate(row)] for i, row in enumerate(A)]
    A = [[a / sum(row) for a in row] for row in A]
    assume(all(A[i][i] >= A[k][i] for i in range(n) for k in range(n)))
    assert check_equality(as_floats(A)).holds


@given(rational_matrices(largest=6))
def test_substochastic_rows_keep_the_identity(A):
    A = [[a * F(k + 1, k + 2) for a in row] for k, row in enumerate(A)]
    report = check_equality(as_floats(A), rows="substochastic")
    assert report.kappa.item() == pytest.approx(float(exact_kappa(A)), abs=1e-13)
    assert report.factor_kappa.item() == pytest.approx(float(exact_kappa(exact_factor(A, HALF))), abs=1e-13)
    assert bool(report.holds) == (exact_gap(A) == 0)


def test_a_batch_is_its_matrices_one_by_one():
    A = torch.distributions.Dirichlet(torch.ones(6, dtype=torch.float64)).sample((4, 5, 6))
    together = check_equality(A)
    for i in range(4):
        for j in range(5):
            alone = check_equality(A[i, j])
            assert together.holds[i, j] == alone.holds
            assert together.margin[i, j] == alone.margin
            assert together.pair[i, j].tolist() == alone.pair.tolist()
    assert check_equality(A[:0]).holds.shape == (0, 5)


def test_float32_attention_gives_the_verdict_of_its_float64_values():
    A = torch.softmax(3 * torch.randn(64, 33, 33, generator=torch.Generator().manual_seed(0)), -1)
    exact = A.double() / A.double().sum(-1, keepdim=True)
    bound_gap = 0.5 + 0.5 * dobrushin_coefficient(exact) - dobrushin_coefficient(rollout_factor(exact))
    report = check_equality(A)
    assert torch.equal(report.holds, bound_gap < 1e-12)
    torch.testing.assert_close(report.gap, bound_gap, atol=1e-13, rtol=0)


@pytest.mark.parametrize("alpha", [0, 1, -0.5, 2, float("nan"), "half", None, 1j, True])
def test_alpha_out_of_range_is_refused(alpha):
    for function in (check_equality, factor_total_variation, rollout_factor):
        with pytest.raises(MatrixError, match="alpha"):
            function(torch.eye(3), alpha)
    with pytest.raises(MatrixError, match="alpha"):
        rollout([torch.eye(3)], alpha)


@given(rational_matrices(largest=6), ALPHAS)
def test_the_bounds_on_the_gap(A, alpha):
    """prop-gap-bounds and prop-gap-margin, of the numbers that the package reports."""
    report, n = exact_equality(A, alpha), len(A)
    assert report.gap <= 2 * min(alpha, (1 - alpha) * report.kappa)
    assert n == 2 or report.gap <= 1 - alpha
    assert report.gap <= (1 - alpha) * (report.kappa + (1 - sum(A[i][i] for i in range(n))) / (n - 1))
    small = min(alpha, (1 - alpha) * report.margin)
    assert report.holds or 0 < small <= report.gap <= (1 - alpha) * report.margin + 2 * small


@given(rational_matrices(largest=6), st.fractions(HALF, F(99, 100), max_denominator=100))
def test_above_one_half_the_gap_is_linear_in_alpha(A, alpha):
    assert exact_equality(A, alpha).gap == 2 * (1 - alpha) * exact_equality(A).gap


@given(rational_matrices(largest=8), st.integers(0, 7))
def test_a_token_that_attends_to_itself_alone_suffices(A, token):
    """prop-lone-token"""
    token %= len(A)
    A[token] = [F(k == token) for k in range(len(A))]
    report = check_equality(as_floats(A))
    assert report.holds
    assert report.kappa.item() == pytest.approx(float(1 - min(row[token] for row in A)), abs=1e-13)
