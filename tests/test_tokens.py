"""Token roles, held against the sequence that a real model makes of an image."""

import pytest
import torch
from transformers import (
    BeitConfig,
    DeiTConfig,
    DeiTModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    ViTConfig,
    ViTModel,
)

from dobnb.tokens import CLS, CONTENT, DISTILLATION, REGISTER, TokenError, content_mask, image_token_roles

TINY = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, patch_size=4, image_size=16)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (Dinov2Model, Dinov2Config(**TINY)),
        (Dinov2WithRegistersModel, Dinov2WithRegistersConfig(**TINY, num_register_tokens=3)),
        (ViTModel, ViTConfig(**TINY, intermediate_size=8)),
        (DeiTModel, DeiTConfig(**TINY, intermediate_size=8)),
    ],
)
@torch.no_grad()
def test_content_tokens_are_the_ones_an_image_reaches_before_attention(model, config):
    """With one pixel of each patch changed, exactly the embeddings of content tokens change."""
    embed = model(config).eval().embeddings
    blank = torch.zeros(1, 3, 16, 16)
    image = blank.clone()
    image[:, :, ::4, ::4] = 1
    changed = (embed(image) != embed(blank)).any(-1)[0]
    assert changed.tolist() == content_mask(image_token_roles(config)).tolist()


def test_dinov2_at_224_px():
    size = dict(image_size=518, patch_size=14)
    assert image_token_roles(Dinov2Config(**size), 224) == (CLS,) + (CONTENT,) * 256
    assert image_token_roles(Dinov2WithRegistersConfig(**size), 224) == (CLS,) + (REGISTER,) * 4 + (CONTENT,) * 256
    assert len(image_token_roles(Dinov2Config(**size))) == 1 + 37 * 37


def test_deit_has_two_prefix_tokens():
    assert image_token_roles(DeiTConfig())[:3] == (CLS, DISTILLATION, CONTENT)
    assert len(image_token_roles(DeiTConfig())) == 2 + 196


def test_sides_may_differ():
    assert len(image_token_roles(Dinov2Config(patch_size=14), (28, 70))) == 1 + 2 * 5


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (BeitConfig(), None, "'beit' are not known"),
        (Dinov2Config(patch_size=14), 225, "225 x 225 px does not divide"),
        (Dinov2Config(patch_size=14), (224, 230), "224 x 230 px does not divide"),
        (Dinov2Config(patch_size=14), 0, "image size is 0"),
        (Dinov2Config(patch_size=14), (14, 14, 14), "image size is"),
    ],
)
def test_what_cannot_be_told_is_refused(config, size, message):
    with pytest.raises(TokenError, match=message):
        image_token_roles(config, size)


def test_a_role_that_is_none_is_refused():
    with pytest.raises(TokenError, match="position 1 has the role 'patch'"):
        content_mask(["cls", "patch"])
