"""Streamed attention of timm, torchvision, torch and rtdl against the libraries' own fused kernels, or the definition.

The reference for what ends in ``scaled_dot_product_attention`` is the softmax of what the library hands to that
function: the library's default path, of which ours, the unfused one, shares no line.
"""

import copy
import math

import pytest
import rtdl_revisiting_models as rtdl
import timm
import torch
from timm.models.vision_transformer import ParallelThingsBlock
from torch import nn
from torch.nn import functional
from torchvision.models import VisionTransformer as TorchvisionViT

from dobnb import capture
from dobnb.capture import stream_attention

TINY = dict(embed_dim=32, depth=3, num_heads=4, num_classes=5)
LAYERS = 3


def image(side):
    return lambda dtype: torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=dtype)


def sequences(dtype, shape=(2, 12, 32)):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def padded(dtype):
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 7:] = True
    return {"src": sequences(dtype), "src_key_padding_mask": padding}


def causal(dtype):
    mask = nn.Transformer.generate_square_subsequent_mask(12, dtype=dtype)
    return {"src": sequences(dtype), "mask": mask, "is_causal": True}


def rows(dtype):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 6, generator=generator, dtype=dtype), torch.randint(0, 4, (2, 2), generator=generator)


def encoder(batch_first=True, heads=4):
    layer = nn.TransformerEncoderLayer(32, heads, 48, dropout=0.1, batch_first=batch_first)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=batch_first)


def ft_transformer(dropout):
    sizes = dict(d_block=32, attention_n_heads=4, ffn_d_hidden_multiplier=4 / 3, ffn_dropout=0.0, residual_dropout=0.0)
    return rtdl.FTTransformer(
        n_cont_features=6, cat_cardinalities=[4, 4], d_out=1, n_blocks=LAYERS + 1, attention_dropout=dropout, **sizes
    )


def from_timm(name, side, **options):
    return lambda: timm.create_model(name, img_size=side, **TINY, **options)


FUSED = {
    "timm vit": (from_timm("vit_small_patch16_224", 32), image(32)),
    "timm vit, q and k normalised": (from_timm("vit_small_patch16_224", 32, qk_norm=True), image(32)),
    "timm vit, pooled by attention": (from_timm("vit_base_patch16_siglip_224", 32), image(32)),
    "timm reg4 dinov2": (from_timm("vit_small_patch14_reg4_dinov2", 28), image(28)),
    "timm deit": (from_timm("deit_tiny_patch16_224", 32), image(32)),
    "timm deit distilled": (from_timm("deit_tiny_distilled_patch16_224", 32), image(32)),
    "timm eva02": (from_timm("eva02_tiny_patch14_224", 28), image(28)),
    "timm rope": (from_timm("vit_betwixt_patch16_rope_reg4_gap_256", 32), image(32)),
    "timm beit": (from_timm("beit_base_patch16_224", 32), image(32)),
    "timm relpos": (from_timm("vit_relpos_base_patch16_cls_224", 32), image(32)),
    "torchvision vit": (
        lambda: TorchvisionViT(image_size=32, patch_size=8, num_layers=3, num_heads=4, hidden_dim=32, mlp_dim=48),
        image(32),
    ),
    "torch encoder": (encoder, sequences),
    "torch encoder, padded": (encoder, padded),
    "torch encoder, causal": (encoder, causal),
    "torch encoder, batch second": (lambda: encoder(batch_first=False), sequences),
}
MODELS = FUSED | {
    "rtdl": (lambda: ft_transformer(0.1), rows),
    "rtdl without dropout": (lambda: ft_transformer(0.0), rows),
}
pytestmark = pytest.mark.filterwarnings("ignore::dobnb.errors.CrossAttentionSkipped")


def build(name, dtype=torch.float32, scale=1.0):
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if "pos_embed" in name or parameter.abs().max() == 0:
                parameter.normal_(std=0.02)  # biases that begin as zeros would hide a bias that is left out
            parameter.mul_(scale)
    return model, inputs(dtype)


