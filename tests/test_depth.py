"""Bounds on a rollout against exact rational arithmetic, and the two kinds of chain that lose nothing."""

import math
from fractions import Fraction as F

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from matrices import as_floats, exact_factor, exact_kappa, exact_tv, rational_matrices

from dobnb import check_equality, depth_bounds, random_stochastic, rollout
from dobnb.depth import slack
from dobnb.stochastic import MatrixError

HALF = F(1, 2)
ALPHAS = st.sampled_from([F(1, 10), F(1, 3), HALF, F(3, 4)])


@st.composite
def layers_of(draw, smallest=2, largest=5, most=4):
    """One to `most` rational layers of one size."""
    n = draw(st.integers(smallest, largest))
    return draw(st.lists(rational_matrices(n, n), min_size=1, max_size=most))


def exact_bounds(layers, alpha=HALF):
    """(bound, product, truth) after every layer, in Fractions, the factors multiplied out entry by entry."""
    rollout = None
    bound = product = F(1)
    for A in layers:
        B = exact_factor(A, alpha)
        bound *= alpha + (1 - alpha) * exact_kappa(A)
        product *= exact_kappa(B)
        rollout = B if rollout is None else [
            [sum(b * row[k] for b, row in zip(left, rollout, strict=True)) for k in range(len(A))] for left in B
        ]  # fmt: skip
        yield bound, product, exact_kappa(rollout)


@given(layers_of(), ALPHAS)
def test_the_three_numbers_are_those_of_exact_arithmetic(layers, alpha):
    found = depth_bounds([as_floats(A) for A in layers], float(alpha))
    for depth, (bound, product, truth) in enumerate(exact_bounds(layers, alpha)):
        assert truth <= product <= bound
        assert found.bound[depth].item() == pytest.approx(float(bound), abs=1e-13)
        assert found.product[depth].item() == pytest.approx(float(product), abs=1e-13)
        assert found.truth[depth].item() == pytest.approx(float(truth), abs=1e-13)
        tight = exact_kappa(exact_factor(layers[depth], alpha)) == alpha + (1 - alpha) * exact_kappa(layers[depth])
        assert bool(found.holds[depth]) == tight


@given(layers_of(largest=2), ALPHAS)
def test_with_two_tokens_multiplying_loses_nothing(layers, alpha):
    """Proposition prop-two-token-product."""
    for _, product, truth in exact_bounds(layers, alpha):
        assert product == truth
    found = depth_bounds([as_floats(A) for A in layers], float(alpha))
    assert (found.product - found.truth).abs().max() < 1e-14


@given(st.lists(st.tuples(st.fractions(0, 1, max_denominator=20), rational_matrices(4, 4)), min_size=1, max_size=4))
def test_a_chain_that_stays_or_resets_loses_nothing(parts):
    """Proposition prop-lossless: c I + (1 - c) 1 pi, with pi the first row of a random matrix."""
    layers = [[[(1 - c) * p + (c if i == k else 0) for k, p in enumerate(M[0])] for i in range(4)] for c, M in parts]
    for bound, product, truth in exact_bounds(layers):
        assert bound == product == truth
    found = depth_bounds([as_floats(A) for A in layers])
    assert found.holds.all() and torch.equal(found.bound, found.product)
    assert (found.bound - found.truth).abs().max() < 1e-14


@given(rational_matrices())
def test_causal_attention_is_always_tight(A):
    """Corollary cor-causal, in exact arithmetic and by the package."""
    A = [[a if k <= i else F(0) for k, a in enumerate(row)] for i, row in enumerate(A)]
    A = [[a / sum(row) for a in row] if any(row) else [F(k == i) for k in range(len(row))] for i, row in enumerate(A)]
    kappa = 1 - min(row[0] for row in A)
    assert exact_kappa(A) == kappa == max(exact_tv(A[0], row) for row in A[1:])
    assert exact_kappa(exact_factor(A, HALF)) == HALF + HALF * kappa
    assert check_equality(as_floats(A)).holds


@given(layers_of())
def test_the_slack_splits_the_whole_and_is_never_negative(layers):
    exact = list(exact_bounds(layers))
    assume(exact[-1][2] > F(1, 10**6) and exact[-1][1] > 0)
    found = depth_bounds([as_floats(A) for A in layers])
    parts = slack(found)
    whole = math.log(exact[-1][0] / exact[-1][2])
    assert (parts.layerwise.sum() + parts.submultiplicative.sum()).item() == pytest.approx(whole, abs=1e-8)
    assert parts.layerwise.min() > -1e-8 and parts.submultiplicative.min() > -1e-8
    before = F(1)
    for depth, (A, (_, _, truth)) in enumerate(zip(layers, exact, strict=True)):
        factor = exact_kappa(exact_factor(A, HALF))
        layerwise = math.log((HALF + HALF * exact_kappa(A)) / factor)
        assert parts.layerwise[depth].item() == pytest.approx(layerwise, abs=1e-8)
        assert parts.submultiplicative[depth].item() == pytest.approx(math.log(factor * before / truth), abs=1e-8)
        before = truth


def test_the_truth_is_kappa_of_the_rollout_and_a_batch_is_its_chains():
    A = random_stochastic(7, (5, 2, 3), generator=torch.Generator().manual_seed(0))
    found = depth_bounds(A)
    assert found.truth.shape == found.bound.shape == found.holds.shape == (5, 2, 3)
    assert torch.equal(found.truth[-1], check_equality(rollout(A)).kappa)
    alone = depth_bounds([layer[1, 2] for layer in A])
    for one, all_ in zip(alone, found, strict=True):
        assert torch.allclose(one.double(), all_[:, 1, 2].double(), rtol=0, atol=1e-15)


def test_the_swap_forgets_all_at_once_while_its_bound_stays_at_one():
    found = depth_bounds([[[0.0, 1.0], [1.0, 0.0]]] * 3)
    assert found.bound.tolist() == [1, 1, 1] and found.truth.tolist() == [0, 0, 0]
    assert slack(found).layerwise[0] == math.inf


def test_bad_input_is_refused():
    with pytest.raises(MatrixError, match="at least one layer"):
        depth_bounds([])
    for nothing in (None, 3, torch.tensor(1.0)):
        with pytest.raises(MatrixError, match="pass a sequence of one matrix a layer"):
            depth_bounds(nothing)
    for nothing in (None, torch.eye(2)):
        with pytest.raises(MatrixError, match="pass what depth_bounds returns"):
            slack(nothing)
    with pytest.raises(MatrixError, match="layer 1 has shape"):
        depth_bounds([torch.eye(3), torch.eye(4)])
    with pytest.raises(MatrixError, match="alpha"):
        depth_bounds([torch.eye(3)], alpha=1)
    with pytest.raises(MatrixError, match="sums to"):
        depth_bounds([torch.ones(3, 3)])
