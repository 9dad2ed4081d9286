"""How often a model's attention satisfies the equality condition, layer by layer.

Three tests, as in the paper (book: ch-dinov2). *Per input*: the mean over heads of one input's attention, on content
tokens and on all tokens. *Heads*: every head of every input, on content tokens. *Averaged*: the mean over heads and
inputs, one matrix a layer. Restriction comes last, and renormalises the rows. Beside them, the bounds on kappa of each
input's rollout (book: ch-depth).

Inputs are measured in blocks, which the settings fix, each in batches from its own start. So a part of the inputs,
measured anywhere, adds to the others without changing a bit; :mod:`dobnb.runs` spreads and resumes whole runs.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from dobnb import models, provenance
from dobnb.dobrushin import ATTAINS, doeblin_bound, leave_one_out
from dobnb.equality import NEAR_TIE, check_equality
from dobnb.errors import DobnbError, one_line
from dobnb.files import write_record
from dobnb.inputs import Inputs
from dobnb.stochastic import restrict
from dobnb.tallies import MOST_BLOCKS, MOST_INPUTS, Tallies, tally_block
from dobnb.tokens import (
    CONTENT,
    PADDING,
    ModelInputs,
    arguments_of,
    lacks_special_tokens,
    name_special_tokens,
    token_names,
    token_roles,
)
from dobnb.wording import failing_layers, percent, score

SCHEMA = 2
"""Of the JSON file; the book's page on it says what each field is."""
QUANTILES = {"q05": 0.05, "median": 0.5, "q95": 0.95}
SPECIAL = "special"
"""The role of a token that is not content where a mask says so and not the model."""
_ABOUT = ("model", "inputs", "settings", "versions")

Content = Tensor | Callable[[ModelInputs], Tensor] | None
Progress = Callable[[int, int], None]


class MeasurementError(DobnbError):
    """A measurement cannot be made, read or combined as asked."""


