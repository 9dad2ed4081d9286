"""Attention streamed out of a running model, one layer at a time, and checked.

How a library's model is made to hand out its weights is the business of :mod:`dobnb.adapters`. Here is what holds for
all of them: what is refused before the model runs, what every layer's weights are held against, and where they go.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dobnb.adapters import FAINT, LOWEST, exposed
from dobnb.errors import (
    AmbiguousAttentionError,
    ArgumentError,
    BatchError,
    CaptureError,
    CompiledModelError,
    CompressedAttentionError,
    CrossAttentionSkipped,
    HalfPrecisionError,
    ImageSizeError,
    KeptAttentionError,
    LayerCountError,
    LengthError,
    MaskedRowError,
    NoAttentionError,
    NotFiniteError,
    PaddingError,
    RowSumError,
    TrainingModeError,
    UnsupportedModelError,
    WindowedAttentionError,
)
from dobnb.stochastic import TOLERANCE
from dobnb.tokens import ModelInputs, as_arguments, images_of, named_inputs, patch_size

__all__ = [
    "AmbiguousAttentionError",
    "ArgumentError",
    "BatchError",
    "CaptureError",
    "CompiledModelError",
    "CompressedAttentionError",
    "CrossAttentionSkipped",
    "HalfPrecisionError",
    "ImageSizeError",
    "KeptAttentionError",
    "LayerCountError",
    "LengthError",
    "MaskedRowError",
    "NoAttentionError",
    "NotFiniteError",
    "PaddingError",
    "RowSumError",
    "Sink",
    "TrainingModeError",
    "UnsupportedModelError",
    "WindowedAttentionError",
    "stream_attention",
]

Sink = Callable[[int, Tensor], None]
"""Called as ``sink(layer, weights)``: layers count from 0, weights have shape (B, H, N, N)."""

# What is switched is part of the model, which threads may share, so their runs take turns; nested runs do not wait.
_switching = threading.RLock()


def stream_attention(
    model: nn.Module,
    inputs: ModelInputs,
    sink: Sink,
    *,
    allow_half: bool = False,
    on_padding: Callable[[Tensor], None] | None = None,
) -> Any:
    """Run a model without gradients and hand every layer's attention to `sink` as soon as it exists.

    One layer's weights are alive at a time, unless `sink` keeps them. The weights are those before dropout, in the
    model's dtype, on its device; `sink` may change them in place. The model leaves as it came, on errors too. Calls may
    be nested. Those of different threads take turns, so a sink must not wait for a thread that streams: it would wait
    for ever.

    What is handed out is self-attention. Attention to another sequence is skipped with a
    :class:`~dobnb.errors.CrossAttentionSkipped` warning. So is, without one, the last block of
    ``rtdl_revisiting_models.FTTransformer``: it queries the cls token alone, so its attention is not square.

    Padding is what the mask that reaches attention, by whatever name the model takes it, lets no token see. Its rows
    and columns are handed out like any other; `on_padding` says which they are.

    :param model: in eval mode: a transformers model with one stack of layers, a timm ViT, DeiT, EVA or BEiT, a
        torchvision ViT, anything whose attention is ``torch.nn.MultiheadAttention``, or an FTTransformer; or a module
        that holds one of them.
    :param inputs: a mapping, passed as ``model(**inputs)``; a tuple, as ``model(*inputs)``; a tensor, as
        ``model(inputs)``.
    :param sink: called as ``sink(layer, weights)``, layer 0 first; weights of shape (B, H, N, N), rows sum to 1.
    :param allow_half: accept attention computed in float16 or bfloat16, whose rows sum to 1 only within the dtype's
        epsilon, or which comes of rounded scores.
    :param on_padding: called once, before layer 0, with bool of shape (B, N), true where a token is padding.
    :return: the model's output, as the same call of it returns it. At padding it may differ: ``nn.TransformerEncoder``
        puts zeros there when it packs its inputs as nested tensors, which it does not do here.
    :raises CaptureError: one of its subclasses in :mod:`dobnb.errors`, each of which says what to do.
    """
    _check_model(model)
    _check_sink(sink)
    named = named_inputs(model, inputs)
    run = _Run(type(model).__name__, sink, allow_half, on_padding)
    run.images, run.sizes = _check_inputs(model, named), _sizes(model, named)

    def called(inner: PreTrainedModel, named: Mapping[str, Any]) -> None:
        run.images = _check_inputs(inner, named)

    args, kwargs = as_arguments(model, inputs)
    with _switching, exposed(model, run.take, called) as check, torch.no_grad():
        output = model(*args, **kwargs)
        check()
    return output


# Before the run


def _check_model(model: Any) -> None:
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"{name} is no torch module; pass a model of transformers, timm, torch or rtdl")
    for module in model.modules():
        scripted = isinstance(module, torch.jit.ScriptModule) or hasattr(module.forward, "_torchdynamo_orig_callable")
        if scripted or type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise CompiledModelError(f"{name} is compiled, and compiled code calls no sink; pass the model as it was")
        if module.training:
            raise TrainingModeError(f"{name} is in training mode, where dropout changes attention; call model.eval()")


def _check_sink(sink: Any) -> None:
    try:
        inspect.signature(sink).bind(0, torch.empty(0))
    except TypeError:
        raise ArgumentError(
            f"the sink is {'None' if sink is None else f'a {type(sink).__name__}'} that cannot be called as "
            "sink(layer, weights); pass a function of these two"
        ) from None
    except ValueError:  # some functions written in C do not say what they take
        return


def _sizes(model: nn.Module, named: Mapping[str, Any]) -> set[int]:
    """What the number of inputs may be: the first size of any tensor, or as torch has it, the second; {} if unknown."""
    sizes: set[int] = set()
    waiting = [*named.values()]
    second = any(isinstance(module, nn.MultiheadAttention) and not module.batch_first for module in model.modules())
    alone = type(model).__module__.startswith("torch.nn")  # whose sequences may come without a batch
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor) and value.ndim:
            sizes.add(value.shape[0])
            if second and value.ndim > 1:
                sizes.add(value.shape[1])
            if alone and value.ndim == 2:
                sizes.add(1)
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
    return sizes


def _check_inputs(model: nn.Module, named: Mapping[str, Any]) -> int | None:
    """Refuse what a model would misread; how many images there are, if there are any."""
    if isinstance(model, PreTrainedModel):
        _check_switches(model, named)
        _check_text(model, named)
    return _check_images(model, named)


def _check_switches(model: PreTrainedModel, named: Mapping[str, Any]) -> None:
    if named.get("output_attentions") or model.config.output_attentions:
        raise KeptAttentionError(
            "output_attentions would keep every layer's attention; leave it off, the sink receives them all"
        )


def _check_images(model: nn.Module, named: Mapping[str, Any]) -> int | None:
    """How many images there are, if there are any; all their pixels have to lie in patches."""
    images, patch = images_of(model, named), patch_size(model)
    if images is None:
        return None
    height, width = images.shape[-2:]
    if patch is not None and (height % patch[0] or width % patch[1]):
        raise ImageSizeError(
            f"the images are {height} x {width} px, no multiples of the patch of {patch[0]} x {patch[1]}, "
            "so their edge would be lost; crop or resize them"
        )
    return len(images)


def _check_text(model: PreTrainedModel, named: Mapping[str, Any]) -> None:
    """Token ids have to fit the model's positions, and a mask has to say which are padding."""
    ids, mask = named.get("input_ids"), named.get("attention_mask")
    if not isinstance(ids, Tensor):
        return
    if ids.ndim < 2:
        raise ArgumentError(f"input_ids has shape {tuple(ids.shape)}, not (inputs, tokens); pass ids.unsqueeze(0)")
    whole = named.get("past_key_values") is None  # a mask is of cached tokens too
    if whole and isinstance(mask, Tensor) and mask.ndim != 4 and mask.shape != ids.shape:
        raise PaddingError(
            f"attention_mask has shape {tuple(mask.shape)}, the ids {tuple(ids.shape)}; pass one flag a token, or a "
            "mask of pairs of shape (inputs, 1, tokens, tokens)"
        )
    positions = _positions(model)
    if positions is not None and ids.shape[-1] > positions:
        raise LengthError(
            f"the inputs have {ids.shape[-1]} tokens, but {type(model).__name__} has {positions} positions; "
            "cut them, as the tokenizer does with truncation=True"
        )
    pad = getattr(model.config, "pad_token_id", None)
    if mask is None and pad is not None and bool((ids == pad).any()):
        raise PaddingError(
            f"the inputs hold the padding id {pad} and there is no attention_mask, so padding would take part; "
            "pass the tokenizer's mask, or ones if nothing is padding"
        )


