"""What cannot be streamed is refused, each with an error of its own, in one line, and the model stays as it was."""

import pytest
import torch
import transformers as tf
from test_capture import TEXT, VISION, build, pixels, words
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dobnb import capture
from dobnb.capture import stream_attention
from dobnb.errors import DobnbError


def refused(error, match, model, inputs, sink=lambda layer, weights: None, **options):
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(capture.CaptureError, match=match) as caught:
        stream_attention(model, inputs, sink, **options)
    assert type(caught.value) is getattr(capture, error)
    assert "\n" not in str(caught.value)
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before


def test_every_error_is_one_of_the_family():
    errors = [getattr(capture, name) for name in capture.__all__ if name.endswith("Error")]
    assert len(errors) == 19
    assert all(issubclass(error, capture.CaptureError) and issubclass(error, DobnbError) for error in errors)


# Models


def test_what_is_no_model():
    refused("UnsupportedModelError", "list is no torch module", [], {})
    refused("UnsupportedModelError", "Linear has no self-attention", nn.Linear(2, 2).eval(), torch.ones(1, 2))


class Holder(nn.Module):
    """A model of transformers inside one's own, which makes its inputs larger; another part may attend as well."""

    def __init__(self, inner, other=None):
        super().__init__()
        self.inner, self.other = inner, other

    def forward(self, images):
        return self.inner(nn.functional.interpolate(images, scale_factor=0.5))


def test_a_transformers_model_inside_another_module_is_held_against_what_it_gets():
    model = Holder(build("dinov2")[0]).eval()
    stream_attention(model, torch.rand(1, 3, 32, 64), lambda layer, weights: None)
    refused("ImageSizeError", "images are 15 x 32 px", model, torch.rand(1, 3, 30, 64))
    assert "forward" not in vars(model.inner)


def test_two_stacks_of_layers():
    several = "attends in several parts, inner .Dinov2Model., other"
    for other in (nn.MultiheadAttention(24, 4), build("vit")[0]):
        refused("UnsupportedModelError", several, Holder(build("dinov2")[0], other).eval(), torch.rand(1, 3, 64, 64))


def test_a_model_in_training_mode_stays_in_it():
    model, inputs = build("dinov2")
    model.encoder.layer[2].train()
    refused("TrainingModeError", "in training mode", model, inputs)
    assert model.encoder.layer[2].training and not model.training


@pytest.mark.filterwarnings("ignore")  # that tracing is deprecated
def test_a_compiled_model():
    model, inputs = build("dinov2")
    refused("CompiledModelError", "is compiled", torch.compile(model), inputs)
    layer = model.encoder.layer[2]
    layer.forward = torch.compile(layer.forward)
    refused("CompiledModelError", "is compiled", model, inputs)
    del layer.forward
    model.encoder.layer[1].compile()
    refused("CompiledModelError", "is compiled", model, inputs)
    with torch.no_grad():
        traced = torch.jit.trace(nn.MultiheadAttention(8, 2).eval(), (torch.rand(3, 2, 8),) * 3)
    refused("CompiledModelError", "is compiled", traced, (torch.rand(3, 2, 8),) * 3)


def test_windowed_attention():
    config = tf.SwinConfig(embed_dim=12, depths=[1, 1], num_heads=[2, 2], image_size=32, patch_size=4, window_size=4)
    model = tf.SwinModel(config).eval()
    refused("WindowedAttentionError", "8 attention matrices a head for 2 images", model, pixels())


def test_windows_that_transformers_cannot_switch():
    config = tf.Swinv2Config(embed_dim=12, depths=[1], num_heads=[2], image_size=32, patch_size=4, window_size=4)
    refused("WindowedAttentionError", "Swinv2Model attends within windows", tf.Swinv2Model(config).eval(), pixels())


@pytest.mark.parametrize("kind", ["Bloom", "Falcon", "MPNet", "RoFormer"])
def test_attention_that_transformers_cannot_switch(kind):
    sizes = {key: value for key, value in TEXT.items() if key != "intermediate_size"}
    config = getattr(tf, f"{kind}Config")(**sizes)
    model = getattr(tf, f"{kind}Model")(config).eval()
    refused("NoAttentionError", f"no layer of {kind}Model gave attention", model, words())


def test_a_model_without_softmax():
    model = tf.FNetModel(tf.FNetConfig(**{k: v for k, v in TEXT.items() if k != "num_attention_heads"})).eval()
    refused("NoAttentionError", "no layer of FNetModel gave attention", model, words()["input_ids"])


def test_compressed_attention():
    model = tf.SegformerModel(tf.SegformerConfig(depths=[1] * 4)).eval()
    refused("CompressedAttentionError", r"shape \(2, 1, 64, 1\)", model, pixels())


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_cached_keys():
    model, inputs = build("gpt2")
    inputs.pop("attention_mask")
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    given = {"input_ids": inputs["input_ids"][:, :1], "past_key_values": cache}
    refused("CompressedAttentionError", r"layer 0: attention has shape \(2, 4, 1, 13\)", model, given)


