"""Token roles: what each position of a model's sequence is, and which positions are content.

*Content* tokens are image patches, words and features (book: def-content; the paper's M4). The others are special: cls,
register and distillation tokens, separators, padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from dobnb.errors import ArgumentError, DobnbError

CONTENT = "content"
CLS = "cls"
REGISTER = "register"
DISTILLATION = "distillation"
SEPARATOR = "separator"
PADDING = "padding"
ROLES = (CONTENT, CLS, REGISTER, DISTILLATION, SEPARATOR, PADDING)


class TokenError(DobnbError, ValueError):
    """The roles of a model's tokens cannot be told, or what was passed as roles is none."""


ModelInputs = Mapping[str, Any] | tuple[Any, ...] | Tensor
"""What a model is called with: ``model(**inputs)`` of a mapping, ``model(*inputs)`` of a tuple, ``model(inputs)``."""

_SIGNS = {CONTENT: ".", CLS: "C", REGISTER: "R", DISTILLATION: "D", SEPARATOR: "|", PADDING: "-"}

# Encoders whose sequence starts with a token that stands for all of it.
_TEXT_ENCODERS = {
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "mpnet", "modernbert", "roberta",
    "xlm-roberta",
}  # fmt: skip
# Vocabularies of Google's BERT (English uncased and cased, Chinese, multilingual uncased and cased), which DistilBERT,
# MiniLM and ELECTRA share. Their [CLS] and [SEP] are in no config.
_BERT_VOCABULARIES = {30522, 28996, 21128, 105879, 119547}
_BERT_CLS, _BERT_SEP = 101, 102

TIMM_VISION = {
    "timm.models.beit.Beit",
    "timm.models.eva.Eva",
    "timm.models.vision_transformer.VisionTransformer",
    "timm.models.vision_transformer_relpos.VisionTransformerRelPos",
}
TORCHVISION = "torchvision.models.vision_transformer.VisionTransformer"
_FT_TRANSFORMER = "rtdl_revisiting_models.FTTransformer"


def is_a(module: nn.Module, *names: str) -> bool:
    """Whether the class of `module`, or one it derives from, has one of `names`; its library need not be imported."""
    return any(f"{kind.__module__}.{kind.__qualname__}" in names for kind in type(module).__mro__)


def named_inputs(model: nn.Module, inputs: ModelInputs) -> dict[str, Any]:
    """`inputs` by the names that the model's ``forward`` gives them.

    :raises ArgumentError: as :func:`as_arguments` does, or ``forward`` does not take them.
    """
    args, kwargs = as_arguments(model, inputs)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
        return arguments_of(model.forward, *args, **kwargs)
    except TypeError as error:
        takes = ", ".join(inspect.signature(model.forward).parameters)
        raise ArgumentError(
            f"{type(model).__name__} does not take these inputs ({error}); its arguments are {takes}"
        ) from None


def arguments_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What `function` is called with, by the names that it gives its arguments."""
    found = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    return found | found.get("kwargs", {})


def as_arguments(model: nn.Module, inputs: ModelInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How `inputs` are passed to a model: positional and keyword arguments.

    An ``FTTransformer`` has two tables, of which None stands for the one that is not passed.

    :raises ArgumentError: `inputs` are of another kind, hold an array that is no tensor, or no input at all.
    """
    if not isinstance(inputs, Mapping | Tensor | tuple | list):
        raise ArgumentError(f"inputs is a {type(inputs).__name__}; pass a mapping, a tuple or a tensor of torch")
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if kwargs or isinstance(inputs, Mapping) else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    for name, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, np.ndarray):
            raise ArgumentError(f"input {name} is an array of numpy; pass a tensor, torch.as_tensor(...) of it")
        if isinstance(value, Tensor) and value.ndim and len(value) == 0:
            raise ArgumentError(f"input {name} has shape {tuple(value.shape)}: there are no inputs; pass at least one")
    if is_a(model, _FT_TRANSFORMER):
        names = [*inspect.signature(model.forward).parameters]
        args = args + (None,) * (len(names) - len(args) if args else 0)
        kwargs = dict.fromkeys(() if args else names) | kwargs
    return args, kwargs


