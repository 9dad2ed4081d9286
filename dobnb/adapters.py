"""One context manager a library: inside it, every self-attention of a model hands out its weights.

transformers looks its attention function up by name, so we register a name whose function calls the *eager* attention
of the model's own source file. The other libraries have no such place. There a module's attribute is covered by an
entry in its ``__dict__``, which Python finds before submodules and methods, and is uncovered again. So the numbers are
the library's own, and no hook is used or left.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import eager_mask

from dobnb.errors import (
    AmbiguousAttentionError,
    CompressedAttentionError,
    CrossAttentionSkipped,
    LayerCountError,
    NoAttentionError,
    PaddingError,
    UnsupportedModelError,
    WindowedAttentionError,
)
from dobnb.tokens import TIMM_VISION, TORCHVISION, arguments_of, is_a

Emit = Callable[[Tensor, Tensor | None], None]
"""Called as ``emit(weights, mask)`` by every layer, in the order they run: weights (B, H, N, N), before dropout; mask,
broadcastable to them, true where a token may be seen or what is added to the scores; None where nothing is masked."""

Called = Callable[[PreTrainedModel, Mapping[str, Any]], None]
"""Called as ``called(model, named)`` when a model of transformers that another module holds runs on inputs."""

LOWEST = -1e4
"""A score that far down is masked: beside it exp of any other is 0. Not every library adds the least float or -inf."""
FAINT = -20.0
"""A token that a mask puts that far down for all is hidden, or nearly: exp of it is lost in float32 beside 1."""
_NAME = "dobnb"
_TIMM_ATTENTION = {  # softmax over all tokens, whose weights pass through attn_drop
    "timm.layers.attention.Attention",
    "timm.layers.attention.AttentionRope",
    "timm.models.beit.Attention",
    "timm.models.eva.EvaAttention",
    "timm.models.vision_transformer_relpos.RelPosAttention",
}
_TIMM_POOLING = {"timm.layers.attention_pool.AttentionPoolLatent"}  # after the last layer, a latent attends to tokens
_STACKS = {*TIMM_VISION, TORCHVISION} | {
    f"torch.nn.modules.transformer.Transformer{kind}" for kind in ("Encoder", "Decoder")
}
"""Whole stacks of layers."""
_RTDL_ATTENTION = "rtdl_revisiting_models.MultiheadAttention"
_RTDL_BACKBONE = "rtdl_revisiting_models.FTTransformerBackbone"


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


_TORCH_ARGUMENTS = {*inspect.signature(nn.MultiheadAttention.forward).parameters} - {"self"}


def exposed(model: nn.Module, emit: Emit, called: Called) -> AbstractContextManager[Callable[[], None]]:
    """Every self-attention of `model` calls `emit` while the context lasts; then the model is as it was.

    :param called: hears what a model of transformers inside `model` is called with, by name.
    :return: gives a function to call after the forward pass, which raises LayerCountError if a layer was left out, and
        NoAttentionError if all were.
    :raises CaptureError: a model whose attention cannot be read.
    """
    for module in model.modules():
        if "Window" in type(module).__name__ and any(map(_attends, module.modules())):
            raise WindowedAttentionError(
                f"{type(model).__name__} attends within windows ({type(module).__name__}), so no matrix holds "
                "the whole input; choose a model with global attention"
            )
    inner = _of_transformers(model)
    return _modules(model, emit) if inner is None else _transformers(inner, emit, None if inner is model else called)


def _attends(module: nn.Module) -> bool:
    """Whether a module is attention, by its class or the class's name."""
    return isinstance(module, nn.MultiheadAttention) or "Attention" in type(module).__name__


