"""Untrained models are what their library draws, and K draws are K measurements, whatever interrupts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from hub_models import CONFIGS
from tiny import SMALL, noise, without_time
from transformers import AutoConfig, Dinov2Config, Dinov2Model

from dobnb import cli, measure, plots
from dobnb.inputs import InputError, random_words, read_inputs
from dobnb.measurement import Measurement, MeasurementError
from dobnb.models import MODELS, ModelError, config_of, load_model, load_untrained
from dobnb.published import compare_null
from dobnb.untrained import against_null, in_brief, measure_untrained, null_of, null_table, read_null

# The cards ----------------------------------------------------------------------------------------------------------

# What transformers has in a repository's config.json and its code does not read when it builds the model.
UNREAD = {"architectures", "interpolate_antialias", "interpolate_offset", "tie_weights_"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_card_knows_the_architecture_that_the_repository_states(name: str) -> None:
    theirs, ours = AutoConfig.for_model(**CONFIGS[name]).to_dict(), config_of(MODELS[name]).to_dict()
    assert {key for key in theirs | ours if theirs.get(key) != ours.get(key)} <= UNREAD


@pytest.mark.parametrize("name", ["dinov2-small-saliency", "minilm-l6"])
def test_an_embedded_architecture_is_that_of_its_weights(name: str) -> None:
    trained, drawn = (
        {key: value.shape for key, value in load(name).state_dict().items()}
        for load in (load_model, lambda name: load_untrained(name, 0))
    )
    extra = {key for key in drawn.keys() ^ trained.keys() if not key.startswith("pooler.")}
    assert extra <= {"embeddings.mask_token"}  # the graph has none; only pre-training reads it
    assert all(trained[key] == drawn[key] for key in trained.keys() & drawn.keys())


# Drawing ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny architecture that has no weights at all."""
    Dinov2Config(**SMALL).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_seed_decides_the_weights_and_nothing_else_is_drawn(folder: Path) -> None:
    before = torch.get_rng_state()
    first, again, other = (load_untrained(str(folder), seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["embeddings.cls_token"], other["embeddings.cls_token"])
    torch.manual_seed(3)
    theirs = Dinov2Model(Dinov2Config(**SMALL)).state_dict()  # as transformers itself draws them
    assert all(torch.equal(first[key], theirs[key]) for key in theirs)


def test_an_untrained_model_is_ready_to_be_measured() -> None:
    model = load_untrained("minilm-l6", 0)
    assert not model.training and {value.dtype for value in model.parameters()} == {torch.float32}
    query = model.encoder.layer[0].attention.self.query
    assert query.weight.std().item() == pytest.approx(0.02, rel=0.02) and not query.bias.any()  # BERT's initialisation


def test_a_model_of_timm_needs_no_hub(tmp_path: Path) -> None:
    model = load_untrained("timm:test_vit", 5)
    torch.manual_seed(5)
    theirs = timm.create_model("test_vit").state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in model.state_dict().items())
    timm.models.save_for_hf(timm.create_model("test_vit", num_classes=3), tmp_path, safe_serialization=True)
    (tmp_path / "model.safetensors").unlink()
    from_folder = load_untrained(str(tmp_path), 5)
    assert from_folder.head.out_features == 3 and not from_folder.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dinov3", 0), "no model is called 'dinov3'"),
        (("minilm-l6", -1), "seed is -1; pass one from 0"),
        (("minilm-l6", 0, "cuda:99"), "device 'cuda:99' is not available here"),
        (("roberta-base", 0, "cpu", "main"), "known without its repository; leave revision out"),
        (("timm:no_such_model", 0), "cannot build timm:no_such_model with timm"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_untrained(*arguments)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read config\.json"):
        load_untrained(str(tmp_path), 0)
    (tmp_path / "config.json").write_text('{"model_type": "no such type"}')
    with pytest.raises(ModelError, match="use a model that transformers has itself"):
        load_untrained(str(tmp_path), 0)


# Inputs without a tokenizer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "start", "stop", "last"), [("roberta-base", 0, 2, 50263), ("minilm-l6", 101, 102, 30520)]
)
def test_random_words_lie_in_the_vocabulary(name: str, start: int, stop: int, last: int) -> None:
    inputs = read_inputs("random", name, 40, untrained=True)
    batch = inputs.batch(0, 40)
    ids = batch["input_ids"]
    assert ids.shape == (40, 128) and batch["attention_mask"].all()
    assert (ids[:, 0] == start).all() and (ids[:, -1] == stop).all()
    words = ids[:, 1:-1]
    assert 1000 <= words.min() < 1100 + last // 50 and last - last // 50 < words.max() <= last
    assert inputs.name == "40 x 126 random word pieces, seed 0"
    # a row depends on its number alone
    assert torch.equal(random_words(name, 3).batch(0, 3)["input_ids"], ids[:3])
    assert random_words(name, 3).digest != random_words(name, 3, seed=1).digest


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hf:someone/bert", {}, "the vocabulary of hf:someone/bert is not known here"),
        ("dinov2-small", {}, "the vocabulary of dinov2-small is not known here"),
        ("roberta-base", {"length": 511}, "pass a length of at most 510"),
        ("roberta-base", {"n": 0}, "both are at least 1"),
    ],
)
def test_random_words_that_cannot_be(name: str, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        random_words(name, **({"n": 1} | options))
    with pytest.raises(InputError, match="reads images"):
        read_inputs("random", "dinov2-small", untrained=True)


def test_a_tokenizer_that_cannot_be_had_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, revision: str | None = None) -> None:
        raise ModelError(f"cannot load {name}: the hub is not there")

    monkeypatch.setattr("dobnb.models.load_tokenizer", unreachable)
    with pytest.raises(InputError, match="the hub is not there; or take random word pieces"):
        read_inputs("embedded", "roberta-base", 2, untrained=True)
    assert len(read_inputs("random", "roberta-base", 2, untrained=True)) == 2
    with pytest.raises(ModelError, match=r"the hub is not there$"):
        read_inputs("embedded", "minilm-l6", 2)


