"""Bounds on kappa of a whole rollout: the paper's product, a sharper one, and the truth (book: ch-depth)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dobnb.dobrushin import dobrushin_coefficient
from dobnb.equality import check_equality
from dobnb.stochastic import MatrixError, layers_and_factors


class DepthBounds(NamedTuple):
    """What :func:`depth_bounds` found. Tensors of shape (L, ...); entry l is about the first l + 1 layers."""

    bound: Tensor
    """The depth bound: the product of ``alpha + (1 - alpha) kappa(A_l)`` (book: eq-depth-bound)."""
    product: Tensor
    """The product of the factors' own coefficients, ``kappa(alpha I + (1 - alpha) A_l)``; at most `bound`."""
    truth: Tensor
    """kappa of the rollout of these layers; at most `product`, up to rounding of about N 1e-16."""
    holds: Tensor
    """bool: the layerwise bound of layer l + 1 alone is tight (book: thm-equality)."""


def depth_bounds(matrices: Sequence[Any] | Tensor, alpha: float = 0.5) -> DepthBounds:
    """Bounds on kappa of the rollout and its true value, after every layer, in one pass (book: cor-depth-bound).

    For the rollout ``R_l = B_l ... B_1`` of the factors ``B_l = alpha I + (1 - alpha) A_l``::

        kappa(R_l)  <=  prod kappa(B_m)  <=  prod (alpha + (1 - alpha) kappa(A_m)),   m = 1 ... l

    The factors' coefficients come from the exact gap (book: thm-gap), so the sharper product costs nothing extra. The
    matrices are taken as they are: bounds made of subchains hold for the rollout of the subchains, not for the model's.

    :param matrices: one row-stochastic matrix a layer, first layer first, each of shape (..., N, N).
    :param alpha: weight of the residual stream, strictly between 0 and 1; the paper takes 1/2.
    :return: :class:`DepthBounds`, values in [0, 1].
    :raises MatrixError: no sequence, no matrix, shapes that differ, a matrix that is not row-stochastic, or `alpha`
        out of range.

    >>> found = depth_bounds([[[0.0, 1.0], [1.0, 0.0]], [[0.75, 0.25], [0.25, 0.75]]])
    >>> found.bound.tolist(), found.product.tolist(), found.holds.tolist()
    ([1.0, 0.75], [0.0, 0.0], [False, True])
    """
    rollout: Tensor | None = None
    bounds, factors, truths, verdicts = [], [], [], []
    for A, factor in layers_and_factors(matrices, alpha):
        report = check_equality(A, alpha)
        rollout = factor if rollout is None else factor @ rollout
        bounds.append(report.bound)
        factors.append(report.factor_kappa)
        truths.append(dobrushin_coefficient(rollout))
        verdicts.append(report.holds)
    return DepthBounds(
        bound=torch.stack(bounds).cumprod(0),
        product=torch.stack(factors).cumprod(0),
        truth=torch.stack(truths),
        holds=torch.stack(verdicts),
    )


class Slack(NamedTuple):
    """How much each layer adds to ``log(bound / truth)``, in nats. Tensors of shape (L, ...), at least 0 but for
    rounding; the sum of all entries of both is the whole."""

    layerwise: Tensor
    """``log(alpha + (1 - alpha) kappa(A_l)) - log kappa(B_l)``: what the layerwise bound loses, 0 where it is tight."""
    submultiplicative: Tensor
    """``log kappa(B_l) + log kappa(R_l-1) - log kappa(R_l)``: what multiplying coefficients loses; 0 at the first."""


def slack(found: DepthBounds) -> Slack:
    """Where the depth bound loses: layer by layer, at the layerwise bound or in the product (book: eq-slack).

    :return: :class:`Slack`; not finite from the first layer on at which kappa of a factor or of the rollout is 0.
    :raises MatrixError: `found` is not what :func:`depth_bounds` returns.

    >>> found = depth_bounds([[[0.75, 0.25], [0.25, 0.75]], [[0.25, 0.75], [0.75, 0.25]]])
    >>> [round(value, 3) for value in slack(found).layerwise.tolist()]  # the second layer is not tight
    [0.0, 1.099]
    """
    if not isinstance(found, DepthBounds):
        raise MatrixError(f"found is a {type(found).__name__}; pass what depth_bounds returns")
    layerwise = _steps(found.bound.log() - found.product.log())
    return Slack(layerwise, _steps(found.product.log() - found.truth.log()))


def _steps(total: Tensor) -> Tensor:
    """What each layer adds to a cumulative sum."""
    return torch.cat([total[:1], total[1:] - total[:-1]])
