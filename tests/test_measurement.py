"""`measure` against plain loops over a model's own eager attention, and the file it writes."""

import dataclasses
import json

import numpy as np
import pytest
import rtdl_revisiting_models as rtdl
import timm
import torch
from test_tokens import OWN, bert_tokenizer
from tiny import noise, tiny, tiny_bert, without_time
from torch import nn
from torchvision.models import VisionTransformer
from transformers import (
    BertConfig,
    BertModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
)

from dobnb import Measurement, cli, depth_bounds, measure, plots
from dobnb.errors import HalfPrecisionError, PaddingError
from dobnb.inputs import Inputs, from_tensors, photographs
from dobnb.measurement import (
    MeasurementError,
    by_layer,
    by_size,
    carriers,
    failures,
    flips,
    measurement_of,
    table,
)
from dobnb.published import (
    TABLE_1,
    TABLE_2,
    TABLE_4,
    compare_language_models,
    compare_table_1,
    compare_table_2,
    compare_table_4,
    not_run,
)
from dobnb.stochastic import MatrixError
from dobnb.tallies import Tallies, TallyError, on_grids
from dobnb.wording import percent


def brute_force(model, images, prefix):
    """What the paper's definitions say, a pair at a time, with the factor built and compared."""

    def kappa(A):
        return max(0.5 * np.abs(A[i] - A[j]).sum() for i in range(len(A)) for j in range(i))

    def tight(A):
        return 0.5 + 0.5 * kappa(A) - kappa((np.eye(len(A)) + A) / 2) < 1e-12

    def content(A):
        A = A[prefix:, prefix:]
        return A / A.sum(1, keepdims=True)

    def one_out(A):
        pairs = {(i, j): 0.5 * np.abs(A[i] - A[j]).sum() for i in range(len(A)) for j in range(i)}
        return [max(pairs.values()) - max(tv for pair, tv in pairs.items() if x not in pair) for x in range(len(A))]

    model.set_attn_implementation("eager")
    pixels = images.batch(0, len(images))["pixel_values"]
    attentions = [layer.detach().double().numpy() for layer in model(pixels, output_attentions=True).attentions]
    mean = [layer.mean(1) for layer in attentions]
    averaged = [content(layer.mean(0)) for layer in mean]

    def relative_gap(A):
        return ((1 + kappa(A)) / 2 - kappa((np.eye(len(A)) + A) / 2)) / (kappa(A) / 2)

    gap = [[relative_gap(content(A)) for A in layer] for layer in mean]
    return {
        "failing": [[i for i, A in enumerate(layer) if not tight(content(A))] for layer in mean],
        "gaps": gap,
        "heads failing": [
            [3 * i + h for i, heads in enumerate(layer) for h, A in enumerate(heads) if not tight(content(A))]
            for layer in attentions
        ],
        "averaged all": [bool(tight(layer.mean(0))) for layer in mean],
        "all kappa": [kappa(layer.mean(0)) for layer in mean],
        "scores": [one_out(layer.mean(0)) for layer in mean],
        "depth": depth_bounds(torch.tensor(np.stack(mean))),
        "content": [sum(tight(content(A)) for A in layer) for layer in mean],
        "all": [sum(tight(A / A.sum(1, keepdims=True)) for A in layer) for layer in mean],
        "heads": [sum(tight(content(A)) for heads in layer for A in heads) for layer in attentions],
        "averaged": [bool(tight(A)) for A in averaged],
        "kappa": [kappa(A) for A in averaged],
        "doeblin": [1 - len(A) * A.min() for A in averaged],
        "median": [np.median([kappa(content(A)) for A in layer]) for layer in mean],
    }


@pytest.mark.parametrize(
    ("kind", "config", "more", "prefix"),
    [
        (Dinov2Model, Dinov2Config, {}, 1),
        (Dinov2WithRegistersModel, Dinov2WithRegistersConfig, {"num_register_tokens": 4}, 5),
    ],
)
def test_a_measurement_is_what_plain_loops_count(kind, config, more, prefix):
    model, images = tiny(kind, config, **more), noise(6)
    found = measure(model, images, batch_size=4)
    expected = brute_force(model, images, prefix)
    assert 0 < sum(expected["content"]) < 18 and 0 < sum(expected["heads"]) < 54, "the example must not be trivial"
    assert found.per_input["content"] == expected["content"]
    assert found.per_input["all"] == expected["all"]
    assert found.heads["content"] == expected["heads"] and found.heads["tested"] == [18, 18, 18]
    assert found.heads["failing"] == expected["heads failing"] and found.heads["near_ties"] == [0, 0, 0]
    assert found.averaged["content"] == expected["averaged"]
    assert found.averaged["kappa"] == pytest.approx(expected["kappa"], abs=1e-6)
    assert found.averaged["doeblin"] == pytest.approx(expected["doeblin"], abs=1e-6)
    assert found.per_input["content_kappa"]["median"] == pytest.approx(expected["median"], abs=1e-6)
    assert found.per_input["content_failing"] == expected["failing"]
    gaps = [[row[i] for i in failing] for row, failing in zip(expected["gaps"], expected["failing"], strict=True)]
    assert [pytest.approx(row, abs=1e-6) for row in gaps] == found.per_input["content_failing_gaps"]
    assert found.averaged["all"] == expected["averaged all"]
    assert found.averaged["all_kappa"] == pytest.approx(expected["all kappa"], abs=1e-6)
    for layer, scores in enumerate(expected["scores"]):
        some = {token: score for token, score in enumerate(scores) if score > 1e-9}
        ours = zip(found.averaged["scored"][layer], found.averaged["scores"][layer], strict=True)
        assert dict(ours) == pytest.approx(some, abs=1e-6)
        top = max(scores)
        assert found.averaged["carriers"][layer] == [k for k, score in some.items() if score > top - 1e-9]
    for what in ("bound", "product", "truth"):
        values = getattr(expected["depth"], what).quantile(0.5, dim=1).tolist()
        assert found.depth[what]["median"] == pytest.approx(values, abs=1e-6)
    assert found.averaged["roles"][:prefix].count("content") == 0 and len(found.averaged["roles"]) == prefix + 16
    assert found.n == [6, 6, 6] and found.provenance["model"]["content_tokens"] == 16