def _of_transformers(model: nn.Module) -> PreTrainedModel | None:
    """The model of transformers that `model` is or holds; None where all attention is of other libraries."""
    found: dict[str, PreTrainedModel] = {}
    others: list[str] = []
    for name, module in model.named_modules():  # those that hold others come first
        if any(name.startswith(f"{outer}.") or not outer for outer in found):
            continue
        if isinstance(module, PreTrainedModel):
            found[name] = module
        elif isinstance(module, nn.MultiheadAttention) or is_a(module, _RTDL_ATTENTION, *_TIMM_ATTENTION):
            others.append(name)
    if len(found) + bool(others) > 1 and found:
        parts = ", ".join([f"{name} ({type(module).__name__})" for name, module in found.items()] + others[:1])
        raise UnsupportedModelError(
            f"{type(model).__name__} attends in several parts, {parts}, which make no single stack of layers; pass one"
        )
    return next(iter(found.values()), None)


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
def _transformers(model: PreTrainedModel, emit: Emit, called: Called | None) -> Iterator[Callable[[], None]]:
    layers = _layers(model)
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
            raise _nothing(model)
        if seen != layers:
            raise LayerCountError(
                f"{type(model).__name__} has {layers} layers by its config, but {seen} gave attention: " + (
                    "the others are of another kind, or were removed; choose a model that has softmax attention "
                    f"throughout, or set its config.num_hidden_layers to {seen} if there are no others"
                    if seen < layers
                    else "it ran on several inputs, or has several stacks; run it once, or pass one part of it"
                )
            )

    forward = model.forward

    @wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _current.get() is count:
            called(model, arguments_of(forward, *args, **kwargs))
        return forward(*args, **kwargs)

    before = [(config, config._attn_implementation) for config in _configs(model)]
    try:
        model.set_attn_implementation(_NAME)
        _check_reached(model)
        with _run(count), nullcontext() if called is None else _covered(model, forward=wrapper):
            yield check
    finally:
        for config, implementation in before:  # outer configs first: setting one sets those inside it
            config._attn_implementation = implementation


def _check_reached(model: PreTrainedModel) -> None:
    """Refuse a model that has layers under a copy of its config, which is not switched, as ViTMAE's decoder is."""
    if model.config._attn_implementation != _NAME:  # none of it can be switched, and no layer will give attention
        return
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and config._attn_implementation != _NAME:
            base = model.base_model_prefix
            part = f"model.{base}" if base and hasattr(model, base) else "one part of it"
            raise UnsupportedModelError(
                f"{type(model).__name__} has no single stack of layers: {name} ({type(module).__name__}) has a config "
                f"of its own, which transformers does not switch; pass {part}"
            )


def _layers(model: PreTrainedModel) -> int | None:
    """How many layers the model says it has; of BART's kind, the config's first number is of the encoder."""
    config = model.config
    if getattr(config, "is_decoder", False) or "Decoder" in type(model).__name__:
        return getattr(config, "decoder_layers", getattr(config, "num_hidden_layers", None))
    return getattr(config, "num_hidden_layers", None)


def _nothing(model: PreTrainedModel) -> NoAttentionError | WindowedAttentionError:
    """What is wrong with a model none of whose layers asks transformers for its attention function."""
    name = type(model).__name__
    if getattr(model.config, "window_size", None) is not None:
        return WindowedAttentionError(
            f"{name} attends within windows, so no matrix holds the whole input; choose a model with global attention"
        )
    return NoAttentionError(
        f"no layer of {name} gave attention: it is linear, sparse, or code of its own that transformers cannot switch; "
        "choose a model whose attention it can"
    )


def _is_cross_attention(name: str, module: nn.Module) -> bool:
    """Whether a module, by the names in use, is or lies in one that attends to another sequence."""
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


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """What the registered name stands for: eager attention, whose weights go to the current run."""
    mask = attention_mask
    if mask is not None:  # which eager attention adds to its scores, whatever it is
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
        elif not mask.is_floating_point():
            raise PaddingError(f"the mask is {mask.dtype}, which would be added to the scores; pass mask.bool()")
        # Llama's softmax is float32, where float64's minimum is -inf, and a row of those is NaN, which spreads.
        if mask.dtype == torch.float64:
            mask = mask.clamp(min=torch.finfo(torch.float32).min)
    output, weights = _eager_of(module)(module, query, key, value, mask, **kwargs)
    run = _current.get()
    if run is None:
        return output, weights
    _hand_over(run, module, weights, attention_mask)
    return output, None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, eager_mask)  # without this a custom attention gets no padding or causal mask


# timm, torch and rtdl