def images_of(model: nn.Module, named: Mapping[str, Any]) -> Tensor | None:
    """The batch of images among a model's inputs, shape (B, C, height, width), if there is one."""
    candidates = [named.get("pixel_values")] if isinstance(model, PreTrainedModel) else named.values()
    return next((value for value in candidates if isinstance(value, Tensor) and value.ndim == 4), None)


def patch_size(model: nn.Module) -> tuple[int, int] | None:
    """Height and width in pixels of the patches that a vision model of the three libraries cuts; None for others."""
    if isinstance(model, PreTrainedModel):
        size = getattr(model.config, "patch_size", None)
    elif is_a(model, *TIMM_VISION):
        size = model.patch_embed.feat_ratio(as_scalar=False)  # of hybrids, whose patches are of a map, in pixels too
    else:
        size = model.patch_size if is_a(model, TORCHVISION) else None
    return None if size is None else _sides(size, "patch")


def token_roles(model: nn.Module, inputs: ModelInputs) -> tuple[tuple[str, ...], ...]:
    """The role of every position of every input of a batch, from the model's config or class and the inputs.

    Images: prefix tokens, then patches. Text: padding is where ``attention_mask`` is 0, and where there is no mask,
    where the padding id is. Special tokens are known by the ids that the config names; the ids of BERT, DistilBERT and
    ELECTRA, which it does not name, are 101 and 102 in the vocabularies of Google's BERT. Other vocabularies may be as
    large, so every text has to begin with 101. For them the ids have to be set, as :func:`name_special_tokens` does. A
    decoder's begin and end tokens are separators.
    FT-Transformer: cls, then one content token a feature.

    :param model: as :func:`dobnb.capture.stream_attention` takes it; so are the `inputs`.
    :return: for each of the B inputs one of `ROLES` for each of the N positions, in order.
    :raises TokenError: roles that cannot be told.
    :raises ArgumentError: inputs of another form than is taken.
    """
    named = named_inputs(model, inputs)
    images, ids = images_of(model, named), named.get("input_ids")
    if isinstance(model, PreTrainedModel):
        if images is not None:
            return (image_token_roles(model.config, tuple(images.shape[-2:])),) * len(images)
        if isinstance(ids, Tensor) and ids.ndim == 2:
            return _text_roles(model.config, ids, named.get("attention_mask"))
    elif images is not None and is_a(model, *TIMM_VISION, TORCHVISION):
        return (_prefix(model) + (CONTENT,) * _patches(tuple(images.shape[-2:]), patch_size(model)),) * len(images)
    elif is_a(model, _FT_TRANSFORMER):
        continuous, categorical = named.get("x_cont"), named.get("x_cat")
        given = [table for table in (continuous, categorical) if table is not None]
        return ((CLS,) + (CONTENT,) * sum(table.shape[-1] for table in given),) * len(given[0])
    raise TokenError(
        f"the token roles of {type(model).__name__} are not known for these inputs; "
        "pass content=..., a mask over the tokens or a function of the batch that gives one"
    )


def _prefix(model: nn.Module) -> tuple[str, ...]:
    """The roles before the patches in a vision transformer of timm or torchvision."""
    if is_a(model, TORCHVISION):
        return (CLS,)
    tokens = [
        (role, getattr(model, name, None))
        for role, name in ((CLS, "cls_token"), (DISTILLATION, "dist_token"), (REGISTER, "reg_token"))
    ]
    return tuple(role for role, token in tokens if token is not None for _ in range(token.shape[1]))


