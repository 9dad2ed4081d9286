"""One context manager a library: inside it, every self-attention of a model hands out its weights.

transformers looks its attention function up by name, so we register a name whose function calls the *eager* attention
of the model's own source file. The other libraries have no such place. There a module's attribute is covered by an
entry in its ``__dict__``, which Python finds before submodules and methods, and is uncovered again. So the numbers are
the library's own, and no hook is used or left.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import eager_mask

from dobnb.errors import (
    CompressedAttentionError,
    CrossAttentionSkipped,
    LayerCountError,
    UnsupportedModelError,
    WindowedAttentionError,
)
from dobnb.tokens import is_a

Emit = Callable[[Tensor, Tensor | None], None]
"""Called as ``emit(weights, mask)`` by every layer, in the order they run: weights (B, H, N, N), before dropout; mask
what the layer adds to its scores, broadcastable to the weights, or None where that is not known."""

_NAME = "dobnb"
_TIMM_ATTENTION = {  # softmax over all tokens, whose weights pass through attn_drop
    "timm.layers.attention.Attention",
    "timm.layers.attention.AttentionRope",
    "timm.models.beit.Attention",
    "timm.models.eva.EvaAttention",
    "timm.models.vision_transformer_relpos.RelPosAttention",
}
_TIMM_POOLING = {"timm.layers.attention_pool.AttentionPoolLatent"}  # after the last layer, a latent attends to tokens
_RTDL_ATTENTION = "rtdl_revisiting_models.MultiheadAttention"
_RTDL_BACKBONE = "rtdl_revisiting_models.FTTransformerBackbone"


def exposed(model: nn.Module, emit: Emit) -> AbstractContextManager[Callable[[], None]]:
    """Every self-attention of `model` calls `emit` while the context lasts; then the model is as it was.

    :return: gives a function to call after the forward pass, which raises LayerCountError if a layer was left out.
    :raises CaptureError: a model whose attention cannot be read.
    """
    for module in model.modules():
        if "Window" in type(module).__name__:
            raise WindowedAttentionError(
                f"{type(model).__name__} attends within windows ({type(module).__name__}), so no matrix holds "
                "the whole input; choose a model with global attention"
            )
    return _transformers(model, emit) if isinstance(model, PreTrainedModel) else _modules(model, emit)


def skipped(module: nn.Module) -> None:
    """Say that the attention of `module` is left out."""
    warnings.warn(
        f"{type(module).__name__} attends to another sequence; its weights do not reach the sink",
        CrossAttentionSkipped,
        stacklevel=2,
    )


_Run = Callable[[nn.Module, Tensor, Tensor | None], None]

_current: ContextVar[_Run | None] = ContextVar("dobnb_run", default=None)
"""Where this thread's weights go. What another thread, or the sink, does with the model meanwhile is not in the run."""


@contextmanager
def _run(run: _Run | None) -> Iterator[None]:
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


def _hand_over(run: _Run, module: nn.Module, weights: Tensor, mask: Tensor | None = None) -> None:
    """Call `run` with what `module` computed; a model that the sink runs is not part of the run."""
    with _run(None):
        run(module, weights, mask)


# transformers

@contextmanager
def _transformers(model: PreTrainedModel, emit: Emit) -> Iterator[Callable[[], None]]:
    layers = getattr(model.config, "num_hidden_layers", None)
    parts = {name.rsplit(".")[-1] for name, _ in model.named_modules()}
    if not isinstance(layers, int) or (model.config.is_encoder_decoder and {"encoder", "decoder"} <= parts):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no single stack of layers; pass one part, such as its encoder or vision_model"
        )
    cross = {id(module) for name, module in model.named_modules() if _is_cross_attention(name, module)}
    seen = 0

    def count(module: nn.Module, weights: Tensor, mask: Tensor | None) -> None:
        nonlocal seen
        if id(module) in cross:
            skipped(module)
        else:
            seen += 1
            emit(weights, mask)

    def check() -> None:
        if seen == 0:
            raise CompressedAttentionError(
                f"no layer of {type(model).__name__} gave attention: it is linear, sparse or not exchangeable; "
                "choose a model whose attention transformers can switch"
            )
        if seen != layers:
            raise LayerCountError(
                f"{type(model).__name__} has {layers} layers, but {seen} gave attention: the others are of another "
                "kind; choose a model that has softmax attention throughout"
            )

    before = [(config, config._attn_implementation) for config in _configs(model)]
    try:
        model.set_attn_implementation(_NAME)
        with _run(count):
            yield check
    finally:
        for config, implementation in before:  # outer configs first: setting one sets those inside it
            config._attn_implementation = implementation


def _is_cross_attention(name: str, module: nn.Module) -> bool:
    """Whether a module of transformers, by the names used there, is or lies in one that attends to another sequence."""
    spelled = f"{name}.{type(module).__name__}".lower().replace("_", "")
    return any(part in spelled for part in ("crossatt", "encoderattn", "encdecatt", "encoderdecoderatt"))


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