@contextmanager
def _modules(model: nn.Module, emit: Emit) -> Iterator[Callable[[], None]]:
    waiting = _attentions(model)
    _check_stacks(model, waiting)
    names = {id(module): name for name, module in model.named_modules()}
    seen = 0

    def run(module: nn.Module, weights: Tensor | None, mask: Tensor | None) -> None:
        nonlocal seen
        if waiting.pop(id(module), None) is None and weights is not None:
            raise UnsupportedModelError(
                f"{names[id(module)] or type(model).__name__} ran twice: on another input, or as a further layer with "
                "the same weights? Run one input at a time; or give every layer a module of its own, by copy.deepcopy"
            )
        if weights is not None:
            seen += 1
            emit(weights, mask)

    def check() -> None:
        if waiting:
            missing = next(names[key] or type(model).__name__ for key in waiting)
            raise LayerCountError(
                f"{len(waiting)} attention modules of {type(model).__name__} did not run, {missing} for one, "
                "so layers are missing; pass the part of the model whose attention runs"
            )
        if seen == 0:
            raise NoAttentionError(
                f"every attention of {type(model).__name__} was skipped: its keys are of another sequence, or "
                "compressed; choose a model with self-attention on whole inputs"
            )

    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # it runs whole encoder layers, past their attention module
        for module in waiting.values():
            if isinstance(module, nn.MultiheadAttention):
                parent = model.get_submodule(names[id(module)].rpartition(".")[0])
                stack.enter_context(_cover_torch(module, names[id(module)], parent, run))
            else:
                stack.enter_context(_cover_dropout(module, run))
        stack.enter_context(_run(run))
        yield check


def _attentions(model: nn.Module) -> dict[int, nn.Module]:
    """The modules of `model` whose self-attention can be read, by id, in the order they were defined."""
    name, found = type(model).__name__, {}
    for module in model.modules():
        kind = type(module)
        if isinstance(module, nn.Transformer):
            raise UnsupportedModelError(
                f"{name} {'is' if module is model else 'holds'} an nn.Transformer, whose encoder and decoder make no "
                "single stack of layers; pass its encoder or decoder alone"
            )
        if is_a(module, _RTDL_ATTENTION) and module.key_compression is not None:
            raise CompressedAttentionError(
                f"{name} compresses its keys (linformer), so attention is not square; train it without compression"
            )
        if isinstance(module, nn.MultiheadAttention) and not _TORCH_ARGUMENTS.issubset(_parameters(module)):
            raise UnsupportedModelError(
                f"{kind.__name__} takes other arguments than torch's MultiheadAttention; use that one itself"
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
    if not found and any(type(module).__module__.startswith("transformers.models.") for module in model.modules()):
        raise UnsupportedModelError(
            f"{name} is or holds a part of a model of transformers, which cannot be switched alone; pass the whole "
            "model, such as the BertModel that holds a BertEncoder"
        )
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


def _check_stacks(model: nn.Module, attentions: Mapping[int, nn.Module]) -> None:
    """Refuse several whole stacks side by side, such as two towers, unless a Sequential runs them one by one."""
    stacks: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in stacks)
        if not inside and is_a(module, *_STACKS) and any(id(part) in attentions for part in module.modules()):
            stacks.append(name)
    for pair in pairwise(stacks):
        steps = zip(*(name.split(".") for name in pair), strict=False)
        common = ".".join(a for a, _ in takewhile(lambda step: step[0] == step[1], steps))
        if not isinstance(model.get_submodule(common), nn.Sequential):
            raise UnsupportedModelError(
                f"{type(model).__name__} attends in several parts, {', '.join(stacks)}, which make no single stack of "
                "layers unless one reads what another gives; pass one, or if so, put them into one nn.Sequential"
            )


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


def _attends_to_itself(module: nn.Module, name: str, parent: nn.Module, query: Tensor, key: Tensor) -> bool:
    """Whether the keys of torch's attention are of the tokens that ask. The same tensor is; other numbers may be those
    of another sequence, or of the same with positions added to one of the two, and then the module's place decides."""
    own = name.rpartition(".")[-1]
    if query is key:
        return True
    if query.shape[:-1] != key.shape[:-1]:
        return False
    kinds = f"{type(parent).__name__}.{type(module).__name__}".lower()
    beside = own == "multihead_attn" and hasattr(parent, "self_attn")  # in a decoder's layer, torch's and DETR's
    if beside or "crossatt" in kinds or _is_cross_attention(own, module):
        return False
    if torch.equal(query, key) or "self" in own.lower() or "selfatt" in kinds:
        return True
    raise AmbiguousAttentionError(
        f"{name or type(module).__name__} gets queries and keys that differ, equally many: its own tokens or another "
        "sequence? Pass one tensor for both, or name the module self_attn or cross_attn"
    )


