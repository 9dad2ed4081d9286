"""Streamed attention of transformers against its own eager attention, and a model that leaves as it came."""

import copy
import threading
import warnings
import weakref

import pytest
import torch
import transformers as tf

from dobnb.capture import UnsupportedModelError, stream_attention

SMALL = dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=4)
VISION = dict(**SMALL, image_size=32, patch_size=8)
TEXT = dict(**SMALL, vocab_size=50, intermediate_size=32, max_position_embeddings=40)


def pixels(dtype=torch.float32):
    return {"pixel_values": torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=dtype)}


def words(dtype=None):
    """Two sentences, the second padded from its eighth position on."""
    ids = torch.randint(5, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


MODELS = {
    "dinov2": (tf.Dinov2Model, tf.Dinov2Config(**VISION, mlp_ratio=2), pixels),
    "dinov2_with_registers": (
        tf.Dinov2WithRegistersModel,
        tf.Dinov2WithRegistersConfig(**VISION, mlp_ratio=2, num_register_tokens=4),
        pixels,
    ),
    "vit": (tf.ViTModel, tf.ViTConfig(**VISION, intermediate_size=32), pixels),
    "beit": (
        tf.BeitModel,
        tf.BeitConfig(**VISION, intermediate_size=32, use_relative_position_bias=True),
        pixels,
    ),
    "deit": (tf.DeiTModel, tf.DeiTConfig(**VISION, intermediate_size=32), pixels),
    "clip_vision": (tf.CLIPVisionModel, tf.CLIPVisionConfig(**VISION, intermediate_size=32), pixels),
    "bert": (tf.BertModel, tf.BertConfig(**TEXT), words),
    "roberta": (tf.RobertaModel, tf.RobertaConfig(**TEXT, pad_token_id=1), words),
    "distilbert": (
        tf.DistilBertModel,
        tf.DistilBertConfig(dim=24, n_layers=3, n_heads=4, hidden_dim=32, vocab_size=50),
        words,
    ),
    "gpt2": (tf.GPT2Model, tf.GPT2Config(n_embd=24, n_layer=3, n_head=4, vocab_size=50, n_positions=40), words),
    "llama": (tf.LlamaModel, tf.LlamaConfig(**TEXT, num_key_value_heads=2), words),
}


def build(name, dtype=torch.float32, attention="sdpa", scale=1.0):
    kind, config, inputs = MODELS[name]
    torch.manual_seed(0)
    model = kind._from_config(copy.deepcopy(config), attn_implementation=attention).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model, inputs(dtype)


def captured(model, inputs):
    layers = []

    def sink(layer, weights):
        assert layer == len(layers)
        layers.append(weights.clone())

    output = stream_attention(model, inputs, sink)
    return layers, output


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", MODELS)
def test_parity_with_the_librarys_own_attentions(name, dtype, tolerance):
    model, inputs = build(name, dtype)
    reference, _ = build(name, dtype, attention="eager")
    with torch.no_grad():
        expected = reference(**inputs, output_attentions=True)
    layers, output = captured(model, inputs)
    assert len(layers) == len(expected.attentions) == 3
    for ours, theirs in zip(layers, expected.attentions, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= tolerance
    assert (output.last_hidden_state - expected.last_hidden_state).abs().max() <= 10 * tolerance


@pytest.mark.parametrize("name", MODELS)
def test_parity_where_softmax_saturates(name):
    model, inputs = build(name, torch.float64, scale=40.0)
    reference, _ = build(name, torch.float64, attention="eager", scale=40.0)
    with torch.no_grad():
        expected = reference(**inputs, output_attentions=True).attentions
    layers, _ = captured(model, inputs)
    assert max(weights.max().item() for weights in layers) > 0.999
    assert len(layers) == len(expected) == 3
    for ours, theirs in zip(layers, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12


def test_attention_is_the_softmax_of_scaled_scores():
    """The definition, from the projections of the first layer; no attention code of the library takes part."""
    model, inputs = build("dinov2", torch.float64)
    layers, _ = captured(model, inputs)
    block = model.encoder.layer[0]
    with torch.no_grad():
        x = block.norm1(model.embeddings(inputs["pixel_values"]))
        names = {name.split(".")[-2]: p for name, p in block.attention.named_parameters() if name.endswith("weight")}
        q, k = (
            (x @ names[next(n for n in names if n.startswith(letter))].T).view(2, 17, 4, 6).transpose(1, 2)
            for letter in "qk"  # biases are 0 in a new model
        )
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / 6**0.5
    expected = scores.exp() / scores.exp().sum(-1, keepdim=True)
    assert (layers[0] - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "gpt2", "llama"])
def test_padding_gets_no_attention(name):
    for weights in captured(*build(name))[0]:
        assert weights[1, :, :7, 7:].max() == 0
        assert weights[1, :, :7, :7].diagonal(dim1=-2, dim2=-1).min() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_decoder_does_not_look_ahead_and_may_be_padded_on_the_left(name, dtype):
    """Rows of padding on the left see nothing, and eager attention makes them uniform; words are as without it.

    Of Llama in float64 transformers makes NaN throughout: its softmax is in float32, where the mask is -inf.
    """
    model, inputs = build(name, dtype)
    ids = inputs["input_ids"][:1]
    padded = {
        "input_ids": torch.cat([torch.full((1, 3), 4), ids], 1),
        "attention_mask": torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(ids)], 1),
        "position_ids": torch.tensor([[0, 0, 0, *range(12)]]),
    }
    for alone, weights in zip(captured(model, {"input_ids": ids})[0], captured(model, padded)[0], strict=True):
        assert alone.triu(1).abs().max() == 0
        assert (weights[..., 3:, 3:] - alone).abs().max() <= 1e-6
        assert weights[..., 3:, :3].max() == 0


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_the_model_leaves_as_it_came(name, implementation):
    model, inputs = build(name, attention=implementation)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        before = model(**inputs).last_hidden_state
        captured(model, inputs)
        after = model(**inputs).last_hidden_state
    assert torch.equal(before, after)
    assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {
        implementation
    }
    assert not any(module.training for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_inner_configs_keep_their_own_implementation():
    config = tf.CLIPConfig(
        text_config=dict(**TEXT), vision_config=dict(**VISION, intermediate_size=32), projection_dim=8
    )
    model = tf.CLIPModel._from_config(
        config, attn_implementation={"text_config": "eager", "vision_config": "sdpa"}
    ).eval()
    before = [part.config._attn_implementation for part in (model, model.text_model, model.vision_model)]
    assert before[1:] == ["eager", "sdpa"]
    with pytest.raises(UnsupportedModelError, match="pass one part"):
        stream_attention(model, {}, print)
    assert len(captured(model.vision_model, pixels())[0]) == 3
    assert [part.config._attn_implementation for part in (model, model.text_model, model.vision_model)] == before


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_boolean_mask_of_pairs_is_a_mask(name):
    """Eager attention alone would add 1 where it is true; fused attention hides what is false, and so do we."""
    model, inputs = build(name, torch.float64)
    pairs = (
        torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12)
        & inputs["attention_mask"][:, None, None].bool()
    )
    given = {"input_ids": inputs["input_ids"], "attention_mask": pairs}
    layers, output = captured(model, given)
    assert all(weights.masked_fill(pairs, 0).max() == 0 for weights in layers)
    with torch.no_grad():
        assert (output.last_hidden_state - model(**given).last_hidden_state).abs().max() < 1e-5


