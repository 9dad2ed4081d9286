"""Token roles: what each position of a vision transformer's sequence is, and which positions are content.

*Content* tokens are image patches (book: def-content; the paper's M4); cls, register and distillation tokens are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from dobnb.errors import DobnbError

CONTENT = "content"
CLS = "cls"
REGISTER = "register"
DISTILLATION = "distillation"
SEPARATOR = "separator"
PADDING = "padding"
ROLES = (CONTENT, CLS, REGISTER, DISTILLATION, SEPARATOR, PADDING)


class TokenError(DobnbError, ValueError):
    """The roles of a model's tokens cannot be told, or what was passed as roles is none."""


def image_token_roles(config: PreTrainedConfig, image_size: int | Sequence[int] | None = None) -> tuple[str, ...]:
    """The role of every position when a vision transformer of `config` reads one image: prefix tokens, then patches.

    DINOv2 at 224 px has 1 cls and 256 content tokens, and 4 registers between them where the model has registers.

    :param config: a transformers config of type dinov2, dinov2_with_registers, vit or deit.
    :param image_size: side, or height and width, of the input in pixels. None takes the config's own, which for
        DINOv2 is the 518 px of its position embeddings, not the size it is fed.
    :return: one of `ROLES` for each of the N positions, in order.
    :raises TokenError: a model type it does not know, or sides that are not multiples of the patch.

    >>> from transformers import ViTConfig
    >>> image_token_roles(ViTConfig(image_size=32, patch_size=16))
    ('cls', 'content', 'content', 'content', 'content')
    """
    match config.model_type:
        case "dinov2" | "vit":
            prefix = (CLS,)
        case "dinov2_with_registers":
            prefix = (CLS,) + (REGISTER,) * config.num_register_tokens
        case "deit":  # transformers' DeiT always has both; a DeiT without distillation is of type vit there
            prefix = (CLS, DISTILLATION)
        case other:
            raise TokenError(
                f"the token roles of model type {other!r} are not known; "
                "known are dinov2, dinov2_with_registers, vit and deit"
            )
    height, width = _sides(config.image_size if image_size is None else image_size, "image")
    patch_height, patch_width = _sides(config.patch_size, "patch")
    if height % patch_height or width % patch_width:
        raise TokenError(
            f"an image of {height} x {width} px does not divide into patches of {patch_height} x {patch_width}; "
            "crop or resize it to multiples of the patch"
        )
    return prefix + (CONTENT,) * ((height // patch_height) * (width // patch_width))


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