def test_batch_size_and_heads_change_no_verdict():
    model, images = tiny(), noise(5)
    whole, single = measure(model, images, batch_size=5), measure(model, images, heads=False, batch_size=1)
    assert whole.per_input["content"] == single.per_input["content"]
    assert whole.per_input["all"] == single.per_input["all"]
    assert whole.averaged["kappa"] == pytest.approx(single.averaged["kappa"], abs=1e-6)
    assert single.heads == {}


def test_progress_counts_the_inputs():
    seen = []
    measure(tiny(), noise(5), heads=False, batch_size=2, progress=lambda done, n: seen.append((done, n)))
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_uniform_attention_is_counted_as_near_ties():
    model = tiny()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name or "q_proj" in name:
                parameter.zero_()
    found = measure(model, noise(2), batch_size=2)
    assert found.near_ties == [2 + 2 + 6 + 2] * 3, "content, all tokens, heads and the two averaged verdicts"
    assert max(found.per_input["content_kappa"]["q95"]) < 1e-6


def test_nothing_to_measure_is_refused():
    with pytest.raises(MeasurementError, match="no inputs"):
        measure(tiny(), Inputs("nothing", "", 0, lambda start, stop: {}))
    with pytest.raises(MeasurementError, match="inputs is None; pass what"):
        measure("dinov2-small", None)
    with pytest.raises(MeasurementError, match="inputs is a Tensor; pass what"):
        measure(tiny(), torch.ones(2, 3, 56, 56))
    with pytest.raises(MeasurementError, match="model is a list; pass a torch module"):
        measure([], noise(1))
    with pytest.raises(MeasurementError, match="batch_size is 0"):
        measure(tiny(), noise(1), batch_size=0)
    with pytest.raises(MeasurementError, match="block_size is 0"):
        measure(tiny(), noise(1), block_size=0)
    with pytest.raises(MeasurementError, match="batch_size is 16, but batches are cut out of blocks of 4"):
        measure(tiny(), noise(1), block_size=4)
    with pytest.raises(MeasurementError, match="more than the 16384 that add without rounding"):
        measure(tiny(), Inputs("many", "", 16385, lambda start, stop: {}), batch_size=1, block_size=1)
    for shard in ((0, 2), (3, 2)):
        with pytest.raises(MeasurementError, match="does not exist"):
            measure(tiny(), noise(2), shard=shard)
    with pytest.raises(MeasurementError, match="shard 2/2 is empty: there are 1 blocks"):
        measure(tiny(), noise(2), shard=(2, 2))


# Parts ------------------------------------------------------------------------------------------------------------


def bits(found):
    """All that a measurement holds, so that equal means equal to the last bit."""
    arrays = found.tallies.by_input | {"inputs": found.tallies.inputs, "sums": found.tallies.sums}
    return without_time(found), {name: values.tobytes() for name, values in arrays.items()}


@pytest.mark.parametrize("m", [2, 3, 4])
def test_shards_add_up_to_the_whole_to_the_last_bit(m):
    model, images = tiny(), noise(14)
    whole = measure(model, images, batch_size=2, block_size=4)
    parts = [measure(model, images, batch_size=2, block_size=4, shard=(k, m)) for k in range(1, m + 1)]
    assert [part.n[0] for part in parts] == {2: [8, 6], 3: [6, 4, 4], 4: [4, 4, 4, 2]}[m]
    assert bits(sum(parts)) == bits(sum(reversed(parts))) == bits(whole)
    if m == 3:
        assert bits((parts[2] + parts[0]) + parts[1]) == bits(parts[2] + (parts[0] + parts[1]))
    assert sum(parts).provenance["started"] == min(part.provenance["started"] for part in parts)