def test_no_gradients_and_the_models_own_output():
    model, inputs = build("dinov2")
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
    _, output = captured(model, inputs)
    assert type(output) is type(model(**inputs))
    assert not output.last_hidden_state.requires_grad
    assert torch.allclose(output.last_hidden_state, expected, atol=1e-5)


def test_one_layer_is_alive_at_a_time():
    model, inputs = build("dinov2")
    seen = []

    def sink(layer, weights):
        assert all(reference() is None for reference in seen)
        seen.append(weakref.ref(weights))

    stream_attention(model, inputs, sink)
    assert len(seen) == 3 and seen[-1]() is None


def test_the_sink_may_overwrite_the_weights():
    model, inputs = build("dinov2")
    expected, output = captured(model, inputs)
    kept = []

    def sink(layer, weights):
        kept.append(weights.clone())
        weights.zero_()

    assert torch.equal(stream_attention(model, inputs, sink).last_hidden_state, output.last_hidden_state)
    assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_an_exception_in_the_sink_leaves_the_model_as_it_came(name):
    model, inputs = build(name)
    expected, _ = captured(model, inputs)

    def sink(layer, weights):
        if layer == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stream_attention(model, inputs, sink)
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(a, b) for a, b in zip(captured(model, inputs)[0], expected, strict=True))


