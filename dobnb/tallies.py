"""What is counted of a set of inputs, layer by layer, and how the counts of two sets add up: to the last bit.

Everything about single inputs is kept, so adding means putting it in the order of the inputs. Of the matrices only a
sum is kept, in floating point, whose rounding depends on the order of adding; this is how it does not. Each block of
inputs is summed in float64, in order. That sum is cut into two parts on fixed grids, ``2**-32`` and ``2**-72``, so an
entry is off by at most ``2**-73``, whatever its size. Numbers on a grid add without rounding as long as the total has
at most 53 bits: up to ``2**21`` inputs on the coarse grid, up to ``2**14`` blocks on the fine one. So ``a + b`` is
associative and commutative, exactly, and no sum of a block has to be kept.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO

import numpy as np
import torch
from torch import Tensor, nn

from dobnb.capture import stream_attention
from dobnb.dobrushin import dobrushin_coefficient
from dobnb.equality import NEAR_TIE, EqualityReport, check_equality
from dobnb.errors import DobnbError, PaddingError
from dobnb.kernel import mean_of_heads
from dobnb.stochastic import MatrixError
from dobnb.tokens import CONTENT, PADDING, ModelInputs

MOST_INPUTS, MOST_BLOCKS = 1 << 21, 1 << 14
"""Beyond these, sums of matrices would round."""
_GRIDS = (2.0**-32, 2.0**-72)


class TallyError(DobnbError):
    """Tallies cannot be made, read or added as asked."""


@dataclass(frozen=True, eq=False)
class Tallies:
    """Tallies of n inputs over L layers of H heads. ``a + b`` is of the inputs of both."""

    inputs: np.ndarray
    """int64, (n,): which inputs, ascending."""
    by_input: dict[str, np.ndarray]
    """One entry an input along the first axis, then one a layer:

    ``content_`` and ``all_``, of the mean over heads on the token set: ``holds`` (bool), ``kappa``, ``margin`` and
    ``gap``, the relative one (float64), each (n, L). ``heads_holds``, ``heads_near`` (a margin below
    :data:`dobnb.equality.NEAR_TIE`): bool, (n, L, H), of the heads on content, where they were measured.
    ``depth_bound``, ``depth_product``, ``depth_truth``: float64, (n, L), where measured, as
    :class:`dobnb.depth.DepthBounds`, on all tokens. ``tokens``, ``content_tokens``: int64, (n,), without padding."""
    roles: tuple[str, ...] | None
    """The role of each of the N tokens, without padding; None where inputs differ in it."""
    sums: np.ndarray | None
    """float64, (2, L, N, N): the sum over inputs of the mean over heads, in its two parts; None where `roles` is."""
    seconds: float = 0.0
    """What it took, over all processes."""
    origins: frozenset[str] = frozenset()
    """Where it was computed: JSON of :func:`dobnb.provenance.origin`."""

    @property
    def layers(self) -> int:
        """L, the layers measured."""
        return self.by_input["content_holds"].shape[1]

    def averaged(self) -> np.ndarray | None:
        """The mean over heads and inputs, float64, (L, N, N); None where inputs differ in their tokens."""
        return None if self.sums is None else (self.sums[0] + self.sums[1]) / len(self.inputs)

    def __add__(self, other: Tallies) -> Tallies:
        """Tallies of the inputs of both.

        :raises TallyError: an input is in both, or they are not of the same layers, heads and tests.
        """
        if not isinstance(other, Tallies):
            return NotImplemented
        shapes = [{name: values.shape[1:] for name, values in one.by_input.items()} for one in (self, other)]
        if shapes[0] != shapes[1]:
            raise TallyError("tallies of different layers, heads or tests do not add; measure both alike")
        if len(common := np.intersect1d(self.inputs, other.inputs)):
            raise TallyError(f"input {common[0]} is in both tallies; add tallies of different inputs")
        inputs = np.concatenate([self.inputs, other.inputs])
        order = np.argsort(inputs)
        alike = self.roles is not None and self.roles == other.roles
        return Tallies(
            inputs[order],
            {name: np.concatenate([self.by_input[name], other.by_input[name]])[order] for name in self.by_input},
            self.roles if alike else None,
            self.sums + other.sums if alike else None,
            self.seconds + other.seconds,
            self.origins | other.origins,
        )

    def write(self, file: IO[bytes], fingerprint: str) -> None:
        """Write an npz that needs no pickle. `fingerprint` says which run they belong to."""
        sums = {} if self.sums is None else {"sums": self.sums, "roles": np.array(self.roles)}
        born = {"seconds": np.array(self.seconds), "origins": np.array(sorted(self.origins))}
        np.savez(file, inputs=self.inputs, fingerprint=np.array(fingerprint), **sums, **born, **self.by_input)

    @classmethod
    def read(cls, content: bytes, fingerprint: str) -> Tallies:
        """What :meth:`write` wrote.

        :raises TallyError: they are of another run, or no tallies at all.
        """
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as archive:
                found = {name: archive[name] for name in archive.files}
            written = str(found.pop("fingerprint"))
            roles, sums = found.pop("roles", None), found.pop("sums", None)
            inputs, seconds, origins = (found.pop(name) for name in ("inputs", "seconds", "origins"))
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            raise TallyError(f"it holds no tallies ({type(error).__name__})") from error
        if written != fingerprint:
            raise TallyError("it is of a run with other settings")
        known = None if roles is None else tuple(roles.tolist())
        return cls(inputs, found, known, sums, float(seconds), frozenset(origins.tolist()))


def on_grids(total: np.ndarray) -> np.ndarray:
    """Cut a block's sum into two parts that add without rounding (see the module's text).

    :param total: float64, entries in [0, 2**20].
    :return: float64, one axis of length 2 in front; the two parts sum to `total` within ``2**-73``.
    """
    coarse = np.rint(total / _GRIDS[0]) * _GRIDS[0]
    return np.stack([coarse, np.rint((total - coarse) / _GRIDS[1]) * _GRIDS[1]])


# A layer ------------------------------------------------------------------------------------------------------------


def layer_tallies(
    weights: Tensor, content: Tensor, heads: bool
) -> tuple[dict[str, Tensor], Tensor, dict[str, EqualityReport]]:
    """All that one layer's attention is tested for but depth: a pass over the heads, and two over their mean.

    :param weights: row-stochastic, float32 or float64, shape (B, H, N, N), contiguous.
    :param content: which tokens are content, bool, shape (N,).
    :param heads: test every head too.
    :return: what :class:`Tallies` has by input, shapes (B,) and (B, H); the means over heads, float64, (B, N, N);
        and their reports, ``content`` and ``all``.
    :raises MatrixError: rows that do not sum to 1, or fewer than two content tokens.
    """
    found = {}
    on_cpu = weights.device.type == "cpu"
    if heads:
        # On another device an input at a time, which keeps memory small.
        reports = [check_equality(part, tokens=content) for part in ([weights] if on_cpu else weights.split(1))]
        found["heads_holds"] = torch.cat([report.holds for report in reports])
        found["heads_near"] = torch.cat([report.margin for report in reports]) < NEAR_TIE
    # Heads are summed in float64, on the CPU without a float64 copy of every head.
    mean = torch.from_numpy(mean_of_heads(weights.numpy())) if on_cpu else weights.double().mean(1)
    reports = {"content": check_equality(mean, tokens=content), "all": check_equality(mean)}
    for name, report in reports.items():
        found |= {
            f"{name}_holds": report.holds,
            f"{name}_kappa": report.kappa,
            f"{name}_margin": report.margin,
            f"{name}_gap": report.relative_gap,
        }
    return found, mean, reports


@dataclass
class _Depth:
    """The rollout of the layers so far of B inputs, and the products that bound its kappa."""

    rollout: Tensor | None = None
    bound: Tensor | float = 1.0
    product: Tensor | float = 1.0

    def layer(self, mean: Tensor, report: EqualityReport) -> dict[str, Tensor]:
        """Go one layer deeper, as :func:`dobnb.depth.depth_bounds` does, which holds a whole stack of matrices."""
        mass = mean.sum(-1, keepdim=True)  # the factor's rows sum to 1 exactly, those of the mean within 1e-6
        if self.rollout is None:
            self.rollout = (0.5 / mass) * mean
            self.rollout.diagonal(dim1=-2, dim2=-1).add_(0.5)
        else:
            self.rollout = torch.bmm(mean, self.rollout).mul_(0.5 / mass).add_(self.rollout, alpha=0.5)
        self.bound, self.product = self.bound * report.bound, self.product * report.factor_kappa
        truth = dobrushin_coefficient(self.rollout)
        return {"depth_bound": self.bound, "depth_product": self.product, "depth_truth": truth}


# A block ------------------------------------------------------------------------------------------------------------


@dataclass
class _Group:
    """Inputs of a batch whose tokens have the same roles, and what their layers gave."""

    members: list[int]
    kept: Tensor | None
    """Indices of the tokens that are no padding; None where all are."""
    roles: tuple[str, ...]
    content: Tensor
    depth: _Depth | None
    layers: list[dict[str, np.ndarray]]


@dataclass
class _Average:
    """The sum over a block's inputs of the mean over heads, by layer, while their tokens have the same roles."""

    roles: tuple[str, ...] | None = None
    totals: list[Tensor] | None = field(default_factory=list)
    """None once inputs differ in their tokens."""

    def expect(self, groups: Sequence[_Group]) -> None:
        """Hear of the roles of inputs whose matrices are to come."""
        self.roles = self.roles or groups[0].roles
        if any(group.roles != self.roles for group in groups):
            self.totals = None

    def add(self, layer: int, mean: Tensor) -> None:
        """Add matrices of shape (B, N, N), one by one, in order: the sum does not depend on the batch size."""
        if self.totals is None:
            return
        if layer == len(self.totals):
            self.totals.append(torch.zeros_like(mean[0]))
        for matrix in mean:
            self.totals[layer] += matrix