def test_output_attentions():
    model, inputs = build("dinov2", attention="eager")
    refused("KeptAttentionError", "the sink receives them all", model, inputs | {"output_attentions": True})
    model.config.output_attentions = True
    refused("KeptAttentionError", "the sink receives them all", model, inputs)


def test_attention_without_an_eager_function():
    """An attention class of one's own that asks transformers for its function, but brings no eager one."""

    class Foreign(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config

        def forward(self, hidden_states, attention_mask=None, **kwargs):
            function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
            heads = hidden_states.unflatten(-1, (4, 6)).transpose(1, 2)
            output, weights = function(self, heads, heads, heads, attention_mask, scaling=1.0)
            return output.flatten(2), weights

    model, inputs = build("dinov2")
    model.encoder.layer[0].attention = Foreign(model.config).eval()
    refused("UnsupportedModelError", "Foreign comes without an eager attention function", model, inputs)


def test_a_layer_that_gives_no_attention_is_noticed():
    """It could be one with an attention of its own, as some models have."""

    class Silent(nn.Module):
        def forward(self, hidden_states, **kwargs):
            return hidden_states, None

    model, inputs = build("dinov2")
    model.encoder.layer[1].attention = Silent().eval()
    refused("LayerCountError", "has 3 layers by its config, but 2 gave attention", model, inputs)


def test_a_model_that_lost_a_layer_or_runs_twice():
    model, inputs = build("bert")

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input_ids):
            return self.inner(input_ids), self.inner(input_ids)

    ids = {"input_ids": inputs["input_ids"]}
    refused("LayerCountError", "3 layers by its config, but 6 gave attention: it ran on several", Twice().eval(), ids)
    model.encoder.layer = model.encoder.layer[:2].eval()
    refused("LayerCountError", "set its config.num_hidden_layers to 2", model, inputs)
    model.config.num_hidden_layers = 2
    stream_attention(model, inputs, lambda layer, weights: None)


def test_a_part_of_a_transformers_model():
    model, _ = build("bert")
    refused("UnsupportedModelError", "BertEncoder is or holds a part", model.encoder, torch.rand(2, 5, 24))


def masked_autoencoder():
    config = tf.ViTMAEConfig(
        **VISION, intermediate_size=32, mask_ratio=0.0, decoder_hidden_size=24, decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4, decoder_intermediate_size=32,
    )  # fmt: skip
    return tf.ViTMAEForPreTraining(config).eval()


def test_a_second_stack_under_a_copy_of_the_config():
    """It runs under sdpa, which keeps no weights, while the first stack alone has as many layers as the config says."""
    model = masked_autoencoder()
    refused("UnsupportedModelError", "no single stack of layers: decoder.* pass model.vit", model, pixels())
    assert model.decoder.decoder_layers[0].attention.config._attn_implementation == "sdpa"
    seen = []
    stream_attention(model.vit, pixels(), lambda layer, weights: seen.append(layer))
    assert seen == [0, 1, 2]


# Inputs


@pytest.mark.parametrize("size", [(30, 32), (32, 75)])
def test_sides_that_are_no_multiple_of_the_patch(size):
    """transformers drops the rest of the image without a word."""
    model, _ = build("dinov2")
    images = torch.rand(1, 3, *size)
    with torch.no_grad():
        assert model(pixel_values=images).last_hidden_state.shape[1] == 1 + (size[0] // 8) * (size[1] // 8)
    refused("ImageSizeError", f"{size[0]} x {size[1]} px, no multiples", model, {"pixel_values": images})


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_padding_without_a_mask(name):
    model, inputs = build(name)
    pad = model.config.pad_token_id
    ids = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, pad)
    refused("PaddingError", f"hold the padding id {pad}", model, {"input_ids": ids})
    refused("PaddingError", f"hold the padding id {pad}", model, ids)
    stream_attention(model, {"input_ids": ids, "attention_mask": inputs["attention_mask"]}, lambda layer, weights: None)


@pytest.mark.parametrize(("name", "positions"), [("bert", 40), ("gpt2", 40), ("llama", 40), ("roberta", 38)])
def test_inputs_longer_than_the_positions(name, positions):
    """RoBERTa counts positions from the one after the padding id, 1 here, so two of its 40 are never used."""
    model, _ = build(name)
    shapes = []
    full = torch.full((1, positions), 5)
    stream_attention(model, {"input_ids": full}, lambda layer, weights: shapes.append(weights.shape[-1]))
    assert shapes == [positions] * 3
    longer = torch.full((1, positions + 1), 5)
    refused("LengthError", f"{positions + 1} tokens, but .* {positions} positions", model, longer)


def test_an_input_that_is_padding_alone():
    model, inputs = build("bert")
    inputs["attention_mask"][1] = 0
    refused("MaskedRowError", "input 1 of the batch is padding alone", model, inputs)


def test_a_word_that_may_see_nothing():
    """Eager attention makes such a row uniform: a row that sums to 1, and means nothing."""
    model, inputs = build("bert")
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    mask[1, 0, 3] = False
    refused("MaskedRowError", "leaves token 3 of input 1 nothing", model, inputs | {"attention_mask": mask})