@pytest.mark.parametrize("other", ["dinov2", "vit"])
def test_nested_use(other):
    """The sink streams the same model, or another, and runs it plainly; neither ends up in the outer run."""
    model, inputs = build("dinov2")
    inner = model if other == "dinov2" else build(other)[0]
    alone, expected = captured(inner, inputs)[0], captured(model, inputs)[0]
    outer = []

    def sink(layer, weights):
        outer.append(weights.clone())
        inner(**inputs)
        assert all(torch.equal(a, b) for a, b in zip(captured(inner, inputs)[0], alone, strict=True))

    stream_attention(model, inputs, sink)
    assert all(torch.equal(a, b) for a, b in zip(outer, expected, strict=True))
    assert model.config._attn_implementation == inner.config._attn_implementation == "sdpa"


def test_threads_that_share_a_model():
    """One streams, one streams other inputs, one only runs the model, all at once."""
    model, inputs = build("dinov2")
    others = {"pixel_values": inputs["pixel_values"].flip(-1)}
    expected = {0: captured(model, inputs)[0], 1: captured(model, others)[0]}
    errors = []

    def stream(key, given):
        try:
            for _ in range(10):
                layers, _ = captured(model, given)
                assert all(torch.equal(a, b) for a, b in zip(layers, expected[key], strict=True))
        except BaseException as error:
            errors.append(error)

    def plain():
        try:
            for _ in range(40):
                with torch.no_grad():
                    model(**inputs)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=stream, args=pair) for pair in ((0, inputs), (1, others))]
    threads.append(threading.Thread(target=plain))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert errors == []
    assert model.config._attn_implementation == "sdpa"