def plain(model, inputs):
    with torch.no_grad():
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def captured(model, inputs):
    layers = []

    def sink(layer, weights):
        assert layer == len(layers)
        layers.append(weights.clone())

    output = stream_attention(model, inputs, sink)
    return layers, output


def fused_attention(model, inputs, monkeypatch):
    """The softmax of the scores that a run of the model asks the fused kernel for, where all queries are keys."""
    found = []
    kernel = functional.scaled_dot_product_attention

    def recording(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
        assert dropout_p == 0
        scores = (query * query.shape[-1] ** -0.5) @ key.mT
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        if scores.shape[-1] == scores.shape[-2]:  # attention pooling is not
            found.append(scores.softmax(-1))
        return kernel(query, key, value, attn_mask=attn_mask, is_causal=is_causal)

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # on it, torch's encoder calls no function that could be replaced
    try:
        with monkeypatch.context() as patch:
            patch.setattr(functional, "scaled_dot_product_attention", recording)
            output = plain(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return found, output


def rtdl_attention(model, inputs):
    """softmax(q k^T / sqrt(d)) from what enters each block but the last, by the definition."""
    found, entering = [], []
    hooks = [
        block["attention"].register_forward_hook(lambda module, given, output: entering.append((module, given)))
        for block in model.backbone.blocks
    ]
    output = plain(model, inputs)
    for hook in hooks:
        hook.remove()
    for module, (x, y) in entering[:-1]:
        assert x is y
        q, k = ((x @ w.weight.T + w.bias).unflatten(-1, (4, 8)).transpose(1, 2) for w in (module.W_q, module.W_k))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(8)
        scores = scores - scores.amax(-1, keepdim=True)
        found.append(scores.exp() / scores.exp().sum(-1, keepdim=True))
    return found, output


def check_parity(name, monkeypatch, dtype, tolerance, scale=1.0):
    model, inputs = build(name, dtype, scale)
    expected, output = fused_attention(model, inputs, monkeypatch) if name in FUSED else rtdl_attention(model, inputs)
    layers, ours = captured(model, inputs)
    assert len(layers) == len(expected) == LAYERS
    for mine, theirs in zip(layers, expected, strict=True):
        assert mine.dtype == dtype and mine.shape == theirs.shape
        assert (mine - theirs).abs().max() <= tolerance
    assert ours.shape == output.shape
    return layers, (ours - output).abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", MODELS)
def test_parity(name, monkeypatch, dtype, tolerance):
    _, off = check_parity(name, monkeypatch, dtype, tolerance)
    assert off <= 100 * tolerance


@pytest.mark.parametrize("name", MODELS)
def test_parity_where_softmax_saturates(name, monkeypatch):
    layers, _ = check_parity(name, monkeypatch, torch.float64, 1e-12, scale=40.0)
    assert max(weights.max().item() for weights in layers) > 0.999


def test_the_definition_on_timms_projections():
    """q and k by hand from the first block's qkv, heads by slices; no attention code of the library takes part."""
    model, images = build("timm vit", torch.float64)
    layers, _ = captured(model, images)
    block = model.blocks[0]
    with torch.no_grad():
        x = block.norm1(model._pos_embed(model.patch_embed(images)))
        qkv = x @ block.attn.qkv.weight.T + block.attn.qkv.bias
        for head in range(4):
            q, k = (qkv[..., 32 * part + 8 * head : 32 * part + 8 * head + 8] for part in (0, 1))
            scores = q @ k.mT / math.sqrt(8)
            expected = scores.exp() / scores.exp().sum(-1, keepdim=True)
            assert (layers[0][:, head] - expected).abs().max() <= 1e-12


@pytest.mark.parametrize(
    ("dtype", "tolerance", "scale"), [(torch.float64, 1e-12, 1), (torch.float32, 1e-6, 1), (torch.float64, 1e-12, 40)]
)
def test_the_definition_on_torchs_projections(dtype, tolerance, scale):
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(32, 4, batch_first=True).eval().to(dtype), sequences(dtype)
    hidden = torch.tensor([[False] * 12, [False] * 7 + [True] * 5])
    with torch.no_grad():
        model.in_proj_weight.mul_(scale)
        model.in_proj_bias.normal_()
    layers, _ = captured(model, {"query": x, "key": x, "value": x, "key_padding_mask": hidden})
    with torch.no_grad():
        projected = x @ model.in_proj_weight.T + model.in_proj_bias
        q, k = (projected[..., 32 * part : 32 * part + 32].unflatten(-1, (4, 8)).transpose(1, 2) for part in (0, 1))
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(hidden[:, None, None], -torch.inf)
    assert (layers[0] - scores.softmax(-1)).abs().max() <= tolerance
    assert scale == 1 or layers[0].max() > 0.999


def test_torchs_own_weights_of_every_layer():
    model, x = build("torch encoder", torch.float64)
    layers, _ = captured(model, x)
    for layer, weights in zip(model.layers, layers, strict=True):
        with torch.no_grad():
            expected = layer.self_attn(x, x, x, need_weights=True, average_attn_weights=False)[1]
            x = layer(x)
        assert (weights - expected).abs().max() <= 1e-12


def test_padding_gets_no_attention():
    model, inputs = build("torch encoder, padded")
    for weights in captured(model, inputs)[0]:
        assert weights[1, :, :, 7:].max() == 0
        assert weights[0].min() > 0


def test_the_last_block_of_ft_transformer_is_left_out():
    """It queries the cls token alone. A model of four blocks has three square layers, as the paper counts them."""
    layers, _ = captured(*build("rtdl"))
    assert [tuple(weights.shape) for weights in layers] == [(2, 4, 9, 9)] * 3


@pytest.mark.parametrize("form", ["tensor", "by name"])
def test_ft_transformer_without_categories_needs_no_second_table(form):
    kwargs = rtdl.FTTransformer.get_default_kwargs(n_blocks=3)
    model = rtdl.FTTransformer(n_cont_features=6, cat_cardinalities=[], d_out=1, **kwargs).eval()
    x = rows(torch.float32)[0]
    expected = captured(model, (x, None))[0]
    layers = captured(model, x if form == "tensor" else {"x_cont": x})[0]
    assert len(layers) == 2 and all(torch.equal(a, b) for a, b in zip(layers, expected, strict=True))


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("need", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_multihead_attention_alone_returns_what_it_was_asked_for(batched, need, average):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = sequences(torch.float32) if batched else sequences(torch.float32, (12, 32))
    asked = {"query": x, "key": x, "value": x, "need_weights": need, "average_attn_weights": average}
    with torch.no_grad():
        expected = model(**asked)
        per_head = model(x, x, x, average_attn_weights=False)[1]
    seen = []

    def sink(layer, weights):
        seen.append(weights.clone())
        weights.zero_()

    output = stream_attention(model, asked, sink)
    assert torch.allclose(seen[0], per_head if batched else per_head.unsqueeze(0), atol=1e-6)
    assert (output[1] is None) == (expected[1] is None) == (not need)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(output, expected, strict=True) if b is not None)


# A model leaves as it came


def snapshot(model):
    """Everything that its modules have: attributes, and what is in those that are dictionaries, hooks among them."""
    return [
        {
            (key, inner): item
            for key, value in vars(module).items()
            for inner, item in (value.items() if isinstance(value, dict) else [(None, value)])
        }
        for module in model.modules()
    ]


def same(before, after):
    return len(before) == len(after) and all(
        a.keys() == b.keys() and all(a[key] is b[key] for key in a) for a, b in zip(before, after, strict=True)
    )


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_model_leaves_as_it_came(name, failing):
    model, inputs = build(name)
    state = copy.deepcopy(model.state_dict())
    expected, before = plain(model, inputs), snapshot(model)

    def sink(layer, weights):
        if failing and layer == 1:
            raise ZeroDivisionError
        assert not same(before, snapshot(model)), "the snapshot sees that the model is switched"

    if failing:
        with pytest.raises(ZeroDivisionError):
            stream_attention(model, inputs, sink)
    else:
        stream_attention(model, inputs, sink)
    assert same(before, snapshot(model))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(plain(model, inputs), expected)


@pytest.mark.parametrize("fast", [True, False])
def test_torchs_fast_path_is_as_it_was(fast):
    model, inputs = build("torch encoder")
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(fast)
        captured(model, inputs)
        assert torch.backends.mha.get_fastpath_enabled() == fast
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("name", MODELS)
def test_runs_in_a_row_nested_runs_and_a_sink_that_overwrites(name):
    model, inputs = build(name)
    expected, output = captured(model, inputs)
    seen = []

    def sink(layer, weights):
        seen.append(weights.clone())
        plain(model, inputs)  # no part of this run
        inner, _ = captured(model, inputs)
        assert all(torch.equal(a, b) for a, b in zip(inner, expected, strict=True))
        weights.zero_()

    again = stream_attention(model, inputs, sink)
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    assert torch.equal(again, output)


# Skipped, and said so


@pytest.mark.filterwarnings("default::dobnb.errors.CrossAttentionSkipped")
def test_pooling_by_attention_is_skipped_and_said_so():
    model, inputs = build("timm vit, pooled by attention")
    with pytest.warns(capture.CrossAttentionSkipped, match="AttentionPoolLatent"):
        assert len(captured(model, inputs)[0]) == 3


@pytest.mark.filterwarnings("default::dobnb.errors.CrossAttentionSkipped")
def test_a_decoder_of_torch():
    """Self-attention is handed out; attention to the memory, as long as the target, is not."""
    torch.manual_seed(0)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 48, batch_first=True), 3).eval()
    target, memory = sequences(torch.float32), sequences(torch.float32).flip(0)
    with pytest.warns(capture.CrossAttentionSkipped, match="MultiheadAttention"):
        layers, output = captured(model, (target, memory))
    with torch.no_grad():
        expected = model.layers[0].self_attn(target, target, target, average_attn_weights=False)[1]
        assert torch.allclose(output, model(target, memory), atol=1e-5)
    assert len(layers) == 3 and torch.allclose(layers[0], expected, atol=1e-6)