def _positions(model: PreTrainedModel) -> int | None:
    """How long an input may be, if the model says so; RoBERTa's positions begin after the padding id."""
    positions = getattr(model.config, "max_position_embeddings", None)
    for module in model.modules():
        embedding = getattr(module, "position_embeddings", None)
        if isinstance(embedding, nn.Embedding) and embedding.padding_idx is not None:
            return embedding.num_embeddings - embedding.padding_idx - 1
    return positions if isinstance(positions, int) and positions > 0 else None


# During the run


class _Run:
    """One call of :func:`stream_attention`: what its weights are held against, and where they go."""

    def __init__(
        self, model: str, sink: Sink, allow_half: bool, on_padding: Callable[[Tensor], None] | None
    ) -> None:
        self.model, self.sink, self.allow_half = model, sink, allow_half
        self.on_padding = on_padding
        self.images: int | None = None
        self.sizes: set[int] = set()
        self.layers = 0
        self.padding: Tensor | None = None
        self.mask: Tensor | None = None
        self.faint = False

    def take(self, weights: Tensor, mask: Tensor | None) -> None:
        """Check a layer's weights and the mask that made them, and pass the weights on."""
        layer, self.layers = self.layers, self.layers + 1
        if weights.ndim != 4 or weights.shape[-1] != weights.shape[-2]:
            raise CompressedAttentionError(
                f"layer {layer}: attention has shape {tuple(weights.shape)}, not (B, H, N, N); compressed or cached "
                "keys make no Markov chain on one set of tokens; run whole inputs, on a model with full attention"
            )
        batch, tokens = weights.shape[0], weights.shape[-1]
        if self.images not in (None, batch):
            raise WindowedAttentionError(
                f"layer {layer}: there are {batch} attention matrices a head for {self.images} images, so "
                f"{self.model} attends within windows; choose a model with global attention"
            )
        if self.sizes and batch not in self.sizes:
            raise BatchError(
                f"layer {layer}: there are {batch} attention matrices a head for "
                f"{' or '.join(map(str, sorted(self.sizes)))} inputs, so {self.model} cuts inputs into parts, or mixes "
                "them; pass each part as an input of its own, to the module that attends"
            )
        if self.padding is not None and self.padding.shape != (batch, tokens):
            raise CompressedAttentionError(
                f"layer {layer}: attention is on {tokens} tokens, on {self.padding.shape[1]} before, so tokens are "
                "merged or dropped on the way; choose a model that keeps them"
            )
        self._take_mask(layer, mask, weights)
        _check_weights(weights, layer, self.allow_half)
        self.sink(layer, weights)

    def _take_mask(self, layer: int, mask: Tensor | None, weights: Tensor) -> None:
        """Find the padding in a layer's mask, which has to be that of layer 0."""
        if self.padding is not None and mask is self.mask and not self.faint:  # layers mostly share one mask
            return
        padding = torch.zeros(weights.shape[0], weights.shape[-1], dtype=torch.bool, device=weights.device)
        self.mask, self.faint = mask, False
        if mask is not None:
            padding = padding | _padding(mask)
            faint = _faint(mask) & ~padding
            self.faint = bool(faint.any())
            if self.faint:
                padding = padding | _without_effect(faint, weights, layer)
        if self.padding is None:
            self.padding = padding
            if self.on_padding is not None:
                self.on_padding(padding)
        elif not torch.equal(padding, self.padding):
            i, token = (padding != self.padding).nonzero()[0].tolist()
            raise PaddingError(
                f"layer {layer}: the mask hides token {token} of input {i} from all in one layer and not in another, "
                "so the layers are on different tokens; pass every layer the same padding mask"
            )