def test_runs_of_two_threads_on_one_model_take_turns():
    """Were they to overlap, the one that ends first would take the other's attention away from under it."""
    model, inputs = build("dinov2")
    second_inside, first_done, errors = threading.Event(), threading.Event(), []

    def first_sink(layer, weights):
        if layer == 0:
            second.start()
            second_inside.wait(timeout=0.5)  # in vain, if they take turns

    def second_sink(layer, weights):
        second_inside.set()
        first_done.wait(timeout=30)

    def run_second():
        try:
            stream_attention(model, inputs, second_sink)
        except BaseException as error:
            errors.append(error)

    second = threading.Thread(target=run_second)
    stream_attention(model, inputs, first_sink)
    first_done.set()
    second.join(timeout=60)
    assert errors == []
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", MODELS)
def test_two_runs_in_a_row_are_the_same(name):
    model, inputs = build(name)
    first, second = captured(model, inputs)[0], captured(model, inputs)[0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_tensor_and_a_tuple_are_passed_by_position():
    model, inputs = build("bert")
    expected = captured(model, inputs)[0]
    for given in ((inputs["input_ids"], inputs["attention_mask"]), inputs["input_ids"]):
        layers, _ = captured(model, given)
        rows = slice(None) if isinstance(given, tuple) else slice(0, 1)  # the first input has no padding
        assert all(torch.allclose(a[rows], b[rows], atol=1e-6) for a, b in zip(layers, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_request(dtype):
    model, inputs = build("dinov2", dtype)
    wide = captured(*build("dinov2"))[0]
    layers = []
    stream_attention(model, inputs, lambda layer, weights: layers.append(weights), allow_half=True)
    for narrow, exact in zip(layers, wide, strict=True):
        assert narrow.dtype == dtype
        assert (narrow.float() - exact).abs().max() < 10 * torch.finfo(dtype).eps


def test_cross_attention_is_skipped_and_said_so():
    config = tf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    torch.manual_seed(0)
    model = tf.BertModel(config).eval()
    # As many positions as the text has: by its shape alone, attention to them would pass for self-attention.
    inputs = words() | {"encoder_hidden_states": torch.rand(2, 12, 24)}
    eager = tf.BertModel._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = eager(**inputs, output_attentions=True).attentions
    with pytest.warns(UserWarning, match="BertCrossAttention attends to another sequence"):
        layers, _ = captured(model, inputs)
    assert len(layers) == 3
    assert all((ours - theirs).abs().max() <= 1e-6 for ours, theirs in zip(layers, expected, strict=True))


@pytest.mark.filterwarnings("ignore::dobnb.errors.CrossAttentionSkipped")
@pytest.mark.parametrize("kind", ["Bart", "Marian"])
def test_the_parts_of_an_encoder_decoder_have_depths_of_their_own(kind):
    size = dict(encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=4, decoder_attention_heads=4)
    config = getattr(tf, f"{kind}Config")(
        d_model=24, encoder_layers=3, decoder_layers=2, vocab_size=50, pad_token_id=1, **size
    )
    model = getattr(tf, f"{kind}Model")(config).eval()
    with pytest.raises(UnsupportedModelError, match="has no single stack of layers"):
        stream_attention(model, words(), print)
    assert len(captured(model.encoder, words())[0]) == 3
    assert len(captured(model.decoder, words() | {"encoder_hidden_states": torch.rand(2, 12, 24)})[0]) == 2


def test_a_model_inside_ones_own():
    """In a module, in a sequence of them, and in what spreads batches over devices."""

    class Mine(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    model, inputs = build("bert")
    expected, output = captured(model, inputs)
    for holder in (Mine(model), Mine(Mine(model)), torch.nn.DataParallel(model)):
        before = dict(vars(model))
        layers, ours = captured(holder.eval(), inputs)
        assert len(layers) == 3 and all(torch.equal(a, b) for a, b in zip(layers, expected, strict=True))
        assert torch.equal(ours.last_hidden_state, output.last_hidden_state)
        assert model.config._attn_implementation == "sdpa" and vars(model) == before
    model, inputs = build("dinov2")
    layers, _ = captured(torch.nn.Sequential(model).eval(), inputs["pixel_values"])
    assert all(torch.equal(a, b) for a, b in zip(layers, captured(model, inputs)[0], strict=True))


# The traps behind the public reports


def test_trap_sdpa_gives_no_attentions():
    model, inputs = build("dinov2", attention="sdpa")
    with torch.no_grad():
        assert not model(**inputs, output_attentions=True).attentions
    assert len(captured(model, inputs)[0]) == 3


def test_trap_a_custom_attention_function_loses_the_mask():
    """Registered without a mask function of its own, it gets None for a mask, and padding its share of attention."""
    seen = []

    def custom(module, query, key, value, attention_mask, **kwargs):
        output, weights = tf.models.bert.modeling_bert.eager_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        seen.append(weights)
        return output, weights

    tf.AttentionInterface.register("a test's own", custom)
    model, inputs = build("bert")
    model.set_attn_implementation("a test's own")
    with torch.no_grad():
        model(**inputs)
    assert len(seen) == 3 and seen[0][1, :, :7, 7:].min() > 0
    assert captured(model, inputs)[0][0][1, :, :7, 7:].max() == 0


def test_trap_rows_do_not_sum_to_one_in_training_mode():
    """Eager attention returns its weights after dropout, which rescales what it keeps."""
    model, inputs = build("bert", attention="eager")
    with torch.no_grad():
        first = model.train()(**inputs, output_attentions=True).attentions[0]
    assert (first.sum(-1) - 1).abs().max() > 0.01
    (first, *_), _ = captured(model.eval(), inputs)
    assert (first.sum(-1) - 1).abs().max() < 1e-6


def test_trap_padding_without_a_mask_takes_part():
    """transformers logs that the mask is missing, and runs; see test_capture_refusals."""
    model, inputs = build("bert", attention="eager")
    ids = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, model.config.pad_token_id)
    with torch.no_grad():
        assert model(input_ids=ids, output_attentions=True).attentions[0][1, :, :7, 7:].min() > 0


def test_no_warning_without_cross_attention():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured(*build("bert"))