class Block(nn.Module):
    """Attention whose queries, keys and values come as `call` makes them of x and of positions; `name` is its name."""

    def __init__(self, call, name="attention", **options):
        super().__init__()
        torch.manual_seed(0)
        setattr(self, name, nn.MultiheadAttention(32, 4, batch_first=True, **options))
        self.call, self.name = call, name

    def forward(self, x):
        positions = torch.linspace(-1, 1, 12)[:, None].to(x)
        return self.call(getattr(self, self.name), x, positions)[0]


OF_ITS_OWN = {
    "one tensor": (lambda attend, x, at: attend(x, x, x), "attention"),
    "equal tensors": (lambda attend, x, at: attend(x + at, x + at, x + at), "attention"),
    "positions on queries and keys": (lambda attend, x, at: attend(x + at, x + at, x), "attention"),
    "positions on queries alone": (lambda attend, x, at: attend(x + at, x, x), "self_attn"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", OF_ITS_OWN)
def test_self_attention_is_known_by_its_numbers_or_its_name(case):
    call, name = OF_ITS_OWN[case]
    model, x = Block(call, name).eval(), sequences(torch.float64)
    model.double()
    layers, _ = captured(model, x)
    with torch.no_grad():
        attend = getattr(model, name)
        expected = call(
            lambda *given: attend(*given, average_attn_weights=False), x, torch.linspace(-1, 1, 12)[:, None]
        )
    assert len(layers) == 1 and (layers[0] - expected[1]).abs().max() <= 1e-12


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (lambda attend, x, at: attend(x + at, x, x), {}),
        (lambda attend, x, at: attend(x, x.flip(0), x.flip(0)), {}),
        (lambda attend, x, at: attend(x, x[..., :16], x[..., :16]), {"kdim": 16, "vdim": 16}),
    ],
)
def test_what_could_be_either_is_refused(call, options):
    refused("AmbiguousAttentionError", "attention gets queries and keys that differ", Block(call, **options).eval(),
            sequences(torch.float32))  # fmt: skip


