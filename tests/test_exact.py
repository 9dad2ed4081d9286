"""Exact arithmetic against the definition, and the float path against exact arithmetic."""

import random
from fractions import Fraction as F
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from matrices import as_floats, exact_factor, exact_kappa, exact_tv, rational_matrices

from dobnb import check_equality, exact_equality
from dobnb.dobrushin import ATTAINS
from dobnb.stochastic import MatrixError

HALF = F(1, 2)
TINY = [F(1, 10**9), F(2, 10**9), F(1, 10**15), F(3, 10**15)]


@given(rational_matrices(), st.sampled_from([F(1, 10), F(1, 3), HALF, F(3, 4)]))
def test_every_field_is_its_definition(A, alpha):
    report = exact_equality(A, alpha)
    pairs = list(combinations(range(len(A)), 2))
    kappa, factor_kappa = exact_kappa(A), exact_kappa(exact_factor(A, alpha))
    attaining = [(i, j) for i, j in pairs if exact_tv(A[i], A[j]) == kappa]
    witnesses = [(i, j) for i, j in attaining if A[i][i] >= A[j][i] and A[j][j] >= A[i][j]]
    sign = 1 if witnesses else -1
    slack = {(i, j): min(A[i][i] - A[j][i], A[j][j] - A[i][j]) for i, j in pairs}
    assert report.kappa == kappa and report.factor_kappa == factor_kappa
    assert report.bound == alpha + (1 - alpha) * kappa
    assert report.gap == report.bound - factor_kappa
    assert report.relative_gap == (report.gap / ((1 - alpha) * kappa) if kappa else None)
    assert report.holds == bool(witnesses) and report.pair == (witnesses or attaining)[0]
    assert report.attaining == len(attaining)
    assert report.margin == min(max(sign * slack[i, j], kappa - exact_tv(A[i], A[j])) for i, j in pairs)


@given(rational_matrices(), st.fractions(0, 1, max_denominator=20))
def test_the_theorem_without_rounding(A, alpha):
    assume(0 < alpha < 1)
    report = exact_equality(A, alpha)
    assert report.holds == (report.gap == 0)


@given(rational_matrices(largest=8))
def test_substochastic_rows_keep_the_theorem(A):
    A = [[a * F(k + 1, k + 2) for a in row] for k, row in enumerate(A)]
    report = exact_equality(A, rows="substochastic")
    assert report.holds == (report.gap == 0)
    with pytest.raises(MatrixError, match="not to exactly 1"):
        exact_equality(A)


def agree(A, report, exact):
    """All that the float path promises: the verdict, the pair and the count to the letter, numbers up to rounding."""
    assert bool(report.holds) == exact.holds
    assert tuple(report.pair.tolist()) == exact.pair and report.attaining.item() == exact.attaining
    for name in ("kappa", "factor_kappa", "bound", "gap", "margin"):
        assert getattr(report, name).item() == pytest.approx(float(getattr(exact, name)), abs=1e-12), name


@given(rational_matrices())
def test_floats_agree_on_ties_zeros_ones_and_repeated_rows(A):
    agree(A, check_equality(as_floats(A)), exact_equality(A))


@st.composite
def matrices_with_tiny_entries(draw):
    """Rational matrices, N from 2 to 12, some of whose weights are moved by as little as 1e-15."""
    A = draw(rational_matrices())
    for row in A:
        for k in range(len(A)):
            row[k] += draw(st.sampled_from([F(0), F(0), F(0), *TINY]))
    return [[a / sum(row) for a in row] for row in A]


@given(matrices_with_tiny_entries())
def test_floats_keep_their_definition_where_entries_are_tiny(A):
    """def-kappa-float in exact arithmetic: pairs within 1e-12 of kappa attain it. At the edge rounding may decide."""
    tv = {(i, j): exact_tv(A[i], A[j]) for i, j in combinations(range(len(A)), 2)}
    tolerance = F(ATTAINS)
    distances = {pair: max(tv.values()) - value for pair, value in tv.items()}
    assume(all(abs(distance - tolerance) > F(1, 10**14) for distance in distances.values()))
    # two entries that differ by less than a float can tell are one number to it
    sides = [A[i][i] - A[j][i] for i in range(len(A)) for j in range(len(A)) if i != j]
    assume(all(side == 0 or abs(side) > F(1, 2**52) for side in sides))

    attaining = [pair for pair in tv if distances[pair] <= tolerance]
    witnesses = [(i, j) for i, j in attaining if A[i][i] >= A[j][i] and A[j][j] >= A[i][j]]
    report = check_equality(as_floats(A))
    assert report.attaining.item() == len(attaining)
    assert bool(report.holds) == bool(witnesses)
    assert tuple(report.pair.tolist()) == (witnesses or attaining)[0]

    exact = exact_equality(A)
    if all(distance == 0 or distance > tolerance for distance in distances.values()):  # the tolerance changes nothing
        agree(A, report, exact)
    assert report.gap.item() == pytest.approx(float(exact.gap), abs=1e-11)