def _torch_mask(module: nn.MultiheadAttention, call: dict[str, Any]) -> Tensor | None:
    """The two masks that torch's attention takes as one, of four dimensions: bool, true where a token may be seen, or
    what is added to the scores, as soon as one of them is."""
    padding, mask = call["key_padding_mask"], call["attn_mask"]
    if padding is not None:
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
    if mask is not None:
        mask = mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (-1, module.num_heads))
    masks = [one for one in (padding, mask) if one is not None]
    if all(one.dtype == torch.bool for one in masks):
        return ~torch.stack(torch.broadcast_tensors(*masks)).any(0) if masks else None
    return sum(torch.zeros_like(one, dtype=torch.float32).masked_fill(one, -torch.inf) if one.dtype == torch.bool
               else one for one in masks)  # fmt: skip


def _cover_torch(
    module: nn.MultiheadAttention, name: str, parent: nn.Module, run: _Run
) -> AbstractContextManager[None]:
    """torch's attention, asked for per-head weights; the caller gets what it asked for."""
    forward = module.forward
    signature = inspect.signature(forward)

    @wraps(forward)  # whose signature a nested run asks for
    def wrapper(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if _current.get() is not run:
            return forward(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        query, need, average = given["query"], given["need_weights"], given["average_attn_weights"]
        if not _attends_to_itself(module, name, parent, query, given["key"]):
            skipped(module)
            run(module, None, None)
            return forward(*args, **kwargs)
        given |= {"need_weights": True, "average_attn_weights": False}
        output, weights = forward(*call.args, **call.kwargs)
        if weights is None or weights.ndim != query.ndim + 1:
            raise UnsupportedModelError(
                f"{type(module).__name__} does not give every head's weights when asked (need_weights=True, "
                "average_attn_weights=False), as torch's MultiheadAttention does; use that one itself"
            )
        asked = None
        if need:  # of its own, since the sink may write to what it gets
            asked = weights.mean(-3) if average else weights.clone()
        _hand_over(run, module, weights if weights.ndim == 4 else weights.unsqueeze(0), _torch_mask(module, given))
        return output, asked

    return _covered(module, forward=wrapper)


def _cover_dropout(module: nn.Module, run: _Run) -> AbstractContextManager[None]:
    """An attention of timm or rtdl, whose weights are what its dropout gets."""
    rtdl = is_a(module, _RTDL_ATTENTION)
    forward, dropout = module.forward, module.dropout if rtdl else module.attn_drop
    signature = inspect.signature(forward)
    taken: list[Tensor] = []

    def given(args: Any, kwargs: Any) -> Tensor | None:
        """The mask that the module was given, which it adds, or which is true where a token may be seen."""
        call = signature.bind(*args, **kwargs).arguments
        return None if call.get("is_causal") else call.get("attn_mask")

    def take(weights: Tensor) -> Tensor:
        if _current.get() is run:
            taken.append(weights.unflatten(0, (-1, module._n_heads)) if rtdl else weights)
        return weights if dropout is None else dropout(weights)

    @wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        output = forward(*args, **kwargs)
        if _current.get() is run:
            if not taken:
                raise UnsupportedModelError(
                    f"{type(module).__name__} did not pass its weights through its dropout; use the library's own class"
                )
            weights = taken.pop()
            if rtdl and weights.shape[-1] != weights.shape[-2]:
                skipped(module)
                run(module, None, None)
            else:  # only now, since the output is computed from what the sink may write to
                _hand_over(run, module, weights, given(args, kwargs))
        return output

    if rtdl:
        return _covered(module, forward=wrapper, dropout=take)
    return _covered(module, forward=wrapper, attn_drop=take, fused_attn=False)
