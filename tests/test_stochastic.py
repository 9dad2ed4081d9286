"""Validation, factors, rollout and restriction."""

from fractions import Fraction as F

import numpy as np
import pytest
import torch
from hypothesis import given
from matrices import as_floats, exact_factor, rational_matrices

from dobnb import (
    check_equality,
    dobrushin_coefficient,
    doeblin_bound,
    leave_one_out,
    restrict,
    rollout,
    rollout_factor,
)
from dobnb.dobrushin import attaining_pairs, pairwise_total_variation, total_variation
from dobnb.equality import dominance_slack, factor_total_variation
from dobnb.stochastic import MatrixError, as_stochastic


@pytest.mark.parametrize(
    ("bad", "names"),
    [
        ([[0.5, 0.5]], r"shape \(1, 2\) is not square"),
        ([0.5, 0.5], r"shape \(2,\) is not square"),
        ([[1.0]], "N is 1"),
        (np.zeros((3, 0, 0)), "N is 0"),
        ([[0.5, 0.5], [float("nan"), 1]], r"entry \(1, 0\) is nan"),
        ([[0.5, 0.5], [float("inf"), 1]], r"entry \(1, 0\) is inf"),
        ([[1.25, -0.25], [0.5, 0.5]], r"entry \(0, 1\) is -0.25"),
        ([[0.5, 0.5], [0.5, 0.5001]], r"row \(1,\) sums to 1.0001"),
        (np.stack([np.eye(2), np.ones((2, 2))]), r"row \(1, 0\) sums to 2"),
        ([[0.5, 0.5], [0.5]], "not a numeric array"),
        ("ab", "not a numeric array"),
        (np.array([["a", "b"], ["c", "d"]]), "not a numeric array"),
        (np.eye(2, dtype=complex), "complex"),
        ([[1 + 1j, 0], [0, 1]], "not a numeric array|complex"),
        ([[F(1, 2), F(1, 2)], [F(1), F(0)]], "not a numeric array.*exact_equality takes fractions"),
        (None, "not a numeric array"),
        ([[None, 1], [1, 0]], "not a numeric array"),
        (np.eye(2).astype("datetime64[s]"), "not a numeric array"),
        ([], r"shape \(0,\) is not square"),
        (0.5, r"shape \(\) is not square"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.tensor([[2, -1], [0, 1]]), r"entry \(0, 1\) is -1"),
    ],
)
def test_bad_matrices_are_refused_by_name(bad, names):
    with pytest.raises(MatrixError, match=names) as caught:
        as_stochastic(bad)
    assert "\n" not in str(caught.value) and isinstance(caught.value, ValueError)


DTYPES = [torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_real_dtype_is_computed_in_float64(dtype):
    A = torch.eye(3)[[1, 2, 0]].to(dtype)
    assert as_stochastic(A).dtype == torch.float64
    assert as_stochastic(A).tolist() == torch.eye(3)[[1, 2, 0]].tolist()


def test_every_function_takes_an_empty_batch():
    nothing = torch.zeros(0, 4, 3, 3)
    for function in (as_stochastic, rollout_factor, pairwise_total_variation, dominance_slack, factor_total_variation):
        assert function(nothing).shape == (0, 4, 3, 3)
    for function in (dobrushin_coefficient, doeblin_bound):
        assert function(nothing).shape == (0, 4)
    assert leave_one_out(nothing).shape == (0, 4, 3)
    assert attaining_pairs(total_variation(nothing)).shape == (0, 4, 3)
    assert restrict(nothing, [0, 2]).shape == (0, 4, 2, 2)
    assert rollout([nothing, nothing]).shape == (0, 4, 3, 3)
    report = check_equality(nothing)
    assert report.holds.shape == report.margin.shape == report.gap.shape == (0, 4) and report.pair.shape == (0, 4, 2)


def test_every_function_refuses_a_matrix_that_is_not_stochastic():
    bad = [[0.5, 0.6], [0.5, 0.5]]
    functions = [as_stochastic, rollout_factor, pairwise_total_variation, dominance_slack, factor_total_variation]
    functions += [dobrushin_coefficient, doeblin_bound, leave_one_out, check_equality]
    functions += [lambda A: restrict(A, [0, 1]), lambda A: rollout([torch.eye(2), A])]
    for function in functions:
        with pytest.raises(MatrixError, match=r"row \(0,\) sums to 1.1"):
            function(bad)


@pytest.mark.parametrize("tolerance", [-1e-6, 1, float("nan"), float("inf")])
def test_a_tolerance_out_of_range_is_refused(tolerance):
    with pytest.raises(MatrixError, match="tolerance"):
        as_stochastic(torch.eye(2), tolerance=tolerance)


def test_a_wider_tolerance_can_be_asked_for():
    A = [[0.5, 0.5004], [0.5, 0.5]]
    np.testing.assert_allclose(as_stochastic(A, tolerance=1e-3)[0], [0.5 / 1.0004, 0.5004 / 1.0004], atol=1e-15)


def test_a_float16_softmax_is_refused_not_repaired():
    A = torch.softmax(torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(0)), -1).half()
    with pytest.raises(MatrixError, match="sums to"):
        as_stochastic(A)