def _padding(mask: Tensor) -> Tensor:
    """Which tokens no token may see, (B, N), or (1, N) where inputs share the mask.

    Softmax makes a row that is masked throughout uniform, on padding and the future too: only padding may have one.
    """
    seen = mask if mask.dtype == torch.bool else mask > LOWEST
    seen = seen[(None,) * (4 - seen.ndim)]
    padding = ~seen.any(-2).any(1)
    blind = ~seen.any(-1) & ~padding.unsqueeze(1)
    found = padding.all(-1).nonzero()
    if len(found):
        raise MaskedRowError(f"input {found[0].item()} of the batch is padding alone; leave it out")
    found = blind.nonzero()
    if len(found):
        raise MaskedRowError(
            f"the mask leaves token {found[0, -1].item()} of input {found[0, 0].item()} nothing to attend to; "
            "let every token that is no padding see itself at least"
        )
    return padding


def _faint(mask: Tensor) -> Tensor:
    """Which tokens a mask that is added puts below `FAINT` for every query and head, (B, N), or (1, N).

    Biases by position, such as ALiBi's and BEiT's, are near 0 for some query at least.
    """
    low = torch.zeros_like(mask) if mask.dtype == torch.bool else mask <= FAINT
    low = low[(None,) * (4 - low.ndim)]
    return low.all(-2).all(1)