@pytest.mark.filterwarnings("default::dobnb.errors.CrossAttentionSkipped")
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda attend, x, at: attend(x, x.flip(0), x.flip(0)), "cross_attn"),
        (lambda attend, x, at: attend(x, x[:, :6], x[:, :6]), "attention"),  # as Linformer projects its keys
    ],
)
def test_no_layer_at_all_is_an_error(call, name):
    with pytest.warns(capture.CrossAttentionSkipped):
        refused("NoAttentionError", "every attention of Block was skipped", Block(call, name).eval(),
                sequences(torch.float32))  # fmt: skip


@pytest.mark.filterwarnings("default::dobnb.errors.CrossAttentionSkipped")
def test_a_decoders_layer_as_detr_writes_it():
    """Positions on queries and keys, or on queries alone; attention to a memory as long as the queries lies between."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = nn.MultiheadAttention(32, 4, batch_first=True)
            self.multihead_attn = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x, memory, at):
            x = x + self.self_attn(x + at, x, x)[0]
            return x + self.multihead_attn(x + at, memory + at, memory)[0]

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x):
            at, memory = torch.linspace(-1, 1, 12)[:, None], x.flip(0)
            for layer in self.layers:
                x = layer(x, memory, at)
            return x

    torch.manual_seed(0)
    model, x = Decoder().eval(), sequences(torch.float32)
    with pytest.warns(capture.CrossAttentionSkipped):
        layers, _ = captured(model, x)
    with torch.no_grad():
        first = model.layers[0].self_attn(x + torch.linspace(-1, 1, 12)[:, None], x, x, average_attn_weights=False)[1]
    assert len(layers) == 2 and (layers[0] - first).abs().max() <= 1e-6


def test_values_of_another_width_are_no_matter():
    model = Block(lambda attend, x, at: attend(x, x, x[..., :16]), vdim=16).eval()
    assert captured(model, sequences(torch.float32))[0][0].shape == (2, 4, 12, 12)


# Padding


def hidden_tokens(model, inputs):
    found = []
    stream_attention(model, inputs, lambda layer, weights: None, on_padding=lambda padding: found.append(padding))
    assert len(found) == 1
    return found[0].tolist()


NONE = [[False] * 12] * 2
SECOND = [[False] * 12, [False] * 7 + [True] * 5]


@pytest.mark.parametrize(
    ("name", "expected"), [("torch encoder", NONE), ("torch encoder, padded", SECOND), ("torch encoder, causal", NONE)]
)
def test_padding_is_what_no_token_sees(name, expected):
    assert hidden_tokens(*build(name)) == expected


@pytest.mark.parametrize("low", [-200.0, -1000.0, -9999.0, -1e4, -1e9, -torch.inf])
def test_a_float_mask_is_padding_where_no_weight_is_left(low):
    """exp(-200) is 0 in float32, beside scores of this size."""
    model, inputs = build("torch encoder, padded")
    inputs["src_key_padding_mask"] = torch.zeros(2, 12).masked_fill(inputs["src_key_padding_mask"], low)
    assert captured(model, inputs)[0][2][1, ..., 7:].max() == 0
    assert hidden_tokens(model, inputs) == SECOND


@pytest.mark.parametrize("low", [-20.0, -50.0, -90.0])
def test_a_float_mask_that_leaves_a_little_weight_is_refused(low):
    model, inputs = build("torch encoder, padded")
    inputs["src_key_padding_mask"] = torch.zeros(2, 12).masked_fill(inputs["src_key_padding_mask"], low)
    refused("PaddingError", "lowers token 7 of input 1 for all by 20 or more", model, inputs)


def test_a_bias_by_position_hides_nothing():
    """ALiBi takes more from tokens farther away, and nothing from a token itself."""
    model, x = build("torch encoder")
    at = torch.arange(12.0)
    bias = -100 * (at[:, None] - at).abs()
    assert (captured(model, {"src": x, "mask": bias})[0][0] == 0).any()
    assert hidden_tokens(model, {"src": x, "mask": bias}) == NONE


@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_of_torch_of_every_kind(batch_first):
    """Boolean and additive, of keys and of pairs, one for all heads and one for each, alone and together."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(32, 4, batch_first=batch_first).eval()
    x = sequences(torch.float32) if batch_first else sequences(torch.float32).transpose(0, 1)
    keys = torch.tensor(SECOND)
    low = torch.zeros(keys.shape).masked_fill(keys, -torch.inf)
    causal = torch.ones(12, 12, dtype=torch.bool).triu(1)
    pairs = keys[:, None, None].expand(2, 4, 12, 12).flatten(0, 1)
    for masks in (
        {"key_padding_mask": keys},
        {"key_padding_mask": low},
        {"attn_mask": pairs},
        {"attn_mask": torch.zeros(pairs.shape).masked_fill(pairs, -1e30)},
        {"key_padding_mask": keys, "attn_mask": causal},
    ):
        assert hidden_tokens(model, {"query": x, "key": x, "value": x} | masks) == SECOND
    one = x[1] if batch_first else x[:, 1]
    assert hidden_tokens(model, {"query": one, "key": one, "value": one, "key_padding_mask": keys[1]}) == SECOND[1:]


