"""Attention streamed out of a running transformers model, one layer at a time.

transformers looks its attention function up by name at every call. We register a name, switch the model to it for one
forward pass, and let the function behind it call the *eager* attention of the model's own source file, which returns
the weights that fused kernels never form. So the numbers are the model's own, and no hook is left behind.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import eager_mask

from dobnb.errors import DobnbError
from dobnb.stochastic import TOLERANCE

Sink = Callable[[int, Tensor], None]
"""Called as ``sink(layer, weights)``: layers count from 0, weights have shape (B, H, N, N)."""

_NAME = "dobnb"


class CaptureError(DobnbError):
    """A model's attention cannot be streamed, or what it gave is not an attention matrix a token."""


class _Run:
    """One call of :func:`stream_attention`: where the weights go, and how many layers have come."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.layers = 0


# Which run the current thread is in. A model that another thread runs meanwhile is not captured by ours.
_current: ContextVar[_Run | None] = ContextVar("dobnb_capture", default=None)
# The name is set on the model's config, which threads may share, so their runs take turns; nested runs do not wait.
_switching = threading.RLock()


def stream_attention(model: PreTrainedModel, inputs: Mapping[str, Any], sink: Sink) -> Any:
    """Run ``model(**inputs)`` without gradients and hand every layer's attention to `sink` as soon as it exists.

    One layer's weights are alive at a time, unless `sink` keeps them. The weights are those before dropout, in the
    model's dtype, on its device; `sink` may change them in place. The model leaves as it came, on errors too. Calls may
    be nested; those of different threads take turns.

    :param model: a transformers model in eval mode, float32 or float64, whose layers all attend to one sequence.
    :param inputs: keyword arguments for the model, such as :meth:`dobnb.inputs.Inputs.batch` gives.
    :param sink: called as ``sink(layer, weights)``, layer 0 first; weights of shape (B, H, N, N), rows sum to 1.
    :return: the model's output, as ``model(**inputs)`` returns it.
    :raises CaptureError: not a transformers model with exchangeable attention; compiled, in training mode, or asked to
        keep its attentions; a layer whose attention is in half precision, not square, not finite or does not sum to 1;
        fewer or more layers than ``config.num_hidden_layers``.
    """
    _check_model(model, inputs)
    layers = model.config.num_hidden_layers
    run = _Run(sink)
    with _switching:
        before = [(config, config._attn_implementation) for config in _configs(model)]
        token = _current.set(run)
        try:
            model.set_attn_implementation(_NAME)
            with torch.no_grad():
                output = model(**inputs)
        finally:
            _current.reset(token)
            for config, implementation in before:  # outer configs first: setting one sets those inside it
                config._attn_implementation = implementation
    if run.layers != layers:
        raise CaptureError(
            f"{type(model).__name__} has {layers} layers, but {run.layers} gave attention; "
            "it does not use the exchangeable attention of transformers throughout, or it also attends across sequences"
        )
    return output


def _check_model(model: Any, inputs: Mapping[str, Any]) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise CaptureError(f"{name} is not a transformers model (a compiled one counts as none); pass the model itself")
    if model._compiled_call_impl is not None:
        raise CaptureError(f"{name} is compiled, and compiled code calls no sink; pass a model that is not compiled")
    if not isinstance(getattr(model.config, "num_hidden_layers", None), int):
        raise CaptureError(
            f"{name} does not say how many layers it has; pass the encoder alone, for instance its vision_model"
        )
    if any(module.training for module in model.modules()):
        raise CaptureError(f"{name} is in training mode, where dropout changes attention; call model.eval() first")
    if inputs.get("output_attentions") or model.config.output_attentions:
        raise CaptureError(
            "output_attentions would keep every layer's attention; leave it off, the sink receives them all"
        )


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every config that `model` or a module in it reads its attention implementation from, outer ones first."""
    found: list[PreTrainedConfig] = []
    waiting = [
        module.config for module in model.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    while waiting:
        config = waiting.pop(0)
        if not any(config is other for other in found):
            found.append(config)
            inner = (getattr(config, key, None) for key in config.sub_configs)
            waiting.extend(sub for sub in inner if sub is not None)
    return found


def _eager_of(module: torch.nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """The eager attention function of the file that `module`'s class, or a class it derives from, is written in."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise CaptureError(
        f"{type(module).__name__} comes without an eager attention function, so its weights are out of reach"
    )


def _attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """What the registered name stands for: eager attention, whose weights go to the sink of the current run."""
    output, weights = _eager_of(module)(module, *args, **kwargs)
    run = _current.get()
    if run is None:
        return output, weights
    layer, run.layers = run.layers, run.layers + 1
    _check_weights(weights, layer)
    outside = _current.set(None)  # a model that the sink runs is not part of this run
    try:
        run.sink(layer, weights)
    finally:
        _current.reset(outside)
    return output, None


def _check_weights(weights: Tensor, layer: int) -> None:
    if weights.dtype not in (torch.float32, torch.float64):
        raise CaptureError(
            f"layer {layer}: attention is {weights.dtype}, whose rows do not sum to 1 closely enough; "
            "call model.float() and leave autocast off"
        )
    if weights.ndim != 4 or weights.shape[-1] != weights.shape[-2]:
        raise CaptureError(
            f"layer {layer}: attention has shape {tuple(weights.shape)}, not (B, H, N, N); "
            "cross-attention and cached keys make no Markov chain on one set of tokens"
        )
    sums = weights.sum(-1, dtype=torch.float64)
    if not bool(torch.isfinite(sums).all()):
        raise CaptureError(f"layer {layer}: attention is NaN or infinite; check the inputs and the weights")
    off = (sums - 1).abs().max().item()
    if off > TOLERANCE:
        raise CaptureError(
            f"layer {layer}: a row of attention is off 1 by {off:.3g}, more than {TOLERANCE:g}; it is no softmax"
        )


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, eager_mask)  # without this a custom attention gets no padding or causal mask