# Draws --------------------------------------------------------------------------------------------------------------


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def numbers(record: dict) -> dict:
    """A record without when, where and how long."""
    born = {key: value for key, value in record["provenance"].items() if key in ("model", "inputs", "settings")}
    return record | {"provenance": born}


def test_draws_are_measurements_of_untrained_models(folder: Path, tmp_path: Path) -> None:
    said: list[tuple[int, int]] = []
    record = measure_untrained(
        str(folder), noise(5), 3, tmp_path / "out", batch_size=2, progress=lambda *two: said.append(two)
    )
    assert said == [(draw * 5 + done, 15) for draw in range(3) for done in (2, 4, 5)]
    assert files(tmp_path / "out") == [*(f"seed_{seed}/result.json" for seed in range(3)), "untrained.json"]
    assert read_null(tmp_path / "out") == record == read_null(tmp_path / "out" / "untrained.json")
    assert [draw["seed"] for draw in record["untrained"]] == [0, 1, 2] and record["n"] == 5
    assert len({draw["sha256"] for draw in record["untrained"]}) == 3
    # against a measurement of the module, which knows nothing of seeds
    for seed, draw in enumerate(record["untrained"]):
        alone = measure(load_untrained(str(folder), seed), noise(5), batch_size=2)
        assert draw["content"]["held"] == alone.per_input["content"] and draw["all"]["held"] == alone.per_input["all"]
        assert draw["heads"] == {"held": alone.heads["content"], "tested": alone.heads["tested"]}
        assert draw["all"]["averaged"] == alone.averaged["all"]
        np.testing.assert_allclose(draw["content"]["kappa"]["q95"], alone.per_input["content_kappa"]["q95"], rtol=1e-5)
        gaps = [np.median(of) if of else None for of in alone.per_input["content_failing_gaps"]]
        assert draw["content"]["failing_gap"] == pytest.approx(gaps, rel=1e-5)
        assert draw["sha256"] == alone.provenance["model"]["sha256"]
        kept = Measurement.load(tmp_path / "out" / f"seed_{seed}")
        assert without_time(kept).per_input == without_time(alone).per_input


def test_an_interruption_loses_no_draw_and_more_can_be_added(folder: Path, tmp_path: Path) -> None:
    whole = measure_untrained(str(folder), noise(5), 3, tmp_path / "whole", batch_size=2)

    def stop(done: int, n: int) -> None:
        if done == 7:  # in the middle of the second draw
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_untrained(str(folder), noise(5), 2, tmp_path / "out", batch_size=2, progress=stop)
    assert "untrained.json" not in files(tmp_path / "out") and "seed_0/result.json" in files(tmp_path / "out")
    said: list[str] = []
    measure_untrained(str(folder), noise(5), 2, tmp_path / "out", batch_size=2, tell=said.append)
    assert len(said) == 1 and "seed_0 is finished already" in said[0]
    assert numbers(measure_untrained(str(folder), noise(5), 3, tmp_path / "out", batch_size=2)) == numbers(whole)
    with pytest.raises(MeasurementError, match=r"is another run: .*inputs\.n"):
        measure_untrained(str(folder), noise(4), 3, tmp_path / "out", batch_size=2)