def test_the_mask_of_timm():
    model, images = build("timm eva02")
    mask = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    mask[..., 4] = False
    seen = []
    model.forward = lambda x: model.forward_features(x, attn_mask=mask)
    stream_attention(model, images, lambda layer, weights: seen.append(weights[..., 4].max().item()),
                     on_padding=lambda padding: seen.append(padding.tolist()))  # fmt: skip
    assert seen == [[[False] * 4 + [True]] * 2, 0, 0, 0]


def test_layers_that_hide_different_tokens():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))

        def forward(self, x):
            for hidden, layer in zip(torch.tensor([NONE, SECOND]), self.layers, strict=True):
                x = layer(x, x, x, key_padding_mask=hidden)[0]
            return x

    refused("PaddingError", "layer 1: the mask hides token 7 of input 1", Two().eval(), sequences(torch.float32))


# Refusals


def test_an_input_that_is_padding_alone():
    """torch makes its rows NaN."""
    model, inputs = build("torch encoder, padded")
    inputs["src_key_padding_mask"][1] = True
    refused("MaskedRowError", "input 1 of the batch is padding alone", model, inputs)


@pytest.mark.parametrize("low", [-torch.inf, -1e30, -1e9])
def test_a_float_mask_that_is_low_throughout(low):
    model, x = build("torch encoder")
    mask = torch.zeros(12, 12)
    mask[4] = low
    refused("MaskedRowError", "leaves token 4 of input 0 nothing", model, {"src": x, "mask": mask})


