"""`measure` against plain loops over a model's own eager attention, and the file it writes."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from transformers import Dinov2Config, Dinov2Model, Dinov2WithRegistersConfig, Dinov2WithRegistersModel

from dobnb import Measurement, measure
from dobnb.inputs import Inputs
from dobnb.measurement import MeasurementError, by_layer, percent, table
from dobnb.published import TABLE_1, TABLE_4, compare_table_1

SMALL = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 56, "patch_size": 14}


def tiny(kind=Dinov2Model, config=Dinov2Config, **more):
    torch.manual_seed(0)
    model = kind(config(**SMALL, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than the initialisation, so that attention is far from uniform
            parameter.normal_(0, 0.4)
    return model


def noise(n, size=56):
    pixels = torch.from_numpy(np.random.default_rng(1).normal(size=(n, 3, size, size))).float()
    return Inputs("noise", "0" * 64, n, lambda start, stop: {"pixel_values": pixels[start:stop]}, size)


def brute_force(model, images, prefix):
    """What the paper's definitions say, a pair at a time, with the factor built and compared."""

    def kappa(A):
        return max(0.5 * np.abs(A[i] - A[j]).sum() for i in range(len(A)) for j in range(i))

    def tight(A):
        return 0.5 + 0.5 * kappa(A) - kappa((np.eye(len(A)) + A) / 2) < 1e-12

    def content(A):
        A = A[prefix:, prefix:]
        return A / A.sum(1, keepdims=True)

    model.set_attn_implementation("eager")
    pixels = images.batch(0, len(images))["pixel_values"]
    attentions = [layer.detach().double().numpy() for layer in model(pixels, output_attentions=True).attentions]
    mean = [layer.mean(1) for layer in attentions]
    averaged = [content(layer.mean(0)) for layer in mean]
    return {
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
    assert found.heads == {"content": expected["heads"], "tested": [18, 18, 18]}
    assert found.averaged["content"] == expected["averaged"]
    assert found.averaged["kappa"] == pytest.approx(expected["kappa"], abs=1e-6)
    assert found.averaged["doeblin"] == pytest.approx(expected["doeblin"], abs=1e-6)
    assert found.per_input["content_kappa"]["median"] == pytest.approx(expected["median"], abs=1e-6)
    assert [len(gaps) for gaps in found.per_input["content_failing_gaps"]] == [6 - c for c in expected["content"]]
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
        measure(tiny(), noise(0))
    with pytest.raises(MeasurementError, match="batch_size is 0"):
        measure(tiny(), noise(1), batch_size=0)


@pytest.fixture
def made():
    return Measurement(
        provenance={"model": {"name": "made up"}, "inputs": {"name": "none", "digest": "", "n": 1000}},
        layers=2,
        n=[1000, 1000],
        per_input={
            "content": [1000, 999],
            "all": [900, 800],
            "content_kappa": {"median": [0.5, 0.25]},
            "content_margin": {"median": [0.01, 2e-7]},
        },
        heads={"content": [3000, 3500], "tested": [4000, 4000]},
        averaged={"content": [True, False]},
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
        ("[1]", "not a measurement of schema 1"),
        ('{"schema": 2}', "not a measurement of schema 1"),
        ('{"schema": 1, "n": []}', "missing or unknown fields: averaged"),
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
    "heads of another length": {"heads": {"content": [1], "tested": [1, 1]}},
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


def test_percent_never_rounds_a_failure_away():
    assert percent(6144, 6144) == "100.0%"
    assert percent(6141, 6144) == "99.95%"
    assert percent(5582, 6144) == "90.9%"


def test_the_papers_tables_agree_with_each_other():
    """Table 4's failures are what Table 1's counts lack, and Table 1's pairs are 512 inputs a layer."""
    for name, row in TABLE_1.items():
        assert row.content_tested == 512 * row.layers
        assert row.content_tested - row.content_held == sum(TABLE_4[name].values())
        assert all(1 <= layer <= row.layers for layer in TABLE_4[name])


def test_the_comparison_puts_the_paper_first(made):
    rows = compare_table_1([made], ["DeiT-B"])
    assert rows.index.tolist() == [("DeiT-B (paper)", "the paper's"), ("made up", "none")]
    assert rows.iloc[0]["per input, content"] == "5582/6144 (90.9%)"
    assert len(compare_table_1([], ["DeiT-B"])) == 1
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