def _text_roles(config: PreTrainedConfig, ids: Tensor, mask: Tensor | None) -> tuple[tuple[str, ...], ...]:
    encoder = config.model_type in _TEXT_ENCODERS
    first, last = _ids(config, "cls_token_id", "bos_token_id"), _ids(config, "sep_token_id", "eos_token_id")
    padding = ids.new_tensor(_ids(config, "pad_token_id"))
    real = torch.isin(ids, padding, invert=True) if mask is None else mask.bool()
    if real.shape != ids.shape:
        raise TokenError(
            f"attention_mask has shape {tuple(real.shape)}, the ids {tuple(ids.shape)}; pass one flag a token"
        )
    rows = list(zip(ids.tolist(), real.tolist(), strict=True))
    if not (first or last) or (encoder and not (first and last)):
        advice = (
            "set its cls_token_id and sep_token_id, or pass content=..., a mask over the tokens or a function of the "
            "batch"
        )
        if not _of_google(config):
            lacks = "names no special tokens" if not first and not last else "names but one of its special tokens"
            raise TokenError(f"the config of model type {config.model_type!r} {lacks}; {advice}")
        begins = [next((token for token, keep in zip(row, kept, strict=True) if keep), _BERT_CLS) for row, kept in rows]
        if other := [(i, token) for i, token in enumerate(begins) if token != _BERT_CLS]:
            raise TokenError(
                f"the vocabulary is as large as one of Google's, but input {other[0][0]} begins with the id "
                f"{other[0][1]}, not with {_BERT_CLS}, their [CLS], so its special tokens are not known; {advice}"
            )
        first, last = first or [_BERT_CLS], last or [_BERT_SEP]
    roles = []
    for row, kept in rows:
        roles.append(tuple(_role(token, keep, encoder, first, last) for token, keep in zip(row, kept, strict=True)))
    return tuple(roles)


def _role(token: int, real: bool, encoder: bool, first: list[int], last: list[int]) -> str:
    if not real:
        return PADDING
    if token in first and encoder:
        return CLS
    return SEPARATOR if token in first or token in last else CONTENT


def _ids(config: PreTrainedConfig, *names: str) -> list[int]:
    """The token ids that `config` gives under `names`."""
    values = [getattr(config, name, None) for name in names]
    return [token for value in values if value is not None for token in (value if isinstance(value, list) else [value])]


def _of_google(config: PreTrainedConfig) -> bool:
    """Whether the special tokens are those of Google's BERT, which no config names."""
    return config.model_type in _TEXT_ENCODERS and config.vocab_size in _BERT_VOCABULARIES


def lacks_special_tokens(model: nn.Module) -> bool:
    """Whether it is a text encoder whose config does not name how a text begins and how it ends."""
    if not isinstance(model, PreTrainedModel) or model.config.model_type not in _TEXT_ENCODERS:
        return False
    first, last = _ids(model.config, "cls_token_id", "bos_token_id"), _ids(model.config, "sep_token_id", "eos_token_id")
    return not (first and last)


def name_special_tokens(model: PreTrainedModel, cls: int | None, separator: int | None) -> None:
    """Write the ids of its vocabulary's special tokens into the config of a model, in memory, where it lacks them."""
    if lacks_special_tokens(model):
        model.config.cls_token_id, model.config.sep_token_id = cls, separator


def image_token_roles(config: PreTrainedConfig, image_size: int | Sequence[int] | None = None) -> tuple[str, ...]:
    """The role of every position when a transformers model of `config` reads one image: prefix tokens, then patches.

    DINOv2 at 224 px has 1 cls and 256 content tokens, and 4 registers between them where the model has registers.

    :param config: a transformers config of type beit, clip_vision_model, deit, dinov2, dinov2_with_registers or vit.
    :param image_size: side, or height and width, of the input in pixels. None takes the config's own, which for
        DINOv2 is the 518 px of its position embeddings, not the size it is fed.
    :return: one of `ROLES` for each of the N positions, in order.
    :raises TokenError: a model type it does not know, or sides that are not multiples of the patch.

    >>> from transformers import ViTConfig
    >>> image_token_roles(ViTConfig(image_size=32, patch_size=16))
    ('cls', 'content', 'content', 'content', 'content')
    """
    match config.model_type:
        case "beit" | "clip_vision_model" | "dinov2" | "vit":
            prefix = (CLS,)
        case "dinov2_with_registers":
            prefix = (CLS,) + (REGISTER,) * config.num_register_tokens
        case "deit":  # transformers' DeiT always has both; a DeiT without distillation is of type vit there
            prefix = (CLS, DISTILLATION)
        case other:
            raise TokenError(
                f"the token roles of model type {other!r} are not known; "
                "known are beit, clip_vision_model, deit, dinov2, dinov2_with_registers and vit; "
                "for others pass content=..., a mask over the tokens"
            )
    size = _sides(config.image_size if image_size is None else image_size, "image")
    return prefix + (CONTENT,) * _patches(size, _sides(config.patch_size, "patch"))