class Stubborn(nn.MultiheadAttention):
    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None,
                average_attn_weights=True, is_causal=False):  # fmt: skip
        return super().forward(query, key, value, need_weights=False)


class Averaging(nn.MultiheadAttention):
    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None,
                average_attn_weights=True, is_causal=False):  # fmt: skip
        return super().forward(query, key, value)


class Short(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Stubborn, "Stubborn does not give every head's weights"),
        (Averaging, "Averaging does not give every head's weights"),
        (Short, "Short takes other arguments"),
    ],
)
def test_classes_derived_from_torchs_attention(kind, match):
    x = sequences(torch.float32)
    given = x if kind is Short else (x, x, x)
    refused("UnsupportedModelError", match, kind(32, 4, batch_first=True).eval(), given)


@pytest.mark.parametrize("name", ["torch encoder, padded", "timm vit"])
def test_autocast(name):
    model, inputs = build(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refused("HalfPrecisionError", "leave autocast off", model, inputs)


def refused(error, match, model, inputs):
    before = snapshot(model)
    with pytest.raises(capture.CaptureError, match=match) as caught:
        stream_attention(model, inputs, lambda layer, weights: None)
    assert type(caught.value) is getattr(capture, error) and "\n" not in str(caught.value)
    assert same(before, snapshot(model))


@pytest.mark.parametrize(
    ("error", "name", "match"),
    [
        ("WindowedAttentionError", "swin_tiny_patch4_window7_224", "within windows .WindowAttention"),
        ("WindowedAttentionError", "swinv2_tiny_window8_256", "within windows .WindowAttention"),
        ("CompressedAttentionError", "xcit_nano_12_p16_224", "XCA of timm.models.xcit"),  # channels attend to channels
        ("CompressedAttentionError", "pvt_v2_b0", "Attention of timm.models.pvt_v2"),
        ("CompressedAttentionError", "mobilevitv2_050", "LinearSelfAttention"),
        ("CompressedAttentionError", "pit_ti_224", "on 197 tokens, on 730 before"),
        ("UnsupportedModelError", "resnet18", "no self-attention"),
    ],
)
def test_timm_models_without_one_square_matrix_a_layer(error, name, match):
    model = timm.create_model(name).eval()
    refused(error, match, model, torch.rand(1, 3, *model.default_cfg["input_size"][1:]))


def test_two_attentions_a_block():
    model = from_timm("vit_small_patch16_224", 32, block_fn=ParallelThingsBlock)().eval()
    refused("LayerCountError", "has 3 blocks, but 6 attentions", model, torch.rand(1, 3, 32, 32))


def test_windows_of_ones_own_around_torchs_attention():
    """Nothing in the names says windows; more matrices than images do."""

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(12, 2, batch_first=True)

        def forward(self, images):
            x = images.flatten(1).unflatten(1, (-1, 4, 12)).flatten(0, 1)
            return self.attention(x, x, x)[0]

    images = torch.rand(2, 3, 32, 32)
    refused("WindowedAttentionError", "128 attention matrices a head for 2 images", Cut().eval(), images)


class Towers(nn.Module):
    """Two stacks, or one on two inputs."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.first(x) + self.second(x.flip(0))


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [(encoder, sequences), (from_timm("vit_small_patch16_224", 32), image(32)), MODELS["torchvision vit"]],
)
def test_two_towers(kind, inputs):
    model, x = Towers(kind(), kind()).eval(), inputs(torch.float32)
    refused("UnsupportedModelError", "attends in several parts, first, second", model, x)
    refused("UnsupportedModelError", "in several parts, 0.first, 0.second", nn.Sequential(model).eval(), x)
    assert len(captured(model.second, x)[0]) == LAYERS


def test_one_tower_on_two_inputs():
    one = encoder()
    refused("UnsupportedModelError", "layers.0.self_attn ran twice", Towers(one, one).eval(), sequences(torch.float32))


def test_stacks_one_after_another():
    """A Sequential says that they are, wherever it lies, and that layers of one's own count in the order they run."""
    x = sequences(torch.float32)
    model = nn.Sequential(encoder(), nn.LayerNorm(32), encoder()).eval()
    expected = captured(model[0], x)[0] + captured(model[2], model[1](model[0](x)))[0]
    for one in (model, nn.Sequential(model, nn.Linear(32, 1)).eval()):
        layers = captured(one, x)[0]
        assert len(layers) == 2 * LAYERS
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(layers, expected, strict=True))