@pytest.mark.parametrize("choices", [1, 2])
def test_multiple_choice(choices):
    """Its ids are (inputs, choices, tokens); every choice is a text of its own."""
    model = tf.BertForMultipleChoice(tf.BertConfig(**TEXT)).eval()
    given = {name: value.reshape(-1, choices, 12) for name, value in words().items()}
    padded = given["input_ids"].masked_fill(given["attention_mask"] == 0, 0)
    refused("PaddingError", "hold the padding id 0", model, {"input_ids": padded})
    if choices == 1:
        stream_attention(model, given, lambda layer, weights: None)
    else:
        refused("BatchError", "2 attention matrices a head for 1 inputs", model, given)


@pytest.mark.parametrize("shape", [(2, 5), (2, 12, 12), (12,)])
def test_a_mask_of_another_shape_than_the_ids(shape):
    """transformers takes what is missing for padding, or fails."""
    model, inputs = build("bert")
    inputs["attention_mask"] = torch.ones(shape)
    refused("PaddingError", r"attention_mask has shape .+, the ids \(2, 12\)", model, inputs)


def test_arguments_of_another_kind():
    model, inputs = build("bert")
    ids = inputs["input_ids"]
    refused("ArgumentError", "inputs is a NoneType", model, None)
    refused("ArgumentError", "inputs is a ndarray", model, ids.numpy())
    refused("ArgumentError", "attention_mask is an array of numpy", model, inputs | {"attention_mask": ids.numpy()})
    refused("ArgumentError", r"shape \(12,\), not \(inputs, tokens\)", model, {"input_ids": ids[0]})
    refused("ArgumentError", r"shape \(0, 12\): there are no inputs", model, {"input_ids": ids[:0]})
    refused("ArgumentError", "the sink is None", model, inputs, sink=None)
    refused("ArgumentError", "the sink is a function that cannot be called", model, inputs, sink=lambda weights: None)
    attention = nn.MultiheadAttention(4, 2).eval()
    missing = "does not take these inputs .missing a required argument: 'value'.; its arguments are query, key, value"
    refused("ArgumentError", missing, attention, (torch.rand(3, 1, 4),) * 2)


# Numbers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    model, inputs = build("dinov2", dtype)
    refused("HalfPrecisionError", f"attention is {dtype}", model, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["dinov2", "bert", "distilbert", "llama"])
def test_autocast(name, dtype):
    """With a mask in float32, softmax and weights are float32 too, of scores that are not."""
    model, inputs = build(name)
    with torch.autocast("cpu", dtype=dtype):
        refused("HalfPrecisionError", "leave autocast off", model, inputs)
        seen = []
        stream_attention(model, inputs, lambda layer, weights: seen.append(weights), allow_half=True)
    assert len(seen) == 3


def test_autocast_inside_the_model():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(24, 4)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.attention(x, x, x)[0]

    refused("HalfPrecisionError", "leave autocast off", Inside().eval(), torch.rand(5, 2, 24))


def test_nan():
    model, inputs = build("dinov2")
    inputs["pixel_values"][1, 0, 3, 3] = torch.nan
    refused("NotFiniteError", "layer 0: attention is NaN", model, inputs)


def sigmoid_attention(module, query, key, value, mask, scaling, **kwargs):
    weights = (query @ key.mT * scaling).sigmoid()
    return (weights @ value).transpose(1, 2), weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_do_not_sum_to_one(monkeypatch, dtype):
    model, inputs = build("dinov2", dtype)
    monkeypatch.setattr(tf.models.dinov2.modeling_dinov2, "eager_attention_forward", sigmoid_attention)
    refused("RowSumError", "layer 0: a row of attention is off 1 by", model, inputs, allow_half=True)


def test_one_row_a_little_off_is_found(monkeypatch):
    """By three times the tolerance, in one entry of one head: a softmax in float16, cast to float32, is off by more."""
    eager = tf.models.dinov2.modeling_dinov2.eager_attention_forward

    def nearly(*args, **kwargs):
        output, weights = eager(*args, **kwargs)
        weights[1, 2, 3, 4] += 3e-6
        return output, weights

    model, inputs = build("dinov2")
    monkeypatch.setattr(tf.models.dinov2.modeling_dinov2, "eager_attention_forward", nearly)
    refused("RowSumError", "off 1 by", model, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_a_tolerance_of_its_own(monkeypatch, dtype):
    """A row of an allowed half-precision softmax may be off by the dtype's epsilon, not by four of them."""
    eager = tf.models.dinov2.modeling_dinov2.eager_attention_forward

    def nearly(*args, **kwargs):
        output, weights = eager(*args, **kwargs)
        weights[1, 2, 3, 4] += 4 * torch.finfo(dtype).eps
        return output, weights

    model, inputs = build("dinov2", dtype)
    monkeypatch.setattr(tf.models.dinov2.modeling_dinov2, "eager_attention_forward", nearly)
    refused("RowSumError", "off 1 by", model, inputs, allow_half=True)