def test_kill_9_in_the_middle_of_a_draw(folder: Path, tmp_path: Path) -> None:
    code = """
import os, signal, sys
sys.path.insert(0, "tests")
from tiny import noise
from dobnb.untrained import measure_untrained
stop = lambda done, n: os.kill(os.getpid(), signal.SIGKILL) if done == 9 else None
measure_untrained(sys.argv[1], noise(5), 3, sys.argv[2], batch_size=2, progress=stop)
"""
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "out")]
    assert subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": root}).returncode == -9
    again = measure_untrained(str(folder), noise(5), 3, tmp_path / "out", batch_size=2)
    assert numbers(again) == numbers(measure_untrained(str(folder), noise(5), 3, tmp_path / "new", batch_size=2))


def test_places_that_are_no_draws_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "result.json").write_text("{}")
    with pytest.raises(MeasurementError, match=r"holds other files, such as result\.json"):
        measure_untrained(str(folder), noise(1), 2, tmp_path / "taken")
    with pytest.raises(MeasurementError, match="is a file; pass a folder"):
        measure_untrained(str(folder), noise(1), 2, tmp_path / "taken" / "result.json")
    with pytest.raises(MeasurementError, match="at least one untrained model"):
        measure_untrained(str(folder), noise(1), 0, tmp_path / "new")
    with pytest.raises(MeasurementError, match="a module is measured with the weights that it has"):
        measure(load_untrained(str(folder), 0), noise(1), untrained=0)
    with pytest.raises(MeasurementError, match="a null is made of untrained models"):
        null_of("tiny", [measure(load_untrained(str(folder), 0), noise(1))])


def made(held: list[list[int]], n: int = 10) -> dict:
    """A record of the user's choice, of two layers."""

    def kind(counts: list[int]) -> dict:
        quantiles = {"q05": [0.1, 0.1], "median": [0.2, 0.25], "q95": [0.3, 0.3]}
        return {"held": counts, "kappa": quantiles, "margin": quantiles, "near_ties": [0, 0], "averaged": [True, False]}

    draws = [
        {"seed": seed, "sha256": "0", "content": kind(counts), "all": kind([0, 0]),
         "heads": {"held": [5, 5], "tested": [20, 20]}}
        for seed, counts in enumerate(held)
    ]  # fmt: skip
    born = {"model": {"name": "m", "title": "M"}, "inputs": {"name": "i"}}
    return {"schema": 1, "provenance": born, "layers": 2, "n": n, "untrained": draws}


def test_the_tables_give_mean_and_deviation_over_draws() -> None:
    null = made([[2, 4], [4, 8]])  # 30% and 60%; by layer 20 and 40, 40 and 80
    (row,) = null_table([null]).reset_index().to_dict("records")
    assert (row["architecture"], row["draws"], row["n"]) == ("M", 2, 10)
    assert row["content"] == "45.0 ± 21.2" and row["all tokens"] == "0.0 ± 0.0" and row["heads"] == "25.0 ± 0.0"
    assert row["kappa by layer"] == "0.200 to 0.250"
    table = against_null(in_brief(made([[10, 9]])), in_brief(null), ("content",))
    assert table.loc["content", "all"]["trained, %"] == "95.0"
    assert table.loc["content", "all"]["range"] == "30.0 to 60.0"
    assert table.loc["content", "1"].tolist() == ["100.0", "30.0 ± 14.1", "20.0 to 40.0", "0.2 (0.2)", "0.2 (0.2)"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda record: record | {"schema": 7}, "is not a null of schema 1"),
        (lambda record: record | {"layers": 3}, "is damaged"),
        (lambda record: record | {"untrained": []}, "is damaged"),
        (lambda record: record | {"untrained": [{}]}, "is damaged"),
        (lambda record: [record], "is not a null of schema 1"),
    ],
)
def test_a_damaged_record_is_refused(damage, message: str, tmp_path: Path) -> None:
    path = tmp_path / "untrained.json"
    path.write_text(json.dumps(made([[1, 1]])))
    assert read_null(path)["layers"] == 2
    path.write_text(json.dumps(damage(made([[1, 1]]))))
    with pytest.raises(MeasurementError, match=message):
        read_null(path)
    path.write_text("{")
    with pytest.raises(MeasurementError, match="not a readable JSON"):
        read_null(path)
    with pytest.raises(MeasurementError, match="does not exist"):
        read_null(tmp_path / "nothing.json")