# What is kept -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """Numbers by layer: unless stated, every list has one entry a layer, the first layer first. It is what the JSON
    file holds. ``a + b`` is the measurement of the inputs of both, to the last bit as if made at once."""

    provenance: dict[str, Any]
    """Model and its weights, inputs and their digest, settings, versions, machines, commit, start, seconds."""
    layers: int
    """Layers measured, L."""
    n: list[int]
    """Inputs measured."""
    per_input: dict[str, list | dict[str, list]]
    """``content`` and ``all``: inputs that satisfy the condition. For each of the two, ``_kappa`` and ``_margin``:
    quantiles over inputs; ``_failing``: the numbers of the inputs that do not, ``_failing_gaps``: their relative gaps,
    one list a layer; ``_near_ties``: margins below :data:`dobnb.equality.NEAR_TIE`."""
    heads: dict[str, list]
    """``content``: heads times inputs that satisfy the condition, of ``tested``; ``failing``: those that do not, as
    input times heads plus head, one list a layer; ``near_ties``. Empty if heads were not measured."""
    averaged: dict[str, Any]
    """``content`` and ``all``: the verdict. ``kappa``, ``doeblin`` and ``margin``: of the matrix on content tokens;
    with ``all_`` before the name, on all tokens. ``roles``: of the N tokens. On all tokens, one list a layer:
    ``scored``, the tokens with a positive leave-one-out score, ``scores``, and ``carriers``, those of the highest
    score, several where they tie. Where inputs differ in their tokens there is no average, and ``left_out`` says so."""
    depth: dict[str, dict[str, list[float]]]
    """``bound``, ``product`` and ``truth`` as in :class:`dobnb.depth.DepthBounds`, on all tokens: quantiles over
    inputs, for the layers up to each. Empty if depth was not measured."""
    near_ties: list[int]
    """Verdicts of the layer, of all kinds, whose margin is below :data:`dobnb.equality.NEAR_TIE`."""
    tallies: Tallies | None = field(default=None, compare=False, repr=False)
    """What the numbers were made of; None in a measurement that was read from a file."""

    def __add__(self, other: Measurement) -> Measurement:
        """The measurement of the inputs of both.

        :raises MeasurementError: one was read from a file, or they differ in model, inputs, settings or versions.
        :raises TallyError: an input is in both.
        """
        if not isinstance(other, Measurement):
            return NotImplemented
        if self.tallies is None or other.tallies is None:
            raise MeasurementError(
                "a measurement read from a file has no tallies to add; run shards with --out, and `dobnb merge` them"
            )
        about = about_of(self.provenance)
        if different := differences(about, about_of(other.provenance)):
            raise MeasurementError(f"measurements do not add: {different}; measure both alike")
        started = min(self.provenance["started"], other.provenance["started"])
        return measurement_of(about, self.tallies + other.tallies, started)

    def __radd__(self, other: Any) -> Measurement:
        return self if other == 0 else NotImplemented  # so that sum() of several works

    def carrier_roles(self) -> list[tuple[str, ...]]:
        """The roles of each layer's carriers, each role once: several where tokens of different roles tie, so that no
        role carries the layer; none where no token has a positive leave-one-out score.

        :raises MeasurementError: there are no averaged matrices.
        """
        if "carriers" not in self.averaged:
            raise MeasurementError(f"there are no carriers: {self.averaged['left_out']}")
        roles = self.averaged["roles"]
        return [tuple(dict.fromkeys(roles[token] for token in tokens)) for tokens in self.averaged["carriers"]]

    def median_gap(self, kind: str = "content", least: int = 20) -> float | None:
        """The median relative gap of the input-layer pairs that fail, all layers together (paper, Figure 4).

        :param kind: the tokens, ``content`` or ``all``.
        :param least: fewer failures than that give no median; the paper takes 20.
        :return: a share of kappa/2; None where fewer than `least` pairs fail.
        """
        gaps = [gap for layer in self.per_input[f"{kind}_failing_gaps"] for gap in layer]
        return float(np.median(gaps)) if len(gaps) >= least else None

    def save(self, path: str | Path) -> None:
        """Write the measurement as JSON, readable without this package; the file is whole or absent."""
        data = {name: getattr(self, name) for name in _saved()}
        write_record(path, {"schema": SCHEMA, **data})

    @classmethod
    def load(cls, path: str | Path) -> Measurement:
        """Read what :meth:`save` wrote, or what a run left in its folder.

        :param path: the JSON file, or a folder with a ``result.json`` in it.
        :raises MeasurementError: no such file, not JSON, another schema, a field that is missing or unknown, or
            lists that do not have one entry a layer.
        """
        path = Path(path)
        path = path / "result.json" if path.is_dir() else path
        try:
            data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refused)
        except FileNotFoundError:
            raise MeasurementError(f"{path} does not exist; `dobnb measure` writes one") from None
        except (OSError, ValueError, RecursionError) as error:
            raise MeasurementError(f"{path.name} is not a readable JSON file: {error}") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise MeasurementError(f"{path.name} is not a measurement of schema {SCHEMA}; measure again to write one")
        names = set(_saved())
        if names != set(data) - {"schema"}:
            wrong = ", ".join(sorted(names ^ (set(data) - {"schema"})))
            raise MeasurementError(f"{path.name} has missing or unknown fields: {wrong}; measure again to write them")
        if not _is_whole(data):
            raise MeasurementError(f"{path.name} is damaged: its lists do not have one entry a layer; measure again")
        return cls(**{name: data[name] for name in names})


def _refused(constant: str) -> float:
    raise ValueError(f"it holds {constant}, which no measurement has")


def _saved() -> list[str]:
    """The fields that the file has."""
    return [one.name for one in fields(Measurement) if one.name != "tallies"]


def _is_whole(data: dict[str, Any]) -> bool:
    """Whether a file's fields have the kinds and lengths that :class:`Measurement` documents."""
    layers = data["layers"]
    if not isinstance(layers, int) or layers < 1:
        return False

    def by_layer(values: Any, kind: type) -> bool:
        return isinstance(values, list) and len(values) == layers and all(isinstance(value, kind) for value in values)

    def lists(part: dict[str, Any], names: Sequence[str]) -> bool:
        return all(by_layer(part.get(name), list) for name in names)

    names = ("per_input", "heads", "averaged", "depth", "provenance")
    per_input, heads, averaged, depth, born = parts = [data[name] for name in names]
    if not all(isinstance(part, dict) for part in parts):
        return False
    named = [born.get("model"), born.get("inputs")]
    if not all(isinstance(part, dict) and isinstance(part.get("name"), str) for part in named):
        return False
    counts = [data["n"], data["near_ties"]]
    for kind in ("content", "all"):
        counts += [per_input.get(kind), per_input.get(f"{kind}_near_ties")]
        if not lists(per_input, (f"{kind}_failing", f"{kind}_failing_gaps")):
            return False
    if heads:
        counts += [heads.get("content"), heads.get("tested"), heads.get("near_ties")]
        if not lists(heads, ("failing",)) or not by_layer(heads["tested"], int) or min(heads["tested"]) < 1:
            return False
    summaries = [per_input.get(f"{kind}_{what}") for kind in ("content", "all") for what in ("kappa", "margin")]
    summaries += [depth.get(what) for what in ("bound", "product", "truth")] if depth else []
    quantiles = [values.get(q) for values in summaries if isinstance(values, dict) for q in QUANTILES]
    whole = "left_out" in averaged or (
        all(by_layer(averaged.get(kind), bool) for kind in ("content", "all"))
        and lists(averaged, ("scored", "scores", "carriers"))
    )
    return (
        whole
        and all(by_layer(count, int) for count in counts)
        and min(data["n"]) > 0
        and len(quantiles) == len(summaries) * len(QUANTILES)
        and all(by_layer(values, float) for values in quantiles)
    )