def _without_padding(roles: Sequence[tuple[str, ...]], padding: Tensor) -> list[tuple[str, ...]]:
    """The roles of a batch, with what attention's own mask hides as padding too.

    :param padding: as :func:`dobnb.capture.stream_attention` gives it, bool (B, N).
    """
    if padding.shape != (len(roles), len(roles[0])):
        raise TallyError(
            f"attention is of {padding.shape[0]} inputs of {padding.shape[1]} tokens, the roles are of {len(roles)} of "
            f"{len(roles[0])}; pass content=..., a mask over the tokens that attention has"
        )
    found = []
    for i, (row, hidden) in enumerate(zip(roles, padding.tolist(), strict=True)):
        for token, role in enumerate(row):
            if role == PADDING and not hidden[token]:
                raise PaddingError(
                    f"token {token} of input {i} is padding by the attention_mask, but the model attends to it, so it "
                    "does not heed that mask, or reads it another way; pass one that is 0 or false at padding alone"
                )
        found.append(tuple(PADDING if masked else role for role, masked in zip(row, hidden, strict=True)))
    return found


def _groups(roles: Sequence[tuple[str, ...]], device: torch.device, depth: bool) -> list[_Group]:
    """The inputs of a batch by their roles, in the order of the first of each."""
    members: dict[tuple[str, ...], list[int]] = {}
    for position, one in enumerate(roles):
        members.setdefault(tuple(one), []).append(position)
    groups = []
    for one, positions in members.items():
        kept = [k for k, role in enumerate(one) if role != PADDING]
        real = tuple(one[k] for k in kept)
        content = torch.tensor([role == CONTENT for role in real], device=device)
        index = None if len(kept) == len(one) else torch.tensor(kept, device=device)
        groups.append(_Group(positions, index, real, content, _Depth() if depth else None, []))
    return groups