def test_blocks_are_summed_alike_whatever_they_hold():
    """Two block sizes round their sums differently, in the last bits alone."""
    model, images = tiny(), noise(12)
    found = [measure(model, images, batch_size=1, block_size=size) for size in (1, 4, 12)]
    for one in found[1:]:
        np.testing.assert_allclose(one.tallies.averaged(), found[0].tallies.averaged(), rtol=0, atol=1e-15)
        assert one.per_input == found[0].per_input and one.heads == found[0].heads
    matrices = torch.zeros(3, 17, 17, dtype=torch.float64)
    model.set_attn_implementation("eager")
    for i in range(12):
        attention = model(**images.batch(i, i + 1), output_attentions=True).attentions
        matrices += torch.stack([layer.detach().double()[0].mean(0) for layer in attention]) / 12
    np.testing.assert_allclose(found[0].tallies.averaged(), matrices, rtol=0, atol=1e-6)


def test_what_is_not_the_same_run_does_not_add():
    model, images = tiny(), noise(8)
    first = measure(model, images, batch_size=2, block_size=4, shard=(1, 2))
    with pytest.raises(MeasurementError, match=r"settings\.batch_size is 2 here and 4 there"):
        first + measure(model, images, batch_size=4, block_size=4, shard=(2, 2))
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    with pytest.raises(MeasurementError, match=r"model\.sha256 is"):
        first + measure(model, images, batch_size=2, block_size=4, shard=(2, 2))
    with pytest.raises(TallyError, match="input 0 is in both"):
        first + first
    with pytest.raises(TypeError):
        first + 1


def test_a_measurement_from_a_file_has_nothing_to_add(tmp_path):
    first = measure(tiny(), noise(2), batch_size=2)
    first.save(tmp_path / "one.json")
    with pytest.raises(MeasurementError, match="no tallies to add"):
        first + Measurement.load(tmp_path / "one.json")


# Tokens -------------------------------------------------------------------------------------------------------------

SENTENCES = [[101, 7, 8, 9, 10, 102], [101, 11, 12, 102, 0, 0], [101, 5, 6, 7, 102, 0], [101, 9, 8, 102, 0, 0]]


def text(rows):
    ids = torch.tensor(rows)
    return from_tensors({"input_ids": ids, "attention_mask": (ids != 0).long()}, "sentences")


def test_padding_is_dropped_input_by_input():
    """Each padded sentence measures as it does alone, where nothing is padded."""
    model = tiny_bert()
    found = measure(model, text(SENTENCES), batch_size=4)
    alone = [measure(model, text([[token for token in row if token]]), batch_size=1) for row in SENTENCES]
    for name, values in found.tallies.by_input.items():
        one_by_one = np.concatenate([one.tallies.by_input[name] for one in alone])
        np.testing.assert_allclose(values, one_by_one, atol=1e-6, err_msg=name)
    assert found.tallies.by_input["tokens"].tolist() == [6, 4, 5, 4]
    assert found.tallies.by_input["content_tokens"].tolist() == [4, 2, 3, 2]
    assert found.provenance["model"]["tokens"] == [4, 6]


def test_inputs_of_different_lengths_have_no_average(tmp_path):
    model = tiny_bert()
    found = measure(model, text(SENTENCES), batch_size=2, block_size=2)
    assert found.averaged == {
        "left_out": "inputs have 4 to 6 tokens; an average needs the same tokens in all of them"
    }
    assert found.tallies.averaged() is None
    found.save(tmp_path / "one.json")
    assert Measurement.load(tmp_path / "one.json") == found
    assert table([found]).iloc[0]["averaged, exact layers"] == "no average" and "averaged" not in by_layer(found)
    separators = [[101, 7, 8, 102, 9, 10, 102], [101, 7, 8, 9, 102, 10, 102]]
    assert "differ in which tokens are special" in measure(model, text(separators), batch_size=1).averaged["left_out"]
    assert "content" in measure(model, text(SENTENCES[:1] * 2), batch_size=1).averaged


def test_content_can_be_told():
    """A mask, and a function of the batch, that say what the roles say."""
    model, images = tiny(), noise(4)
    mask = torch.tensor([False] + [True] * 16)
    by_role = measure(model, images, batch_size=2)
    by_mask = measure(model, images, batch_size=2, content=mask)
    by_function = measure(model, images, batch_size=2, content=lambda batch: mask.repeat(len(batch["pixel_values"]), 1))
    for found in (by_mask, by_function):
        assert (found.per_input, found.heads) == (by_role.per_input, by_role.heads)
        assert found.averaged["kappa"] == by_role.averaged["kappa"]
        assert found.averaged["roles"] == ["special"] + ["content"] * 16
    names = [found.provenance["settings"]["content"] for found in (by_role, by_mask, by_function)]
    assert names[0] == "by role" and names[1].startswith("mask ") and names[2].startswith("function ")
    few = measure(model, images, batch_size=2, content=torch.tensor([False] * 10 + [True] * 7))
    assert few.provenance["model"]["content_tokens"] == 7


def test_padding_is_dropped_where_content_is_told():
    model, sentences = tiny_bert(), text(SENTENCES)
    told = measure(model, sentences, batch_size=4, content=lambda batch: batch["input_ids"] < 100)
    assert told.per_input == measure(model, sentences, batch_size=4).per_input