# The command --------------------------------------------------------------------------------------------------------


def test_the_command_measures_a_model_of_the_paper_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dobnb.models._snapshot", lambda *_: pytest.fail("the hub was asked"))
    command = ["measure", "distilbert-base", "--untrained", "2", "--inputs", "random", "--n", "1", "--length", "6"]
    assert cli.main([*command, "--out", str(tmp_path / "out")]) == 0
    assert "2 untrained draws of distilbert-base on 1 inputs" in capsys.readouterr().out
    record = read_null(tmp_path / "out")
    model = record["provenance"]["model"]
    assert (model["name"], model["title"], model["layers"], model["tokens"]) == ("distilbert-base", "DistilBERT", 6, 8)
    assert str(tmp_path) not in json.dumps(record)
    assert cli.main(["show", str(tmp_path / "out"), str(tmp_path / "out" / "seed_1")]) == 0
    printed = capsys.readouterr().out
    assert "Untrained, %" in printed and "DistilBERT" in printed and "distilbert-base, untrained, seed 1" in printed
    for more in (["--shard", "1/2"], ["--matrices"]):
        assert cli.main([*command, *more, "--out", str(tmp_path / "other")]) == 2
        assert "takes neither --shard nor --matrices" in capsys.readouterr().err
    assert cli.main([*command[:2], "--untrained", "2", "--inputs", "random", "--n", "1", "--out", str(tmp_path)]) == 2


def test_the_papers_rows_stand_beside_the_null() -> None:
    null = made([[2, 4], [4, 8]])
    null["provenance"]["model"]["title"] = "DINOv2-L"
    other = made([[2, 4], [4, 8]])
    other["provenance"]["model"]["title"] = "ViT-B/16"
    table = compare_null([null, other], {})
    assert table.index.tolist() == [
        ("DINOv2-L", "trained, paper"), ("DINOv2-L", "untrained, 2 draws"),
        ("ViT-B/16", "trained, paper"), ("ViT-B/16", "untrained, 2 draws"),
    ]  # fmt: skip
    # the paper's Table 1 and abstract
    assert table.loc[("DINOv2-L", "trained, paper")].tolist() == [512, "99.98%", "81.9%", "91.4%", ""]
    assert table.loc[("ViT-B/16", "trained, paper"), "content"] == "64% (abstract)"
    assert table.loc[("DINOv2-L", "untrained, 2 draws"), "content"] == "45.0 ± 21.2%"


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "results").glob("untrained_*.json")))
def test_the_records_are_whole_and_clean(path: Path) -> None:
    record = read_null(path)
    assert [draw["seed"] for draw in record["untrained"]] == list(range(len(record["untrained"])))
    born = record["provenance"]
    assert path.stem.removeprefix("untrained_") == born["model"]["name"]
    assert born["commit"] and not born["commit"].endswith("+") and "/" not in json.dumps(born["inputs"])
    card = MODELS[born["model"]["name"]]
    assert (record["layers"], born["model"]["heads"], born["model"]["tokens"]) == (card.layers, card.heads, card.tokens)


def test_the_figures_show_the_record(folder: Path) -> None:
    trained = measure(load_untrained(str(folder), 9), noise(4))
    null = null_of("tiny", [measure(str(folder), noise(4), untrained=seed) for seed in range(3)])
    share, kappa = plots.beside_null({"one": (trained, null)}).axes
    held = np.array([draw["content"]["held"] for draw in null["untrained"]])
    assert list(share.lines[0].get_ydata()) == [25 * count for count in trained.per_input["content"]]
    np.testing.assert_allclose(share.lines[1].get_ydata(), 25 * held.mean(0))
    kappas = np.array([draw["content"]["kappa"]["median"] for draw in null["untrained"]])
    np.testing.assert_allclose(kappa.lines[1].get_ydata(), kappas.mean(0))
    band = kappa.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (pytest.approx(kappas.min()), pytest.approx(kappas.max()))
    wins = plots.self_wins({"one": {"trained": [1.0, 0.9], "untrained": [0.5, 0.4]}}).axes[0]
    assert list(wins.lines[1].get_ydata()) == [50, 40] and list(wins.lines[0].get_xdata()) == [1, 2]
    mass = plots.special_mass({"one": torch.tensor([[[0.1, 0.3], [0.3, 0.5]]])}).axes[0]
    np.testing.assert_allclose(mass.lines[0].get_ydata(), [20, 40], rtol=1e-6)
    np.testing.assert_allclose(mass.lines[1].get_ydata(), [30], rtol=1e-6)