def tally_block(
    model: nn.Module,
    batches: Iterable[tuple[ModelInputs, Sequence[tuple[str, ...]]]],
    start: int,
    *,
    heads: bool,
    depth: bool,
) -> Tallies:
    """Run `model` on the batches of a block, in order, and tally the attention of every layer as it comes.

    :param batches: inputs, and the role of every position of each, as :func:`dobnb.tokens.token_roles` gives them. What
        attention's own mask hides is padding, whatever its role.
    :param start: the number of the first input.
    :param heads: test every head too.
    :param depth: the bounds of each input's rollout too.
    :raises TallyError: attention has another shape than the roles.
    :raises CaptureError: the model's attention cannot be streamed.
    :raises MatrixError: it is not row-stochastic once padding is dropped, or fewer than two tokens are content.
    """
    parts: list[dict[str, np.ndarray]] = []
    average = _Average()
    for batch, roles in batches:
        first = start + sum(map(_length, parts))
        parts.append(_tally_batch(model, batch, roles, first, heads, depth, average))
    by_input = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    inputs = np.arange(start, start + _length(by_input))
    if average.totals is None:
        return Tallies(inputs, by_input, None, None)
    return Tallies(inputs, by_input, average.roles, on_grids(torch.stack(average.totals).numpy(force=True)))