class Reader(nn.Module):
    """Words as vectors; `hide` is the encoder's name for the mask, and who passes it calls it `lengths`."""

    def __init__(self, hide="src_key_padding_mask"):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True)
        self.encoder, self.hide = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), hide
        with torch.no_grad():
            for parameter in self.encoder.parameters():
                parameter.normal_(0, 0.4)

    def forward(self, words, lengths=None):
        if lengths is None or self.hide is None:
            return self.encoder(words)
        hidden = torch.arange(words.shape[1]) >= lengths.unsqueeze(1)
        if self.hide == "mask":  # one matrix a head
            square = hidden[:, None, None].expand(-1, 3, words.shape[1], -1).flatten(0, 1)
            return self.encoder(words, mask=torch.zeros(square.shape).masked_fill_(square, -torch.inf))
        return self.encoder(words, **{self.hide: hidden})


WORDS = torch.randn(4, 7, 24, generator=torch.Generator().manual_seed(2))
LENGTHS = torch.tensor([7, 4, 5, 7])


@pytest.mark.parametrize("hide", ["src_key_padding_mask", "mask"])
def test_padding_is_dropped_by_whatever_name_the_model_takes_its_mask(hide):
    """Each padded input measures as it does alone, cut to its length; every token is said to be content."""
    model = Reader(hide).eval()
    padded = from_tensors({"words": WORDS, "lengths": LENGTHS}, "padded")
    found = measure(model, padded, batch_size=4, content=torch.ones(7, dtype=torch.bool))
    assert found.tallies.by_input["tokens"].tolist() == LENGTHS.tolist()
    assert found.tallies.by_input["content_tokens"].tolist() == LENGTHS.tolist()
    for i, length in enumerate(LENGTHS.tolist()):
        alone = from_tensors({"words": WORDS[i : i + 1, :length]}, "alone")
        one = measure(model, alone, batch_size=1, content=torch.ones(length, dtype=torch.bool))
        for name, values in one.tallies.by_input.items():
            np.testing.assert_allclose(found.tallies.by_input[name][i], values[0], atol=1e-6, err_msg=name)
    counted = measure(Reader(None).eval(), padded, batch_size=4, content=torch.ones(7, dtype=torch.bool))
    assert counted.tallies.by_input["tokens"].tolist() == [7] * 4, "the control: no mask, so the same tokens count"
    assert counted.per_input["all_kappa"] != found.per_input["all_kappa"]


def test_torchs_encoder_by_itself_drops_padding():
    model = Reader().eval().encoder
    hidden = torch.arange(7) >= LENGTHS.unsqueeze(1)
    padded = from_tensors({"src": WORDS, "src_key_padding_mask": hidden}, "padded")
    found = measure(model, padded, batch_size=2, content=torch.tensor([False] + [True] * 6))
    assert found.tallies.by_input["tokens"].tolist() == [7, 4, 5, 7]
    assert found.tallies.by_input["content_tokens"].tolist() == [6, 3, 4, 6]


def test_a_mask_that_the_model_does_not_heed_is_refused():
    """Its own attention_mask is true at padding, as torch has it, so what the inputs call padding is seen."""

    class Turned(Reader):
        def forward(self, words, attention_mask):
            return self.encoder(words, src_key_padding_mask=attention_mask)

    hidden = torch.arange(7) >= LENGTHS.unsqueeze(1)
    given = from_tensors({"words": WORDS, "attention_mask": hidden}, "turned")
    with pytest.raises(PaddingError, match="token 0 of input 0 is padding by the attention_mask, but"):
        measure(Turned().eval(), given, content=torch.ones(7, dtype=torch.bool))