def _without_effect(faint: Tensor, weights: Tensor, layer: int) -> Tensor:
    """The faint tokens, (B, N), which are padding if no weight on one is above 0, and refused otherwise."""
    seen = faint & (weights != 0).any(-2).any(1)
    found = seen.nonzero()
    if len(found):
        raise PaddingError(
            f"layer {layer}: the mask lowers token {found[0, 1].item()} of input {found[0, 0].item()} for all by "
            f"{-FAINT:g} or more, but it still gets attention: padding or not? Pass a bool mask, or -inf at padding"
        )
    return faint.expand(seen.shape)


def _check_weights(weights: Tensor, layer: int, allow_half: bool) -> None:
    half = weights.dtype in (torch.float16, torch.bfloat16)
    rounded = half or torch.is_autocast_enabled(weights.device.type)  # scores in half, though softmax may not be
    if rounded and not allow_half:
        raise HalfPrecisionError(
            f"layer {layer}: attention is {weights.dtype if half else 'computed under autocast'}, too coarse for rows "
            "to sum to 1 or verdicts to hold; call model.float() and leave autocast off (stream_attention alone takes "
            "it, with allow_half=True)"
        )
    tolerance = torch.finfo(weights.dtype).eps if half else TOLERANCE
    # The sum in float32 costs an eighth of one in float64 and is off by less than 5e-6, so it settles what is no
    # softmax, and only what it finds near the tolerance is summed again. check_equality sums in float64.
    if not half and bool(((weights.sum(-1) - 1).abs() <= tolerance).all()):
        return
    sums = weights.sum(-1, dtype=torch.float64)
    if not bool(torch.isfinite(sums).all()):
        raise NotFiniteError(f"layer {layer}: attention is NaN or infinite; check the inputs, the mask and the weights")
    off = (sums - 1).abs().max().item()
    if off > tolerance:
        raise RowSumError(
            f"layer {layer}: a row of attention is off 1 by {off:.3g}, more than {tolerance:.3g}; it is no softmax"
        )