# Making one ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Everything that decides the numbers of a run. It can be sent to another process."""

    model: nn.Module
    inputs: Inputs
    content: Content
    device: str
    about: dict[str, Any]
    """The sections ``model``, ``inputs``, ``settings`` and ``versions`` of the provenance. Equal ones, equal runs."""

    @property
    def blocks(self) -> int:
        """How many blocks the inputs make."""
        return -(-len(self.inputs) // self.about["settings"]["block_size"])

    def span(self, block: int) -> tuple[int, int]:
        """The first input of a block, and the one after its last."""
        size = self.about["settings"]["block_size"]
        return block * size, min((block + 1) * size, len(self.inputs))

    def measure(self, block: int, progress: Callable[[int], None] | None = None) -> Tallies:
        """Measure one block, in batches from its start: the same whatever was measured before, and where.

        :param progress: called as ``progress(inputs)`` after every batch.
        """
        settings = self.about["settings"]
        first, last = self.span(block)

        def batches() -> Iterator[tuple[ModelInputs, Sequence[tuple[str, ...]]]]:
            for start in range(first, last, settings["batch_size"]):
                stop = min(start + settings["batch_size"], last)
                batch = _to(_as_taken(self.model, self.inputs.batch(start, stop)), self.device)
                yield batch, self._roles(batch, stop - start)
                if progress is not None:
                    progress(stop - start)

        clock = time.monotonic()
        with _measuring, _full_precision():
            model = self.model.to(self.device)
            found = tally_block(model, batches(), first, heads=settings["heads"], depth=settings["depth"])
        origin = json.dumps(provenance.origin(self.device), sort_keys=True)
        return replace(found, seconds=time.monotonic() - clock, origins=frozenset([origin]))

    def _roles(self, batch: ModelInputs, n: int) -> Sequence[tuple[str, ...]]:
        """The role of every position of the `n` inputs of a batch."""
        if self.content is None:
            return token_roles(self.model, batch)
        mask = self.content(batch) if callable(self.content) else self.content.expand(n, -1)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 2 or len(mask) != n:
            given = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise MeasurementError(f"content gave {given}; return a bool tensor of shape ({n}, N) for {n} inputs")
        real = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        real = real.bool() if isinstance(real, Tensor) and real.shape == mask.shape else torch.ones_like(mask)
        return [
            tuple((CONTENT if one else SPECIAL) if keep else PADDING for one, keep in zip(row, kept, strict=True))
            for row, kept in zip(mask.tolist(), real.tolist(), strict=True)
        ]


_measuring = threading.RLock()  # one block at a time in a process: precision and the model's device belong to all


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products of float32 matrices in float32: no TF32 on a GPU, where cuDNN has it on, and no bfloat16 on a CPU."""
    backends = torch.backends
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def _as_taken(model: nn.Module, batch: ModelInputs) -> ModelInputs:
    """A batch as the model takes it: images go in as the first argument where it does not know them by their name.

    :raises MeasurementError: it does not take these inputs.
    """
    if not isinstance(batch, Mapping):
        return batch
    try:
        arguments_of(model.forward, **batch)
    except TypeError:
        if [*batch] != ["pixel_values"]:
            takes = ", ".join(inspect.signature(model.forward).parameters)
            raise MeasurementError(
                f"{type(model).__name__} does not take the inputs {', '.join(batch)}: its arguments are {takes}; pass "
                "inputs by these names, with from_tensors"
            ) from None
        return batch["pixel_values"]
    return batch


def _to(batch: ModelInputs, device: str) -> ModelInputs:
    if isinstance(batch, Mapping):
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    return batch.to(device) if isinstance(batch, Tensor) else tuple(_to(part, device) for part in batch)


def prepare(
    model: str | nn.Module,
    inputs: Inputs,
    *,
    content: Content = None,
    heads: bool = True,
    depth: bool = True,
    batch_size: int = 16,
    block_size: int = 32,
    device: str = "cpu",
    revision: str | None = None,
    untrained: int | None = None,
    load_on: str | None = None,
) -> Job:
    """Load the model and fix all that decides the numbers. Parameters and errors as for :func:`measure`.

    :param load_on: device that the model waits on, where that is not `device`: the machine that prepares need not have
        the one that measures.
    """
    if not hasattr(inputs, "batch") or not hasattr(inputs, "__len__"):
        raise MeasurementError(
            f"inputs is {'None' if inputs is None else f'a {type(inputs).__name__}'}; pass what dobnb.inputs makes, "
            "such as read_inputs(...), or from_tensors(data, name) for tensors of your own"
        )
    if len(inputs) == 0:
        raise MeasurementError("there are no inputs; pass at least one")
    if batch_size < 1:
        raise MeasurementError(f"batch_size is {batch_size}; it must be at least 1")
    if block_size < 1:
        raise MeasurementError(f"block_size is {block_size}; it must be at least 1")
    if batch_size > block_size:
        raise MeasurementError(
            f"batch_size is {batch_size}, but batches are cut out of blocks of {block_size} inputs; "
            "pass a smaller batch_size or a larger block_size"
        )
    if len(inputs) > MOST_INPUTS or len(inputs) > MOST_BLOCKS * block_size:
        most = min(MOST_INPUTS, MOST_BLOCKS * block_size)
        raise MeasurementError(
            f"{len(inputs)} inputs in blocks of {block_size} are more than the {most} that add without rounding; "
            "pass a larger block_size or fewer inputs"
        )
    if isinstance(model, str):
        name = models.record_name(model)
        title = models.MODELS[model].title if model in models.MODELS else name
        if untrained is None:
            module = models.load_model(model, device=load_on or device, revision=revision)
            named = {"name": name, "title": title} | models.weights_identity(model, module)
        else:
            module = models.load_untrained(model, untrained, device=load_on or device, revision=revision)
            drawn = f", untrained, seed {untrained}"
            named = {"name": name + drawn, "title": title + drawn, "seed": untrained, "sha256": _state_digest(module)}
        if content is None and lacks_special_tokens(module):
            name_special_tokens(module, *models.special_ids(model, revision))
    elif not isinstance(model, nn.Module):
        raise MeasurementError(f"model is a {type(model).__name__}; pass a torch module, or the name of a model")
    elif untrained is not None:
        raise MeasurementError("untrained draws weights for a name; a module is measured with the weights that it has")
    else:
        module = model
        named = {"name": type(model).__name__, "title": type(model).__name__, "sha256": _state_digest(module)}
    given = None
    if isinstance(content, Tensor):
        if content.dtype != torch.bool or content.ndim != 1:
            given = f"{content.dtype} of shape {tuple(content.shape)}"
    elif content is not None and not callable(content):
        given = f"a {type(content).__name__}"
    if given:
        raise MeasurementError(f"content is {given}; pass a bool mask of shape (N,), or a function of the batch")
    left_out = [list(one) for one in getattr(inputs, "left_out", ())]
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    about = {
        "model": named,
        "inputs": {"name": inputs.name, "digest": inputs.digest, "n": len(inputs),
                   "left_out": {"count": len(left_out), "files": left_out}},
        "settings": {
            "alpha": 0.5,
            "content": _content_name(content),
            "heads": heads,
            "depth": depth,
            "batch_size": batch_size,
            "block_size": block_size,
            "device": device,
            "dtype": str(dtype).removeprefix("torch."),
        },
        "versions": provenance.versions(),
    }  # fmt: skip
    return Job(module, inputs, content, device, about)


def _state_digest(module: nn.Module) -> str:
    """sha256 of a module's weights and buffers, by name, type, shape and value."""
    total = hashlib.sha256()
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            total.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def _content_name(content: Content) -> str:
    """What a record says of how content tokens are told."""
    if content is None:
        return "by role"
    if isinstance(content, Tensor):
        return f"mask {provenance.digest(content.cpu().numpy().tobytes())[:16]}"
    return f"function {getattr(content, '__qualname__', type(content).__name__)}"


def shard_blocks(blocks: int, shard: tuple[int, int]) -> range:
    """The blocks of part k of m, every m-th of them.

    :param shard: (k, m), k from 1 to m.
    :raises MeasurementError: k is not in 1 ... m, or the part has no block.

    >>> list(shard_blocks(5, (1, 2)))
    [0, 2, 4]
    """
    k, m = shard
    if not 1 <= k <= m:
        raise MeasurementError(f"shard {k}/{m} does not exist; pass k/m with k from 1 to m")
    if k > blocks:
        raise MeasurementError(f"shard {k}/{m} is empty: there are {blocks} blocks of inputs; use at most {blocks}")
    return range(k - 1, blocks, m)


def measure(
    model: str | nn.Module,
    inputs: Inputs,
    *,
    content: Content = None,
    heads: bool = True,
    depth: bool = True,
    batch_size: int = 16,
    block_size: int = 32,
    shard: tuple[int, int] = (1, 1),
    device: str = "cpu",
    revision: str | None = None,
    untrained: int | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """How often the equality condition (book: thm-equality) holds in a model's attention, as in the paper's Table 1.

    :param model: a name, see :func:`dobnb.models.load_model`; or a module that :func:`dobnb.capture.stream_attention`
        takes, which is moved to `device` and stays there.
    :param inputs: see :mod:`dobnb.inputs`.
    :param content: which tokens are content, where :func:`dobnb.tokens.token_roles` cannot tell or shall not: a bool
        mask, shape (N,), or a function of a batch of B inputs that returns one of shape (B, N). Padding never is: it
        is what the mask that reaches attention lets no token see, whatever the model calls that mask.
    :param heads: measure every head too.
    :param depth: measure the bounds on each input's rollout too, a float64 product of matrices a layer.
    :param batch_size: inputs a forward pass; it changes no verdict but near-ties.
    :param block_size: inputs a block; the inputs are measured and summed block by block.
    :param shard: (k, m): part k of m of the blocks alone. The parts' measurements add up to the whole.
    :param device: a torch device.
    :param revision: of a named hub model's weights.
    :param untrained: seed of a draw of random weights, see :func:`dobnb.models.load_untrained`, in place of the trained
        ones of a name.
    :param progress: called as ``progress(done, n)`` after every batch, n the inputs of this part.
    :raises MeasurementError: no inputs, inputs that the model does not take, or an argument out of range.
    :raises ModelError: a name that is not known, or weights that cannot be had.
    :raises CaptureError: the model's attention cannot be streamed.
    :raises TokenError: roles that cannot be told; pass `content`.
    :raises MatrixError: the model's attention is not row-stochastic, or an input has fewer than two content tokens.
    """
    started = provenance.now()
    job = prepare(
        model, inputs, content=content, heads=heads, depth=depth, batch_size=batch_size, block_size=block_size,
        device=device, revision=revision, untrained=untrained,
    )  # fmt: skip
    numbers = shard_blocks(job.blocks, shard)
    counted = counter(job, numbers, progress)
    found = job.measure(numbers[0], counted)
    for number in numbers[1:]:
        found += job.measure(number, counted)
    return measurement_of(job.about, found, started)


def counter(
    job: Job, numbers: Sequence[int], progress: Progress | None, done: int = 0
) -> Callable[[int], None] | None:
    """What :meth:`Job.measure` calls with the inputs of a batch, so that `progress` hears of all of `numbers`."""
    if progress is None:
        return None
    n = sum(last - first for first, last in map(job.span, numbers))

    def count(inputs: int) -> None:
        nonlocal done
        done += inputs
        progress(done, n)

    return count


# The numbers --------------------------------------------------------------------------------------------------------


def about_of(born: Mapping[str, Any]) -> dict[str, Any]:
    """Of a provenance, the sections that two parts of one run share."""
    about = {name: born[name] for name in _ABOUT}
    return about | {"model": {name: value for name, value in born["model"].items() if name not in _SIZES}}


_SIZES = ("layers", "heads", "tokens", "content_tokens")


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Where two such sections differ, in words; empty if nowhere."""
    found = []
    for section in _ABOUT:
        a, b = ours.get(section, {}), theirs.get(section, {})
        for name in sorted({*a, *b}):
            if a.get(name) != b.get(name):
                found.append(f"{section}.{name} is {a.get(name)!r} here and {b.get(name)!r} there")
    return "; ".join(found)


def measurement_of(about: Mapping[str, Any], found: Tallies, started: str) -> Measurement:
    """The numbers of a run, out of its tallies."""
    layers, n = found.layers, len(found.inputs)
    origins = [json.loads(one) for one in sorted(found.origins)]
    commits = sorted({one.pop("commit") or "" for one in origins} - {""})
    of = found.by_input
    heads: dict[str, list] = {}
    per_head = of["heads_holds"].shape[2] if "heads_holds" in of else None
    if per_head is not None:
        flat = {name: of[name].transpose(1, 0, 2).reshape(layers, -1) for name in ("heads_holds", "heads_near")}
        numbers = (found.inputs[:, None] * per_head + np.arange(per_head)).ravel()
        heads = {
            "content": flat["heads_holds"].sum(1).tolist(),
            "tested": [n * per_head] * layers,
            "near_ties": flat["heads_near"].sum(1).tolist(),
            "failing": [numbers[~holds].tolist() for holds in flat["heads_holds"]],
        }
    averaged, averaged_ties = _averaged(found)
    per_input = _per_input(found, "content") | _per_input(found, "all")
    parts = [per_input["content_near_ties"], per_input["all_near_ties"], averaged_ties]
    parts += [heads["near_ties"]] if heads else []
    depth = {}
    if "depth_truth" in of:
        depth = {name: _quantiles(of[f"depth_{name}"]) for name in ("bound", "product", "truth")}
    sizes = {
        "layers": layers,
        **({} if per_head is None else {"heads": per_head}),
        "tokens": _size(of["tokens"]),
        "content_tokens": _size(of["content_tokens"]),
    }
    return Measurement(
        provenance={
            **about,
            "model": about["model"] | sizes,
            "machines": origins,
            "commit": ", ".join(commits) or None,
            "started": started,
            "seconds": round(found.seconds, 1),
        },
        layers=layers,
        n=[n] * layers,
        per_input=per_input,
        heads=heads,
        averaged=averaged,
        depth=depth,
        near_ties=np.sum(parts, 0).tolist(),
        tallies=found,
    )


def _size(values: np.ndarray) -> int | list[int]:
    """The number of tokens of every input; the least and the largest where inputs differ."""
    least, most = int(values.min()), int(values.max())
    return least if least == most else [least, most]


def _quantiles(values: np.ndarray) -> dict[str, list[float]]:
    """Quantiles over inputs of values of shape (n, L)."""
    return {name: np.quantile(values, q, axis=0).tolist() for name, q in QUANTILES.items()}


def _per_input(found: Tallies, kind: str) -> dict[str, Any]:
    """What is kept of the per-input reports on content or on all tokens."""
    holds, kappa, margin, gap = (found.by_input[f"{kind}_{what}"] for what in ("holds", "kappa", "margin", "gap"))
    return {
        kind: holds.sum(0).tolist(),
        f"{kind}_kappa": _quantiles(kappa),
        f"{kind}_margin": _quantiles(margin),
        f"{kind}_near_ties": (margin < NEAR_TIE).sum(0).tolist(),
        f"{kind}_failing": [found.inputs[~column].tolist() for column in holds.T],
        f"{kind}_failing_gaps": [of[~column].tolist() for column, of in zip(holds.T, gap.T, strict=True)],
    }


def _averaged(found: Tallies) -> tuple[dict[str, Any], list[int]]:
    """What is found of the averaged matrices, and how many of each layer's two verdicts are near ties."""
    matrices = found.averaged()
    if matrices is None or found.roles is None:
        least, most = int(found.by_input["tokens"].min()), int(found.by_input["tokens"].max())
        what = f"have {least} to {most} tokens" if least < most else "differ in which tokens are special"
        return {"left_out": f"inputs {what}; an average needs the same tokens in all of them"}, [0] * found.layers
    A = torch.from_numpy(matrices)
    content = torch.tensor([role == CONTENT for role in found.roles])
    subchain = restrict(A, content)
    on_content, on_all = check_equality(subchain), check_equality(A)
    scores = leave_one_out(A)
    # Both members of a single maximising pair score, often the same: all of the highest score carry the layer.
    top = (scores >= scores.amax(-1, keepdim=True) - ATTAINS) & (scores > 0)
    values = {
        "content": on_content.holds,
        "all": on_all.holds,
        "kappa": on_content.kappa,
        "doeblin": doeblin_bound(subchain),
        "margin": on_content.margin,
        "all_kappa": on_all.kappa,
        "all_doeblin": doeblin_bound(A),
        "all_margin": on_all.margin,
    }
    near = (on_content.margin < NEAR_TIE).int() + (on_all.margin < NEAR_TIE).int()
    return {name: value.tolist() for name, value in values.items()} | {
        "scored": [row.nonzero().flatten().tolist() for row in scores],
        "scores": [row[row > 0].tolist() for row in scores],
        "carriers": [row.nonzero().flatten().tolist() for row in top],
        "roles": list(found.roles),
    }, near.tolist()


# Tables -------------------------------------------------------------------------------------------------------------


def _named(found: Measurement) -> dict[str, Any]:
    """The first columns of a row of a table."""
    born = found.provenance
    return {"system": one_line(born["model"]["name"]), "inputs": one_line(born["inputs"]["name"]), "n": found.n[0]}


def table(measurements: Sequence[Measurement]) -> pd.DataFrame:
    """The paper's Table 1 for our measurements: one row a system, printable text.

    Per input: input-layer pairs that satisfy the condition. Heads: of all heads. Averaged: layers that satisfy it.
    """
    rows = []
    for found in measurements:
        pairs, heads = sum(found.n), found.heads
        held = sum(found.per_input["content"])
        exact = found.averaged.get("content")
        rows.append({
            **_named(found),
            "per input, content": f"{held}/{pairs} ({percent(held, pairs)})",
            "per input, all tokens": percent(sum(found.per_input["all"]), pairs),
            "heads, content": percent(sum(heads["content"]), sum(heads["tested"])) if heads else "not measured",
            "averaged, exact layers": f"{sum(exact)}/{found.layers}" if exact else "no average",
        })
    return pd.DataFrame(rows).set_index(["system", "inputs"])


def failures(measurements: Sequence[Measurement]) -> pd.DataFrame:
    """The paper's Table 4 for our measurements: how many inputs fail, by layer, one row a system, printable text."""
    rows = []
    for found in measurements:
        row = _named(found)
        for column, kind in (("content", "content"), ("all tokens", "all")):
            counts = zip(found.per_input[kind], found.n, strict=True)
            row[column] = failing_layers({layer: n - held for layer, (held, n) in enumerate(counts, 1)})
        rows.append(row)
    return pd.DataFrame(rows).set_index(["system", "inputs"])


def carriers(measurements: Sequence[Measurement]) -> pd.DataFrame:
    """The paper's Table 2 for our measurements: who carries kappa, one row a system, printable text.

    Averaged matrices on all tokens. A layer is a special or a content carrier's only if all its carriers are of that
    kind; what is neither is undecided. *Tied* layers have several carriers, of whatever kind.
    """
    return pd.DataFrame([{**_named(found), **_carried(found)} for found in measurements]).set_index(
        ["system", "inputs"]
    )


def _carried(found: Measurement) -> dict[str, str]:
    """A row of Table 2, but for its first columns."""
    if "carriers" not in found.averaged:
        return {"layers": str(found.layers), "special carrier": "no average"}
    kinds = [{role == CONTENT for role in roles} for roles in found.carrier_roles()]
    special, content = ([layer for layer, kind in enumerate(kinds) if kind == {one}] for one in (False, True))
    highest = [max(scores, default=0.0) for scores in found.averaged["scores"]]
    names = token_names(found.averaged["roles"])
    counted = Counter(names[token] for layer in special for token in found.averaged["carriers"][layer])
    most = max(counted.values(), default=0)
    return {
        "layers": str(found.layers),
        "special carrier": str(len(special)),
        "content carrier": str(len(content)),
        "undecided": str(found.layers - len(special) - len(content)),
        "tied": str(sum(len(tokens) > 1 for tokens in found.averaged["carriers"])),
        "max score": score(max(highest)),
        "median score, content carrier": score(float(np.median([highest[k] for k in content]))) if content else "-",
        "modal special carrier": ", ".join(
            f"{name} ({most}/{len(special)})" for name, count in counted.items() if count == most
        ) or "none",
    }  # fmt: skip


def by_size(measurements: Sequence[Measurement]) -> pd.DataFrame:
    """One model at several input sizes, the numbers of the paper's Figure 4, printable text: one row a measurement.

    Columns: content tokens; inputs; then, on content and on all tokens, the input-layer pairs that fail and the median
    relative gap among them where at least 20 do; then kappa and margin on content tokens, medians over inputs: the
    least and the greatest of any layer.
    """
    rows = []
    for found in measurements:
        row = {"content tokens": found.provenance["model"]["content_tokens"], "n": found.n[0]}
        for name, kind in (("content", "content"), ("all tokens", "all")):
            held, gap = sum(found.per_input[kind]), found.median_gap(kind)
            row[f"{name}, hold"] = percent(held, sum(found.n))
            row[f"{name}, fail"] = sum(found.n) - held
            row[f"{name}, median gap"] = f"{100 * gap:.1f}%" if gap is not None else "-"
        for name, form in (("kappa", ".2f"), ("margin", ".0e")):
            medians = found.per_input[f"content_{name}"]["median"]
            row[name] = f"{min(medians):{form}} to {max(medians):{form}}"
        rows.append(row)
    return pd.DataFrame(rows).set_index("content tokens")


def by_layer(found: Measurement) -> pd.DataFrame:
    """The counts of every layer with the median kappa and margin beside them, rounded for reading.

    Columns: inputs that hold on content and on all tokens, heads that hold, the averaged verdict, and the medians over
    inputs on content tokens.
    """
    columns = {"content": found.per_input["content"], "all tokens": found.per_input["all"]}
    if found.heads:
        counts = zip(found.heads["content"], found.heads["tested"], strict=True)
        columns["heads"] = [f"{held}/{tested}" for held, tested in counts]
    if "content" in found.averaged:
        columns["averaged"] = ["exact" if verdict else "fails" for verdict in found.averaged["content"]]
    columns |= {
        "median kappa": [f"{value:.3f}" for value in found.per_input["content_kappa"]["median"]],
        "median margin": [f"{value:.0e}" for value in found.per_input["content_margin"]["median"]],
        "near ties": found.near_ties,
    }
    return pd.DataFrame(columns, index=pd.RangeIndex(1, found.layers + 1, name="layer"))


def flips(a: Measurement, b: Measurement) -> pd.DataFrame:
    """Verdicts that differ between two measurements of the same inputs, on a GPU and a CPU for instance, by layer.

    :return: counts: ``content`` and ``all tokens`` of inputs, ``heads`` of heads times inputs where both have them,
        ``averaged`` of the averaged matrix's two verdicts, and the ``near ties`` of either.
    :raises MeasurementError: they are not of the same inputs, or not of as many layers.
    """
    ours, theirs = (one.provenance["inputs"] for one in (a, b))
    if (ours["digest"], ours["n"]) != (theirs["digest"], theirs["n"]):
        names = [f"{one['name']} (n = {one['n']}, {one['digest'][:8]})" for one in (ours, theirs)]
        raise MeasurementError(f"the inputs differ: {' and '.join(names)}; compare runs on the same inputs")
    if (a.n, a.layers) != (b.n, b.layers):
        raise MeasurementError(f"one has {a.n[0]} inputs and {a.layers} layers, the other {b.n[0]} and {b.layers}")

    def differ(ours: list[list[int]], theirs: list[list[int]]) -> list[int]:
        return [len(set(x) ^ set(y)) for x, y in zip(ours, theirs, strict=True)]

    columns = {
        name: differ(a.per_input[f"{kind}_failing"], b.per_input[f"{kind}_failing"])
        for name, kind in (("content", "content"), ("all tokens", "all"))
    }
    if a.heads and b.heads and a.heads["tested"] == b.heads["tested"]:
        columns["heads"] = differ(a.heads["failing"], b.heads["failing"])
    if "content" in a.averaged and "content" in b.averaged:
        pairs = [zip(a.averaged[kind], b.averaged[kind], strict=True) for kind in ("content", "all")]
        columns["averaged"] = [sum(x != y for x, y in layer) for layer in zip(*pairs, strict=True)]
    ties = zip(a.near_ties, b.near_ties, strict=True)
    columns["near ties"] = [f"{x}, {y}" for x, y in ties]
    return pd.DataFrame(columns, index=pd.RangeIndex(1, a.layers + 1, name="layer"))