def test_a_named_model_has_its_special_tokens_from_its_tokenizer(tmp_path):
    """A BERT in a folder, with a vocabulary of its own, whose config names no special tokens."""
    tokenizer = bert_tokenizer(OWN)
    torch.manual_seed(0)
    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32)
    BertModel(BertConfig(**sizes, vocab_size=107)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    batch = tokenizer(["a green idea sleeps", "a green idea"], padding=True, return_tensors="pt")
    given = from_tensors({name: batch[name] for name in ("input_ids", "attention_mask")}, "sentences")
    found = measure(str(tmp_path), given, batch_size=1)
    assert found.tallies.by_input["tokens"].tolist() == [6, 5]
    assert found.tallies.by_input["content_tokens"].tolist() == [4, 3]


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_photographs_are_passed_as_the_model_takes_them(library):
    """photographs() calls them pixel_values, as transformers does; the same pixels as a tensor measure the same."""
    torch.manual_seed(0)
    if library == "timm":
        model = timm.create_model("vit_small_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=3).eval()
    else:
        model = VisionTransformer(32, 16, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=32).eval()
    images = photographs(3, size=32)
    found = measure(model, images)
    pixels = from_tensors(images.batch(0, 3)["pixel_values"], "pixels")
    assert found.per_input == measure(model, pixels).per_input
    with pytest.raises(MeasurementError, match="does not take the inputs input_ids, attention_mask: its arguments are"):
        measure(model, text(SENTENCES))


def test_half_precision_is_not_advised_where_it_is_not_taken():
    with pytest.raises(HalfPrecisionError, match="stream_attention alone takes it"):
        measure(tiny().bfloat16(), from_tensors(noise(1).batch(0, 1)["pixel_values"].bfloat16(), "half"))


def test_content_that_does_not_fit_is_refused():
    model, images = tiny(), noise(2)
    for wrong in (torch.ones(17), torch.ones(1, 17, dtype=torch.bool), [True] * 17, "content"):
        with pytest.raises(MeasurementError, match=r"pass a bool mask of shape \(N,\)"):
            measure(model, images, content=wrong)
    with pytest.raises(MeasurementError, match=r"content gave torch\.bool of shape \(17,\)"):
        measure(model, images, content=lambda batch: torch.ones(17, dtype=torch.bool))
    with pytest.raises(TallyError, match="attention is of 2 inputs of 17 tokens, the roles are of 2 of 16"):
        measure(model, images, content=torch.ones(16, dtype=torch.bool))
    with pytest.raises(MatrixError, match="1 tokens kept"):
        measure(model, images, content=torch.tensor([True] + [False] * 16))


# Leave-one-out ------------------------------------------------------------------------------------------------------


def averaged_of(matrix):
    """What a measurement says of one averaged matrix."""
    A = np.array(matrix, dtype=float)[None]
    of = {f"{kind}_{what}": np.full((1, 1), 0.5) for kind in ("content", "all") for what in ("kappa", "margin", "gap")}
    of |= {f"{kind}_holds": np.ones((1, 1), dtype=bool) for kind in ("content", "all")}
    of |= {"tokens": np.array([len(matrix)]), "content_tokens": np.array([len(matrix)])}
    roles = ("content",) * len(matrix)
    about = {"model": {}, "inputs": {}, "settings": {}, "versions": {}}
    return measurement_of(about, Tallies(np.array([0]), of, roles, on_grids(A)), "").averaged


def test_carriers_that_tie_are_all_named():
    """Rows 0 and 1 are alone in attaining kappa = 1, and without either of them 1/2 is left."""
    found = averaged_of([[1, 0, 0], [0, 1, 0], [0.5, 0.5, 0]])
    assert found["scored"] == [[0, 1]] and found["scores"] == [[0.5, 0.5]] and found["carriers"] == [[0, 1]]


def test_one_carrier_is_named_alone():
    """TV is 1 with row 2 in the pair, 1/2 and 1 without; leaving row 0 out leaves 1 - 0.25."""
    found = averaged_of([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.25, 0.75, 0], [0, 0.25, 0.75, 0]])
    # TV: (0,1) .5, (0,2) 1, (0,3) 1, (1,2) .75, (1,3) .75, (2,3) 0. All maximal pairs share token 0: score 1 - .75.
    assert found["scored"] == [[0]] and found["scores"] == [[0.25]] and found["carriers"] == [[0]]


def test_where_two_disjoint_pairs_attain_kappa_nothing_carries():
    found = averaged_of(np.eye(4))
    assert found["scored"] == [[]] and found["scores"] == [[]] and found["carriers"] == [[]]


# Precision ----------------------------------------------------------------------------------------------------------


def test_float32_stays_float32_while_a_model_is_measured():
    """TF32 and bfloat16 products are off inside, though the user has them on, and are back afterwards."""
    seen, model = [], tiny()
    places = (
        torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv
    )  # fmt: skip
    now = lambda: [place.fp32_precision for place in places]  # noqa: E731
    before = now()
    model.register_forward_pre_hook(lambda module, args: seen.append(now()))
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        measure(model, noise(1), batch_size=1)
        after = now()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before[0]
    assert seen == [["ieee"] * 4]
    assert after == ["tf32", *before[1:]]


def quantiles(values):
    return {"q05": values, "median": values, "q95": values}


@pytest.fixture
def made():
    return Measurement(
        provenance={"model": {"name": "made up"}, "inputs": {"name": "none", "digest": "", "n": 1000}},
        layers=2,
        n=[1000, 1000],
        per_input={
            "content": [1000, 999],
            "all": [900, 800],
            "content_near_ties": [0, 1],
            "all_near_ties": [0, 1],
            "content_failing": [[], [17]],
            "content_failing_gaps": [[], [0.25]],
            "all_failing": [list(range(100)), list(range(200))],
            "all_failing_gaps": [[0.5] * 100, [0.5] * 200],
            "content_kappa": quantiles([0.5, 0.25]),
            "content_margin": quantiles([0.01, 2e-7]),
            "all_kappa": quantiles([0.5, 0.25]),
            "all_margin": quantiles([0.01, 2e-7]),
        },
        heads={
            "content": [3000, 3500], "tested": [4000, 4000], "near_ties": [0, 5],
            "failing": [list(range(1000)), list(range(500))],
        },
        averaged={
            "content": [True, False], "all": [True, True], "kappa": [0.5, 0.25], "doeblin": [0.5, 0.5],
            "scored": [[1], []], "scores": [[0.1], []], "carriers": [[1], []], "roles": ["cls", "content", "content"],
        },
        depth={what: quantiles([0.5, 0.25]) for what in ("bound", "product", "truth")},
        near_ties=[0, 7],
    )


def test_a_file_gives_back_what_was_saved(tmp_path, made):
    made.save(tmp_path / "new" / "one.json")
    assert Measurement.load(tmp_path / "new" / "one.json") == made
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["one.json"]
    assert json.loads((tmp_path / "new" / "one.json").read_text())["per_input"]["content"] == [1000, 999]


def test_a_failed_save_leaves_the_old_file(tmp_path, made):
    path = tmp_path / "one.json"
    made.save(path)
    before = path.read_bytes()
    with pytest.raises(ValueError):
        dataclasses.replace(made, near_ties=[float("nan")]).save(path)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(OSError):
        made.save(tmp_path / "folder.json")
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder.json", "one.json"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not a readable JSON"),
        ("[" * 100_000, "not a readable JSON"),
        ("[1]", "not a measurement of schema 2"),
        ('{"schema": 2, "n": [NaN]}', "not a readable JSON file: it holds NaN"),
        ('{"schema": 1}', "not a measurement of schema 2"),
        ('{"schema": 2, "n": []}', "missing or unknown fields: averaged"),
    ],
)
def test_other_files_are_refused(tmp_path, content, says):
    (tmp_path / "one.json").write_text(content)
    with pytest.raises(MeasurementError, match=says):
        Measurement.load(tmp_path / "one.json")
    with pytest.raises(MeasurementError, match="does not exist"):
        Measurement.load(tmp_path / "absent.json")