def _eager_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """The eager attention function of the file that `module`'s class, or a class it derives from, is written in."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise UnsupportedModelError(
        f"{type(module).__name__} comes without an eager attention function, so its weights are out of reach; "
        "define eager_attention_forward in its module"
    )


def _attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """What the registered name stands for: eager attention, whose weights go to the current run."""
    output, weights = _eager_of(module)(module, *args, **kwargs)
    run = _current.get()
    if run is None:
        return output, weights
    _hand_over(run, module, weights, args[3] if len(args) > 3 else kwargs.get("attention_mask"))
    return output, None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, eager_mask)  # without this a custom attention gets no padding or causal mask


# timm, torch and rtdl


@contextmanager
def _modules(model: nn.Module, emit: Emit) -> Iterator[Callable[[], None]]:
    waiting = _attentions(model)
    names = {id(module): name for name, module in model.named_modules()}

    def run(module: nn.Module, weights: Tensor | None, mask: Tensor | None) -> None:
        waiting.pop(id(module), None)
        if weights is not None:
            emit(weights, mask)

    def check() -> None:
        if waiting:
            missing = next(names[key] or type(model).__name__ for key in waiting)
            raise LayerCountError(
                f"{len(waiting)} attention modules of {type(model).__name__} did not run, {missing} for one, "
                "so layers are missing; pass the part of the model whose attention runs"
            )

    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # it runs whole encoder layers, past their attention module
        for module in waiting.values():
            cover = _cover_torch if isinstance(module, nn.MultiheadAttention) else _cover_dropout
            stack.enter_context(cover(module, run))
        stack.enter_context(_run(run))
        yield check


def _attentions(model: nn.Module) -> dict[int, nn.Module]:
    """The modules of `model` whose self-attention can be read, by id, in the order they were defined."""
    name, found = type(model).__name__, {}
    for module in model.modules():
        kind = type(module)
        if isinstance(module, PreTrainedModel | nn.Transformer):
            raise UnsupportedModelError(
                f"{name} holds a {kind.__name__}; pass that model itself, or its encoder or decoder alone"
            )
        if is_a(module, _RTDL_ATTENTION) and module.key_compression is not None:
            raise CompressedAttentionError(
                f"{name} compresses its keys (linformer), so attention is not square; train it without compression"
            )
        if isinstance(module, nn.MultiheadAttention) or is_a(module, _RTDL_ATTENTION, *_TIMM_ATTENTION):
            found[id(module)] = module
        elif is_a(module, *_TIMM_POOLING):
            skipped(module)
        elif kind.__module__.startswith("timm.") and (hasattr(module, "attn_drop") or "Attention" in kind.__name__):
            raise CompressedAttentionError(
                f"{name} has {kind.__name__} of {kind.__module__}, which is not known as softmax over all tokens: "
                "it may be linear, compressed or differential; choose a model with plain attention"
            )
    for module in model.modules():
        if is_a(module, _RTDL_BACKBONE):  # its last block queries the cls token alone: not square, not handed out
            found.pop(id(module.blocks[-1]["attention"]), None)
    if not found:
        raise UnsupportedModelError(
            f"{name} has no self-attention that dobnb can read; pass a model of transformers, timm, torchvision, torch "
            "or rtdl_revisiting_models itself"
        )
    blocks = getattr(model, "blocks", None)
    if type(model).__module__.startswith("timm.") and blocks is not None and len(blocks) != len(found):
        raise LayerCountError(
            f"{name} has {len(blocks)} blocks, but {len(found)} attentions that can be read; "
            "choose a model with one attention a block"
        )
    return found


@contextmanager
def _covered(module: nn.Module, **attributes: Any) -> Iterator[None]:
    """`module` with `attributes` in front of its own; on leaving, its ``__dict__`` is what it was."""
    own = vars(module)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


def _cover_torch(module: nn.MultiheadAttention, run: _Run) -> AbstractContextManager[None]:
    """torch's attention, asked for per-head weights; the caller gets what it asked for."""
    forward = module.forward

    def wrapper(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        masks = dict(key_padding_mask=key_padding_mask, attn_mask=attn_mask, is_causal=is_causal)
        if _current.get() is not run or query is not key:
            if _current.get() is run:
                skipped(module)
                run(module, None, None)
            return forward(
                query, key, value, need_weights=need_weights, average_attn_weights=average_attn_weights, **masks
            )
        output, weights = forward(query, key, value, need_weights=True, average_attn_weights=False, **masks)
        asked = None
        if need_weights:  # of its own, since the sink may write to what it gets
            asked = weights.mean(-3) if average_attn_weights else weights.clone()
        _hand_over(run, module, weights if weights.ndim == 4 else weights.unsqueeze(0))
        return output, asked

    return _covered(module, forward=wrapper)


def _cover_dropout(module: nn.Module, run: _Run) -> AbstractContextManager[None]:
    """An attention of timm or rtdl, whose weights are what its dropout gets."""
    rtdl = is_a(module, _RTDL_ATTENTION)
    forward, dropout = module.forward, module.dropout if rtdl else module.attn_drop
    taken: list[Tensor] = []

    def take(weights: Tensor) -> Tensor:
        if _current.get() is run:
            taken.append(weights.unflatten(0, (-1, module._n_heads)) if rtdl else weights)
        return weights if dropout is None else dropout(weights)

    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        output = forward(*args, **kwargs)
        if _current.get() is run:
            weights = taken.pop()
            if rtdl and weights.shape[-1] != weights.shape[-2]:
                skipped(module)
                run(module, None, None)
            else:  # only now, since the output is computed from what the sink may write to
                _hand_over(run, module, weights)
        return output

    if rtdl:
        return _covered(module, forward=wrapper, dropout=take)
    return _covered(module, forward=wrapper, attn_drop=take, fused_attn=False)