def test_a_list_of_python_floats_keeps_its_precision():
    assert as_stochastic([[0.1, 0.9], [0.9, 0.1]])[0, 0].item() == 0.1


def test_the_input_is_left_alone():
    A = torch.softmax(torch.randn(8, 8), -1)
    before = A.clone()
    as_stochastic(A), rollout_factor(A), restrict(A, [0, 1])
    assert torch.equal(A, before)


def test_float32_rows_are_renormalised_in_float64():
    A = torch.softmax(torch.randn(50, 50, generator=torch.Generator().manual_seed(1)), -1)
    assert (A.double().sum(-1) != 1).any()
    assert (as_stochastic(A).sum(-1) - 1).abs().max() < 1e-15


def test_substochastic_rows_are_kept_but_not_above_one():
    A = [[0.25, 0.25], [0.0, 0.5]]
    assert as_stochastic(A, rows="substochastic").tolist() == A
    with pytest.raises(MatrixError, match=r"row \(0,\) sums to 1.5, more than 1"):
        as_stochastic([[0.75, 0.75], [0.5, 0.5]], rows="substochastic")
    with pytest.raises(MatrixError, match="rows must be"):
        as_stochastic(A, rows="any")


@given(rational_matrices())
def test_the_factor_is_the_definition(A):
    expected = as_floats(exact_factor(A, F(1, 2)))
    np.testing.assert_allclose(rollout_factor(as_floats(A)), expected, atol=1e-15, rtol=0)


def test_rollout_multiplies_the_first_layer_rightmost():
    layers = np.random.default_rng(0).dirichlet(np.ones(4), size=(3, 4))
    first, second, third = ((np.eye(4) + A) / 2 for A in layers)
    np.testing.assert_allclose(rollout(layers), third @ second @ first, atol=1e-15)
    assert not np.allclose(rollout(layers), first @ second @ third)


def test_rollout_refuses_what_it_cannot_multiply():
    with pytest.raises(MatrixError, match="at least one layer"):
        rollout([])
    with pytest.raises(MatrixError, match=r"layer 1 has shape \(3, 3\)"):
        rollout([torch.eye(2), torch.eye(3)])


def test_restriction_keeps_rows_and_columns_and_renormalises():
    A = [[F(1, 2), F(1, 4), F(1, 4)], [F(1, 5), F(2, 5), F(2, 5)], [F(1, 5), F(1, 5), F(3, 5)]]
    expected = [[2 / 3, 1 / 3], [1 / 4, 3 / 4]]
    for tokens in ([0, 2], torch.tensor([True, False, True]), np.array([0, 2])):
        np.testing.assert_allclose(restrict(as_floats(A), tokens), expected, atol=1e-15)
    np.testing.assert_allclose(restrict(as_floats(A), [0, 2], renormalize=False), [[0.5, 0.25], [0.2, 0.6]])
    np.testing.assert_allclose(restrict(as_floats(A), [2, 0]), [[3 / 4, 1 / 4], [1 / 3, 2 / 3]], atol=1e-15)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([0], "1 tokens kept"),
        ([], "0 tokens kept"),
        ([True, False, False], "1 tokens kept"),
        ([True, False], "mask has shape"),
        ([0, 3], "token 3 is outside"),
        ([-1, 0], "token -1 is outside"),
        ([0, 0], "given twice"),
        ([0.0, 1.0], "must be a boolean mask or a list of indices"),
        ([[0, 1]], "must be a boolean mask or a list of indices"),
        ("ab", "must be a boolean mask or a list of indices"),
        (None, "must be a boolean mask or a list of indices"),
        ([[0], [1, 2]], "must be a boolean mask or a list of indices"),
        (1, "must be a boolean mask or a list of indices"),
    ],
)
def test_bad_tokens_are_refused(tokens, says):
    with pytest.raises(MatrixError, match=says):
        restrict(torch.full((3, 3), 1 / 3), tokens)


def test_a_row_without_mass_is_refused():
    with pytest.raises(MatrixError, match=r"row \(1,\) of the subchain has no mass"):
        restrict([[1.0, 0, 0], [0, 0, 1.0], [0, 0, 1.0]], [0, 1])