DAMAGE = {
    "n is no list": {"n": "abc"},
    "n is zero": {"n": [0, 0]},
    "too few layers": {"n": [1000]},
    "more layers than lists": {"layers": 3},
    "no layers": {"layers": 0},
    "no provenance": {"provenance": {}},
    "a model that is no record": {"provenance": {"model": "x", "inputs": {"name": "y"}}},
    "verdicts that are none": {"averaged": {"content": [1.5, 2.5]}},
    "no averaged verdicts": {"averaged": {}},
    "no depth": {"depth": {"bound": {"q05": [1.0, 1.0]}}},
    "heads of another length": {"heads": {"content": [1], "tested": [1, 1]}},
    "heads of which none was tested": {
        "heads": {"content": [0, 0], "tested": [0, 0], "near_ties": [0, 0], "failing": [[], []]}
    },
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused(tmp_path, made, damage):
    made.save(tmp_path / "one.json")
    data = json.loads((tmp_path / "one.json").read_text())
    (tmp_path / "one.json").write_text(json.dumps(data | damage))
    with pytest.raises(MeasurementError, match=r"one.json is damaged"):
        Measurement.load(tmp_path / "one.json")


def test_measurements_of_one_name_stay_apart(made):
    assert len(table([made, made])) == 2


def test_the_tables_print_the_counts(made):
    row = table([made]).iloc[0]
    assert row["per input, content"] == "1999/2000 (99.95%)"  # two decimals: one would say 100.0
    assert row["per input, all tokens"] == "85.0%"
    assert row["heads, content"] == "81.2%"
    assert row["averaged, exact layers"] == "1/2"
    layers = by_layer(made)
    assert layers.index.tolist() == [1, 2]
    assert layers["averaged"].tolist() == ["exact", "fails"]
    assert layers["median margin"].tolist() == ["1e-02", "2e-07"]


def test_failures_read_as_table_4(made):
    row = failures([made]).iloc[0]
    assert row["content"] == "layer 2: 1" and row["all tokens"] == "layer 1: 100; layer 2: 200" and row["n"] == 1000


def carried(made, tokens, scores):
    """`made` with these carriers and their scores, by layer."""
    L = len(tokens)
    roles = ["cls", "register", "register", "content", "content"]
    lists = {"scored": tokens, "scores": scores, "carriers": tokens, "roles": roles}
    return dataclasses.replace(made, layers=L, averaged=made.averaged | lists)


def test_carriers_read_as_table_2(made):
    """Seven layers: cls; register 2 twice; two patches tied; a patch; cls and a patch tied; nobody."""
    found = carried(
        made,
        [[0], [2], [2], [3, 4], [4], [0, 3], []],
        [[0.1], [0.2], [0.163], [0.004, 0.004], [0.002], [0.5, 0.5], []],
    )
    roles = [("cls",), ("register",), ("register",), ("content",), ("content",), ("cls", "content"), ()]
    assert found.carrier_roles() == roles
    row = carriers([found]).iloc[0]
    assert (row["special carrier"], row["content carrier"], row["undecided"], row["tied"]) == ("3", "2", "2", "2")
    assert row["max score"] == "0.5" and row["median score, content carrier"] == "0.003"
    assert row["modal special carrier"] == "reg#2 (2/3)"
    rows = compare_table_2([found], ["DINOv2-L"])
    assert rows["special carrier"].tolist() == ["13", "3"]
    assert rows["modal special carrier"].iloc[0] == "reg#1 (8/13)"
    without = dataclasses.replace(found, averaged={"left_out": "inputs have 5 to 9 tokens"})
    assert carriers([without]).iloc[0]["special carrier"] == "no average"
    with pytest.raises(MeasurementError, match="5 to 9 tokens"):
        without.carrier_roles()


def test_no_special_carrier_is_called_modal(made):
    row = carriers([carried(made, [[3], [3, 4]], [[0.1], [0.2, 0.2]])]).iloc[0]
    assert row["special carrier"] == "0" and row["modal special carrier"] == "none"
    several = carriers([carried(made, [[0], [1]], [[0.1], [0.2]])]).iloc[0]
    assert several["modal special carrier"] == "cls (1/2), reg#1 (1/2)"  # the lowest index does not win


def test_median_gap_needs_enough_failures(made):
    assert made.median_gap("all") == 0.5
    assert made.median_gap("content") is None and made.median_gap("content", least=1) == 0.25
    provenance = made.provenance | {"model": {"name": "made up", "content_tokens": 64}}
    row = by_size([dataclasses.replace(made, provenance=provenance)]).loc[64]
    assert row["content, hold"] == "99.95%" and row["content, fail"] == 1 and row["content, median gap"] == "-"
    assert row["all tokens, fail"] == 300 and row["all tokens, median gap"] == "50.0%"
    assert row["kappa"] == "0.25 to 0.50" and row["margin"] == "2e-07 to 1e-02"


def test_figures_of_carriers_and_sizes_draw_what_they_are_given(made):
    """Hollow where tokens tie, grey where their roles differ, a cross where nothing carries; nothing below 20."""
    found = carried(made, [[0], [3, 4], [0, 3], []], [[0.1], [0.004, 0.004], [0.5, 0.5], []])
    marks = {line.get_label(): line for line in plots.carrier_scores({"a": found}).axes[0].lines}
    assert set(marks) == {"cls", "content, tied", "different roles, tied", "none: pairs tie"}
    assert marks["content, tied"].get_ydata()[0] == 0.004
    assert marks["content, tied"].get_markerfacecolor() == "white"
    assert marks["cls"].get_markerfacecolor() == marks["cls"].get_color()
    bound, kappa = plots.doeblin_and_kappa({"a": made}).axes[0].lines
    assert bound.get_ydata().tolist() == [0.5, 0.5] and kappa.get_ydata().tolist() == [0.5, 0.25]
    sized = dataclasses.replace(made, provenance=made.provenance | {"model": {"content_tokens": 64}})
    shares, gaps, kappas = plots.share_by_size({"a": [sized]}).axes
    assert [line.get_ydata()[0] for line in shares.lines] == [pytest.approx(99.95), 85]
    assert np.isnan(gaps.lines[0].get_ydata()[0]) and gaps.lines[1].get_ydata()[0] == 50
    assert kappas.lines[0].get_xdata()[0] == 64


def test_figures_of_a_pair_say_ties():
    """Swapping two tokens: one pair. Three that each keep to themselves: three pairs of disjoint rows."""
    one = plots.pair_in_text([" the", " green", "er"], [[0.5, 0.5, 0], [0.5, 0.25, 0.25], [0, 0.25, 0.75]], (0, 2))
    assert one.get_suptitle().endswith("one pair attains it")
    assert [axes.get_title(loc="left") for axes in one.axes][2] == "they share 0.25"
    assert "3 pairs attain it, tied" in plots.pair_in_text([" a", " b", " c"], np.eye(3), (0, 1)).get_suptitle()
    image = np.zeros((4, 4, 3), dtype=np.uint8)
    assert "6 pairs attain it, tied" in plots.pair_on_image(image, np.eye(4), (0, 1)).get_suptitle()


def test_mass_by_role_stacks_the_shares():
    bars = plots.mass_by_role({"cls": [0.25, 0.5], "words": [0.75, 0.5]}).axes[0].patches
    assert [bar.get_y() for bar in bars] == [0, 0, 25, 50]
    assert [bar.get_height() for bar in bars] == [25, 50, 75, 50]


def test_verdicts_that_flip_are_counted(made):
    """One input fails elsewhere, one fails that did not; a head in each layer; one averaged verdict."""
    other = dataclasses.replace(
        made,
        per_input=made.per_input | {"content_failing": [[3], [18]]},
        heads=made.heads | {"failing": [list(range(1001)), list(range(499))]},
        averaged=made.averaged | {"content": [True, True]},
        near_ties=[2, 7],
    )
    found = flips(made, other)
    assert found["content"].tolist() == [1, 2] and found["all tokens"].tolist() == [0, 0]
    assert found["heads"].tolist() == [1, 1] and found["averaged"].tolist() == [0, 1]
    assert found["near ties"].tolist() == ["0, 2", "7, 7"]
    assert not flips(made, made).drop(columns="near ties").to_numpy().any()
    others = dict(made.provenance, inputs={"name": "none", "digest": "another", "n": 1000})
    with pytest.raises(MeasurementError, match=r"none \(n = 1000, another\); compare runs on the same"):
        flips(made, dataclasses.replace(made, provenance=others))


def test_percent_never_rounds_a_failure_away():
    assert percent(6144, 6144) == "100%"
    assert percent(6141, 6144) == "99.95%"
    assert percent(5582, 6144) == "90.9%"


def test_the_papers_tables_agree_with_each_other():
    """Table 4's failures are what Table 1's counts lack, and Table 1's pairs are 512 inputs a layer."""
    for name, row in TABLE_1.items():
        assert row.content_tested == 512 * row.layers
        assert row.content_tested - row.content_held == sum(TABLE_4[name].values())
        assert all(1 <= layer <= row.layers for layer in TABLE_4[name])


def test_what_was_not_run_comes_with_its_command(made):
    measured = dataclasses.replace(made, provenance=made.provenance | {"model": {"name": "roberta-base"}})
    left = not_run(["roberta-base", "distilbert-base"], [measured], "wikitext-2")
    assert left.index.tolist() == ["DistilBERT"]
    command = left.iloc[0, 0].split()
    arguments = cli.parser().parse_args(command[3:])
    assert (arguments.name, arguments.inputs, arguments.n) == ("distilbert-base", "wikitext-2", 512)
    rows = compare_language_models([made])
    assert len(rows) == 2 and rows.iloc[0]["per input, all tokens"] == "82-97%, with DINOv2"


def test_table_2_agrees_with_itself():
    """The modal token carries some of the special layers, these are some of all; scores of patches are smaller."""
    for name, row in TABLE_2.items():
        assert row.modal_layers <= row.special <= row.layers == TABLE_1[name].layers
        assert row.patch_median < row.highest <= 1


def test_the_comparison_puts_the_paper_first(made):
    rows = compare_table_1([made], ["DeiT-B"])
    assert rows.index.tolist() == [("DeiT-B (paper)", "the paper's"), ("made up", "none")]
    assert rows.iloc[0]["per input, content"] == "5582/6144 (90.9%)"
    assert len(compare_table_1([], ["DeiT-B"])) == 1
    rows = compare_table_4([made], ["DINOv2-S", "DeiT-B"])
    assert rows["content"].tolist() == ["none", "layer 11: 50; layer 12: 512", "layer 2: 1"]
    assert rows["n"].tolist() == [512, 512, 1000]
    with pytest.raises(KeyError):
        compare_table_1([], ["GPT-5"])


def test_the_reference_count_on_real_photographs(test_data):
    """An independent brute force counted every input at every layer, and about 95.7% of heads."""
    from dobnb.inputs import image_folder

    found = measure("dinov2-small-saliency", image_folder(test_data / "imagenet_512", 32))
    assert found.per_input["content"] == [32] * 12
    assert sum(found.heads["content"]) / sum(found.heads["tested"]) == pytest.approx(0.957, abs=0.003)


@pytest.mark.slow
def test_the_reference_count_on_all_photographs(test_data):
    """An independent brute force counted 6144 of 6144 on content tokens, one failure (layer 11) on all tokens."""
    from dobnb.inputs import image_folder

    found = measure("dinov2-small-saliency", image_folder(test_data / "imagenet_512"), heads=False)
    assert sum(found.per_input["content"]) == 6144
    assert found.per_input["all"] == [512] * 10 + [511, 512]


def test_an_input_without_mass_on_content_is_named():
    """In the batch of inputs 3, 4 and 5 the fifth attends to its first and its last token alone, from layer 2 on."""

    class Attends(torch.nn.Module):
        def forward(self, x):
            return x

    def roles(model, batch):
        return (("cls", "content", "content", "separator"),) * len(batch)

    def stream(model, batch, sink, on_padding):
        on_padding(torch.zeros(len(batch), 4, dtype=torch.bool))
        for layer in range(3):
            weights = torch.full((len(batch), 2, 4, 4), 0.25)
            if layer:
                weights[batch[:, 0] == 4] = torch.tensor([0.5, 0.0, 0.0, 0.5])
            sink(layer, weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dobnb.tallies.stream_attention", stream)
        patch.setattr("dobnb.measurement.token_roles", roles)
        inputs = from_tensors(torch.arange(7.0)[:, None], "seven")
        with pytest.raises(MatrixError, match=r"input 4, layer 2: row \(0, 0.*no mass left"):
            measure(Attends(), inputs, batch_size=3, block_size=6)
        with pytest.raises(MatrixError, match=r"input 4, layer 2: row \(0, 0.*no mass left"):
            measure(Attends(), inputs, batch_size=3, block_size=3, heads=False)


@pytest.mark.parametrize("named", [False, True])
def test_a_table_without_categories(named):
    rows = torch.randn(4, 6)
    kwargs = rtdl.FTTransformer.get_default_kwargs(n_blocks=2)
    model = rtdl.FTTransformer(n_cont_features=6, cat_cardinalities=[], d_out=1, **kwargs).eval()
    found = measure(model, from_tensors({"x_cont": rows} if named else rows, "rows"))
    assert (found.layers, found.n, found.provenance["model"]["content_tokens"]) == (1, [4], 6)