def _patches(image: tuple[int, int], patch: tuple[int, int]) -> int:
    """How many patches an image has, both given as height and width in pixels."""
    if image[0] % patch[0] or image[1] % patch[1]:
        raise TokenError(
            f"an image of {image[0]} x {image[1]} px does not divide into patches of {patch[0]} x {patch[1]}; "
            "crop or resize it to multiples of the patch"
        )
    return (image[0] // patch[0]) * (image[1] // patch[1])


def _sides(size: int | Sequence[int], what: str) -> tuple[int, int]:
    """Height and width of `size`, an int for a square."""
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or min(sides) < 1:
        raise TokenError(f"the {what} size is {size}; pass a positive side, or height and width")
    return sides


def content_mask(roles: Sequence[str]) -> torch.Tensor:
    """True where a token is content.

    :param roles: one of `ROLES` a position, as :func:`image_token_roles` returns them.
    :return: bool, shape (N,).
    :raises TokenError: a role that is not in `ROLES`.

    >>> content_mask(["cls", "content", "content"])
    tensor([False,  True,  True])
    """
    for position, role in enumerate(roles):
        if role not in ROLES:
            raise TokenError(f"position {position} has the role {role!r}; roles are {', '.join(ROLES)}")
    return torch.tensor([role == CONTENT for role in roles], dtype=torch.bool)


def token_names(roles: Sequence[str]) -> list[str]:
    """What each token is called in tables: by its role, with a number from 1 where there are several of it; content by
    its number alone.

    :param roles: one of `ROLES` a position, or another name of what is special.

    >>> token_names(["cls", "register", "register", "content", "content"])
    ['cls', 'reg#1', 'reg#2', '1', '2']
    """
    short = {CONTENT: "", REGISTER: "reg", SEPARATOR: "sep"}
    counts: dict[str, int] = {}
    names = []
    for role in roles:
        counts[role] = counts.get(role, 0) + 1
        name, number = short.get(role, role), counts[role]
        alone = role != CONTENT and roles.count(role) == 1
        names.append(name if alone else f"{name}#{number}" if name else str(number))
    return names


def role_map(roles: Sequence[str], *, words: Sequence[str] | None = None, width: int | None = None) -> str:
    """The roles as text. ``.`` content, ``C`` cls, ``R`` register, ``D`` distillation, ``|`` separator, ``-`` padding.

    :param roles: one of `ROLES` a position.
    :param words: the tokens of a sentence: one a line, its sign before it.
    :param width: patches in a row of the image: special tokens on the first line, then the patches row by row.
    :raises TokenError: a role that is not in `ROLES`, words that are not one a position, or uneven rows.

    >>> print(role_map(["cls", "register", "content", "content", "content", "content"], width=2))
    C R
    . .
    . .
    >>> print(role_map(["cls", "content", "separator"], words=["[CLS]", "green", "[SEP]"]))
    C [CLS]
    . green
    | [SEP]
    """
    content = content_mask(roles).tolist()
    signs = [_SIGNS[role] for role in roles]
    if words is not None:
        if len(words) != len(roles):
            raise TokenError(f"there are {len(words)} words for {len(roles)} positions; pass one a position")
        return "\n".join(f"{sign} {word}" for sign, word in zip(signs, words, strict=True))
    if width is None:
        return " ".join(signs)
    special = [sign for sign, inside in zip(signs, content, strict=True) if not inside]
    patches = sum(content)
    if width < 1 or patches % width:
        raise TokenError(f"{patches} patches do not fill rows of {width}; pass the image's width in patches")
    rows = [special] * bool(special) + [["."] * width] * (patches // width)
    return "\n".join(" ".join(row) for row in rows)
