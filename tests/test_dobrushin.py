"""kappa, Doeblin bound and leave-one-out against exact rational arithmetic and plain numpy loops."""

from fractions import Fraction as F
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import as_floats, exact_tv, rational_matrices

from dobnb import dobrushin_coefficient, doeblin_bound, leave_one_out
from dobnb.dobrushin import attaining_pairs, pairwise_total_variation, row_pairs, total_variation


@given(rational_matrices())
def test_kappa_is_the_exact_maximum_over_pairs(A):
    n = len(A)
    expected = max(exact_tv(A[i], A[j]) for i, j in combinations(range(n), 2))
    assert dobrushin_coefficient(as_floats(A)).item() == pytest.approx(float(expected), abs=1e-13)


@given(rational_matrices())
def test_attaining_pairs_are_those_of_exact_arithmetic(A):
    n = len(A)
    tv = {(i, j): exact_tv(A[i], A[j]) for i, j in combinations(range(n), 2)}
    expected = {pair for pair, value in tv.items() if value == max(tv.values())}
    found = torch.stack(row_pairs(n), -1)[attaining_pairs(total_variation(as_floats(A)))]
    assert {tuple(pair) for pair in found.tolist()} == expected


@given(rational_matrices())
def test_doeblin_bound_is_exact_and_above_kappa(A):
    bound = doeblin_bound(as_floats(A)).item()
    assert bound == pytest.approx(float(1 - len(A) * min(min(row) for row in A)), abs=1e-13)
    assert bound >= dobrushin_coefficient(as_floats(A)).item() - 1e-13


@given(rational_matrices(smallest=3))
def test_leave_one_out_is_the_exact_drop(A):
    n = len(A)
    tv = {(i, j): exact_tv(A[i], A[j]) for i, j in combinations(range(n), 2)}
    kappa = max(tv.values())
    expected = [float(kappa - max(v for pair, v in tv.items() if i not in pair)) for i in range(n)]
    assert leave_one_out(as_floats(A)).tolist() == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("n", [2, 3, 9, 65, 257])
def test_a_batch_agrees_with_a_broadcast_in_numpy(n):
    A = np.random.default_rng(n).dirichlet(np.ones(n), size=(3, n))
    expected = 0.5 * np.abs(A[:, :, None, :] - A[:, None, :, :]).sum(-1)
    np.testing.assert_allclose(pairwise_total_variation(A), expected, atol=1e-14, rtol=0)
    np.testing.assert_allclose(dobrushin_coefficient(A), expected.max((1, 2)), atol=1e-14, rtol=0)


def test_extremes():
    assert dobrushin_coefficient(torch.full((5, 5), 0.2)).item() == 0
    assert dobrushin_coefficient(torch.eye(7)).item() == 1
    assert doeblin_bound(torch.full((4, 4), 0.25)).item() == 0


@pytest.mark.parametrize("n", [2, 3, 7, 70])
def test_values_stay_within_their_range(n):
    """Rounding alone would leave a total variation just above 1, or a Doeblin bound just below 0."""
    thirds = torch.rand(200, n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    disjoint = torch.zeros(200, 2 * n, 2 * n, dtype=torch.float64)
    disjoint[:, :n, :n] = disjoint[:, n:, n:] = thirds / thirds.sum(-1, keepdim=True)
    assert total_variation(disjoint).max() == 1
    assert doeblin_bound(torch.full((3, n, n), 1 / n, dtype=torch.float64) * (1 + 1e-15)).min() >= 0


def test_pairs_attain_within_1e_minus_12():
    """The tolerance of the book's def-kappa-float, from both sides."""
    for difference, count in ((4e-13, 2), (4e-12, 1)):
        A = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.5 + difference, 0, 0.5 - difference]], dtype=torch.float64)
        assert int(attaining_pairs(total_variation(A[:, :]))[:2].sum()) == count


def test_doeblin_can_be_void_where_kappa_is_small():
    """One zero entry makes the Doeblin bound 1; kappa sees that the rows nearly agree."""
    A = [[0, F(1, 2), F(1, 2)], [F(1, 10), F(9, 20), F(9, 20)], [F(1, 10), F(9, 20), F(9, 20)]]
    assert doeblin_bound(as_floats(A)).item() == 1
    assert dobrushin_coefficient(as_floats(A)).item() == pytest.approx(0.1)


def test_two_tokens_leave_nothing_behind():
    assert leave_one_out([[0.75, 0.25], [0.5, 0.5]]).tolist() == [0.25, 0.25]


def test_disjoint_attaining_pairs_leave_every_score_zero():
    A = [[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0], [0, 0, 0, 1.0]]
    assert leave_one_out(A).tolist() == [0, 0, 0, 0]


@given(st.integers(2, 6), st.integers(0, 4))
def test_leading_dimensions_are_free(n, batch):
    A = torch.full((batch, 3, n, n), 1 / n)
    assert dobrushin_coefficient(A).shape == (batch, 3)
    assert leave_one_out(A).shape == (batch, 3, n)