def test_a_name_with_window_in_it():
    class Windowing(nn.Module):
        def forward(self, x):
            return x[:, -5:]

    x = sequences(torch.float32)
    assert captured(nn.Sequential(Windowing(), encoder()).eval(), x)[0][0].shape[-1] == 5


class Parts(nn.Module):
    """Runs `parts` pieces of every sequence as a batch; of -1, all inputs as one sequence."""

    def __init__(self, parts):
        super().__init__()
        self.inner, self.parts = encoder(), parts

    def forward(self, x):
        pieces = x.flatten(0, 1).unsqueeze(0) if self.parts < 0 else x.unflatten(1, (self.parts, -1)).flatten(0, 1)
        return self.inner(pieces).view_as(x)


@pytest.mark.parametrize(("parts", "matrices"), [(3, 6), (-1, 1)])
def test_parts_of_inputs_and_inputs_that_are_mixed(parts, matrices):
    x = sequences(torch.float32)
    assert len(captured(Parts(1).eval(), x)[0]) == LAYERS
    refused("BatchError", f"{matrices} attention matrices a head for 2 inputs", Parts(parts).eval(), x)


def test_linformer_compression():
    model = rtdl.MultiheadAttention(
        d_embedding=32, n_heads=4, dropout=0.0, n_tokens=12, linformer_kv_compression_ratio=0.5,
        linformer_kv_compression_sharing="headwise",
    )  # fmt: skip
    x = sequences(torch.float32)
    refused("CompressedAttentionError", "linformer", model.eval(), (x, x))