def _length(by_input: dict[str, np.ndarray]) -> int:
    return len(by_input["tokens"])


def _first_refused(weights: Tensor, content: Tensor, heads: bool) -> tuple[int, MatrixError] | None:
    """Which input of several is refused, and why."""
    for position, one in enumerate(weights.split(1)):
        try:
            layer_tallies(one.contiguous(), content, heads)
        except MatrixError as error:
            return position, error
    return None


def _tally_batch(
    model: nn.Module,
    batch: ModelInputs,
    roles: Sequence[tuple[str, ...]],
    first: int,
    heads: bool,
    depth: bool,
    average: _Average,
) -> dict[str, np.ndarray]:
    """One forward pass: what :class:`Tallies` has by input. Adds the means over heads to `average`.

    :param first: the number of the batch's first input.
    """
    groups: list[_Group] = []

    def start(padding: Tensor) -> None:
        groups.extend(_groups(_without_padding(roles, padding), padding.device, depth))
        average.expect(groups)

    def sink(layer: int, weights: Tensor) -> None:
        for group in groups:
            part = weights if len(groups) == 1 else weights[group.members]
            if group.kept is not None:
                part = part.index_select(-2, group.kept).index_select(-1, group.kept)
            try:
                found, mean, reports = layer_tallies(part.contiguous(), group.content, heads)
            except MatrixError as error:
                position, why = _first_refused(part, group.content, heads) or (0, error)
                raise MatrixError(f"input {first + group.members[position]}, layer {layer + 1}: {why}") from None
            if group.depth is not None:
                found |= group.depth.layer(mean, reports["all"])
            group.layers.append({name: values.numpy(force=True) for name, values in found.items()})
            average.add(layer, mean)

    stream_attention(model, batch, sink, on_padding=start)
    order = np.argsort([member for group in groups for member in group.members])
    by_group = []
    for group in groups:
        n = len(group.members)
        sizes = {"tokens": np.full(n, len(group.roles)), "content_tokens": np.full(n, group.roles.count(CONTENT))}
        layers = {name: np.stack([layer[name] for layer in group.layers], 1) for name in group.layers[0]}
        by_group.append(layers | sizes)
    return {name: np.concatenate([part[name] for part in by_group])[order] for name in by_group[0]}