def test_ten_thousand_random_rational_matrices():
    """A thousand of each size from 2 to 11, in lumpy and in fine fractions; the floats of each size are one batch."""
    draw = random.Random(0)
    for N in range(2, 12):
        matrices = []
        for k in range(1000):
            largest = (1, 3, 10, 10**6)[k % 4]  # few values: ties and zeros
            rows = []
            for i in range(N):
                if i and draw.random() < 0.1:
                    rows.append(draw.choice(rows))
                    continue
                weights = [draw.randint(0, largest) for _ in range(N)]
                weights[draw.randrange(N)] += 1  # never all zero
                rows.append([F(weight, sum(weights)) for weight in weights])
            matrices.append(rows)
        exact = [exact_equality(A) for A in matrices]
        together = check_equality([as_floats(A) for A in matrices])
        assert all(report.holds == (report.gap == 0) for report in exact)
        assert together.holds.tolist() == [report.holds for report in exact]
        assert together.pair.tolist() == [list(report.pair) for report in exact]
        assert together.attaining.tolist() == [report.attaining for report in exact]
        for name in ("kappa", "factor_kappa", "gap", "margin"):
            expected = [float(getattr(report, name)) for report in exact]
            np.testing.assert_allclose(getattr(together, name), expected, atol=1e-12, rtol=0)


def test_a_tie_that_strict_floats_get_wrong():
    """In floats the pair 1, 3 comes out larger in the last digit, and it is not self-dominant."""
    A = [[F(2, 10), F(1, 10), F(7, 10)], [F(1, 10), F(7, 10), F(2, 10)], [F(4, 10), F(5, 10), F(1, 10)]]
    floats = as_floats(A)
    assert exact_tv(floats[0], floats[2]) > exact_tv(floats[0], floats[1])
    assert exact_equality(A).attaining == 2 and exact_equality(A).holds


def test_whole_numbers_and_numpy_integers_are_exact():
    swap = np.array([[0, 1], [1, 0]], dtype=np.int8)
    assert exact_equality(swap) == exact_equality([[F(0), F(1)], [F(1), F(0)]])
    mixed = [[np.int8(0), np.int8(1)], [F(1, 1000), F(999, 1000)]]  # 1000 does not fit into int8
    assert exact_equality(mixed).kappa == F(1, 1000)
    assert exact_equality(swap).relative_gap == 2 and exact_equality([[1, 0], [1, 0]]).relative_gap is None


def test_large_denominators_do_not_overflow():
    tiny = F(1, 3**90)
    report = exact_equality([[tiny, 1 - tiny], [1 - 2 * tiny, 2 * tiny]])
    assert report.kappa == 1 - 3 * tiny and report.factor_kappa == 3 * tiny / 2


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([[0.5, 0.5], [0.5, 0.5]], r"entry \(0, 0\) is a float"),
        (np.full((2, 2), 0.5), r"entry \(0, 0\) is a float"),
        ([["1/2", "1/2"], [1, 0]], r"entry \(0, 0\) is a str"),
        ([[HALF, F(1, 3)], [0, 1]], r"row \(0,\) sums to 5/6, not to exactly 1"),
        ([[F(3, 2), -HALF], [0, 1]], r"entry \(0, 1\) is -1/2"),
        ([[HALF, HALF]], r"shape \(1, 2\) is not one square matrix"),
        ([[HALF, HALF], [1]], "not one square matrix|not a matrix"),
        ([[[1, 0], [0, 1]]], r"shape \(1, 2, 2\) is not one square matrix"),
        ([[1]], "N is 1"),
        (torch.eye(2), "A is a tensor, .*use check_equality"),
        (torch.eye(2, dtype=torch.int64), "A is a tensor, .*use check_equality"),
        ([[F(1, 10**30), 1], [0, 1]], r"row \(0,\) sums to 1 \+ 1e-30, not to exactly 1"),
        ([[-F(1, 10**5000), 1], [0, 1]], r"entry \(0, 0\) is about -1e-5000; "),
        ([[10**5000, 1], [0, 1]], r"row \(0,\) sums to 1 \+ 1e\+5000, not"),
        ([], r"shape \(0,\) is not"),
    ],
)
def test_bad_matrices_are_refused(bad, says):
    with pytest.raises(MatrixError, match=says) as caught:
        exact_equality(bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("alpha", [0, 1, F(3, 2), -HALF, 0.5, "1/2", None, True])
def test_bad_alpha_is_refused(alpha):
    with pytest.raises(MatrixError, match="alpha"):
        exact_equality([[1, 0], [0, 1]], alpha)


def test_bad_rows_are_refused():
    with pytest.raises(MatrixError, match="rows must be"):
        exact_equality([[1, 0], [0, 1]], rows="any")
    with pytest.raises(MatrixError, match="not to at most 1"):
        exact_equality([[1, HALF], [0, 1]], rows="substochastic")