def test_one_block_of_ft_transformer_has_no_square_layer():
    model = ft_transformer(0.1)
    model.backbone.blocks = model.backbone.blocks[:1]
    refused("UnsupportedModelError", "no self-attention", model.eval(), rows(torch.float32))


def test_encoder_and_decoder_in_one():
    model = nn.Transformer(32, 4, 1, 1, 48, batch_first=True).eval()
    x = sequences(torch.float32)
    refused("UnsupportedModelError", "Transformer is an nn.Transformer", model, (x, x))
    held = nn.ModuleDict({"inner": model}).eval()
    refused("UnsupportedModelError", "ModuleDict holds an nn.Transformer", held, (x, x))


def test_added_keys():
    model = nn.MultiheadAttention(32, 4, add_zero_attn=True).eval()
    x = sequences(torch.float32)
    refused("CompressedAttentionError", r"shape \(12, 4, 2, 3\)", model, (x, x, x))


def test_attention_that_does_not_run():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.MultiheadAttention(32, 4), nn.MultiheadAttention(32, 4)

        def forward(self, x):
            return self.used(x, x, x)[0]

    refused("LayerCountError", "1 attention modules of Half did not run, idle", Half().eval(), sequences(torch.float32))


def test_a_row_that_is_masked_throughout():
    model, inputs = build("torch encoder, padded")
    inputs["mask"] = torch.zeros(12, 12, dtype=torch.bool)
    inputs["mask"][4] = True
    refused("MaskedRowError", "leaves token 4 of input 0 nothing", model, inputs)


@pytest.mark.parametrize("name", ["timm vit", "torchvision vit", "torch encoder"])
def test_nan(name):
    model, inputs = build(name)
    inputs.flatten()[5] = torch.nan
    refused("NotFiniteError", "NaN or infinite", model, inputs)


@pytest.mark.parametrize("name", MODELS)
def test_training_mode(name):
    model, inputs = build(name)
    next(module for module in model.modules() if isinstance(module, nn.Linear)).train()
    refused("TrainingModeError", "in training mode", model, inputs)


def test_image_sides():
    model = timm.create_model("vit_small_patch16_224", dynamic_img_size=True, dynamic_img_pad=True, img_size=32, **TINY)
    plain(model.eval(), torch.rand(1, 3, 40, 48))  # timm pads it without a word
    refused("ImageSizeError", "40 x 48 px, no multiples of the patch of 16 x 16", model, torch.rand(1, 3, 40, 48))


# The traps behind the public reports


def test_trap_hooks_on_timms_dropout_never_fire():
    """The fused kernel has dropout inside; and switching it off for new models leaves those at hand as they are."""
    model, images = build("timm vit")
    calls = []
    hook = model.blocks[0].attn.attn_drop.register_forward_hook(lambda *given: calls.append(given))
    plain(model, images)
    timm.layers.set_fused_attn(False)
    try:
        plain(model, images)
    finally:
        timm.layers.set_fused_attn(True)
    assert calls == []
    hook.remove()
    assert len(captured(model, images)[0]) == 3


def test_trap_hooks_on_torchs_attention_get_no_weights():
    model, inputs = build("torch encoder")
    seen = []
    hook = model.layers[0].self_attn.register_forward_hook(lambda module, given, output: seen.append(output[1]))
    plain(model, inputs)
    hook.remove()
    assert seen == [None]
    assert len(captured(model, inputs)[0]) == 3
