"""The small vision transformer on digits: its objectives, training that goes on after a break, and what is measured."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist, squareform
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer

from dobnb import cli, plots, small_vit
from dobnb.small_vit import (
    OBJECTIVES,
    Digits,
    against_null,
    build,
    digits,
    distort,
    draw_hidden,
    evaluate,
    hide,
    load_trained,
    loss,
    measure_images,
    patches,
    reconstruct,
    score,
    train,
    who_attends,
)
from dobnb.training import TrainingError, load_tensors, read_evaluation, read_record, save_evaluation

FEW = 96
"""Training images, so that an epoch is three updates."""


@pytest.fixture(scope="module", autouse=True)
def few() -> Iterator[Digits]:
    whole = digits()
    part = whole._replace(
        train=whole.train[:FEW], train_labels=whole.train_labels[:FEW],
        test=whole.test[:40], test_labels=whole.test_labels[:40], digest="few",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_vit, "digits", lambda: part)
        yield part


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of short runs of both objectives that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for objective in OBJECTIVES:
        train(objective, 5, folder / objective / "seed_5", epochs=5)
    return folder


def last_weights(folder: Path) -> bytes:
    return (folder / "epoch_0005.safetensors").read_bytes()


# Data and objectives ------------------------------------------------------------------------------------------------


def test_the_split_is_every_digit_once_and_each_class_in_proportion() -> None:
    whole, raw = digits(), load_digits()
    assert len(whole.train) == 1297 and len(whole.test) == 500
    images = torch.cat([whole.train, whole.test]).flatten(1).double().numpy()
    labels = torch.cat([whole.train_labels, whole.test_labels]).tolist()
    scaled = (raw.data - raw.data.min()) / (raw.data.max() - raw.data.min())
    back = (images - images.min()) / (images.max() - images.min())

    def rows(pixels: np.ndarray, digits_: list[int]) -> Counter:
        return Counter((tuple(row), digit) for row, digit in zip(np.rint(16 * pixels).tolist(), digits_, strict=True))

    assert rows(back, labels) == rows(scaled, raw.target.tolist())
    assert abs(float(whole.train.mean())) < 1e-5 and float(whole.train.std()) == pytest.approx(1, abs=1e-5)
    shares = np.bincount(whole.test_labels, minlength=10) / np.bincount(raw.target)
    assert np.allclose(shares, 500 / 1797, atol=0.005)


def test_patches_are_two_by_two_row_by_row() -> None:
    image = torch.arange(64.0).view(1, 1, 8, 8)
    found = patches(image)
    assert found.shape == (1, 16, 4)
    assert found[0, 0].tolist() == [0, 1, 8, 9] and found[0, 5].tolist() == [18, 19, 26, 27]


def test_hidden_patches_are_six_and_painted_and_the_rest_is_left() -> None:
    images, hidden = torch.rand(7, 1, 8, 8), draw_hidden(7, torch.Generator().manual_seed(1))
    assert hidden.sum(1).tolist() == [6] * 7 and len({tuple(row) for row in hidden.tolist()}) > 1
    found = patches(hide(images, hidden))
    assert (found[hidden] == small_vit.PAINT).all()
    assert torch.equal(found[~hidden], patches(images)[~hidden])


def test_the_loss_of_labels_by_hand() -> None:
    """An untrained model gives ten equal logits: ln 10. With a bias of ln 3 for the right one, ln(12 / 3)."""
    model, images = build("labels", 0), torch.rand(2, 1, 8, 8)
    labels = torch.tensor([4, 4])
    nothing = torch.zeros(2, 16, dtype=torch.bool)
    assert loss(model, "labels", images, labels, nothing).item() == pytest.approx(math.log(10), rel=1e-6)
    with torch.no_grad():
        model.head.bias[4] = math.log(3)
    assert loss(model, "labels", images, labels, nothing).item() == pytest.approx(math.log(4), rel=1e-6)


def test_the_loss_of_reconstruction_by_hand() -> None:
    """The untrained model answers 0 for every pixel, so the loss is the hidden pixels' mean square and no other's."""
    model = build("masked", 0)
    image = torch.full((1, 1, 8, 8), 7.0)
    image[0, 0, :2, :2] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])  # patch 0
    image[0, 0, 6:, 6:] = 0.0  # patch 15
    hidden = torch.zeros(1, 16, dtype=torch.bool)
    hidden[0, [0, 15]] = True
    label = torch.tensor([0])
    assert loss(model, "masked", image, label, hidden).item() == pytest.approx((1 + 4 + 9 + 16) / 8, rel=1e-6)
    with torch.no_grad():
        model.head.bias.fill_(1.0)
    assert loss(model, "masked", image, label, hidden).item() == pytest.approx((0 + 1 + 4 + 9 + 4) / 8, rel=1e-6)


def test_reconstruction_does_not_see_what_is_hidden() -> None:
    model, hidden = build("masked", 1).eval(), draw_hidden(3, torch.Generator().manual_seed(2))
    torch.nn.init.normal_(model.head.weight)
    images = torch.rand(3, 1, 8, 8)
    side = hidden.view(3, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)
    others = torch.where(side, torch.rand(3, 1, 8, 8), images)
    with torch.no_grad():
        assert torch.equal(reconstruct(model, images, hidden), reconstruct(model, others, hidden))
        assert not torch.equal(reconstruct(model, images, hidden), reconstruct(model, 1 - images, hidden))


def test_scores_against_numpy(few: Digits) -> None:
    model = build("labels", 0).eval()
    with torch.no_grad():
        model.head.bias[3] = 1.0  # it says 3, always
    assert score(model, "labels") == np.mean(few.test_labels.numpy() == 3)
    model = build("masked", 0).eval()
    with torch.no_grad():
        model.head.bias.fill_(-0.25)
    hidden = draw_hidden(len(few.test), torch.Generator().manual_seed(0)).numpy()
    truth = few.test.numpy().reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 16, 4)
    mean = few.train.numpy().reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 16, 4).mean(0)
    expected = 1 - ((truth + 0.25)[hidden] ** 2).sum() / ((truth - mean)[hidden] ** 2).sum()
    assert score(model, "masked") == pytest.approx(expected, rel=1e-5)


def test_distortions(monkeypatch: pytest.MonkeyPatch, few: Digits) -> None:
    images = few.train[:8]
    moved = distort(images)
    assert not torch.allclose(moved, images, atol=0.1)
    assert moved.min() >= images.min() - 1e-5 and moved.max() <= images.max() + 1e-5
    for name in ("DEGREES", "STRETCH", "SHIFT"):
        monkeypatch.setattr(small_vit, name, 0.0)
    assert torch.allclose(distort(images), images, atol=1e-5)


def test_both_objectives_begin_with_the_same_weights() -> None:
    first, second = build("labels", 3).state_dict(), build("masked", 3).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first if not name.startswith("head."))
    assert not first["head.weight"].any() and not second["head.weight"].any()
    assert not torch.equal(first["pos_embed"], build("labels", 4).state_dict()["pos_embed"])


# Training -----------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_run_that_breaks_off_goes_on_to_the_same_weights(
    runs: Path, tmp_path: Path, objective: str, after: int
) -> None:
    """After 5 epochs training is over, and only the record is missing."""
    lines: list[str] = []

    def stop(line: str) -> None:
        lines.append(line)
        if len(lines) == after:
            raise Stop

    with pytest.raises(Stop):
        train(objective, 5, tmp_path, epochs=5, report=stop)
    torch.rand(3)  # what the process drew meanwhile does not matter
    record = train(objective, 5, tmp_path, epochs=5, report=lines.append)
    whole = runs / objective / "seed_5"
    assert len(lines) == 5 and last_weights(tmp_path) == last_weights(whole)
    again = read_record(whole / "record.json")
    assert record["history"]["loss"] == again["history"]["loss"] and record["test"] == again["test"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in whole.iterdir())


def test_a_run_leaves_snapshots_and_a_record(runs: Path) -> None:
    folder = runs / "labels" / "seed_5"
    assert sorted(path.name for path in folder.iterdir() if path.suffix) == [
        *(f"epoch_000{k}.safetensors" for k in (0, 1, 2, 4, 5)), "record.json",
    ]  # fmt: skip
    record = read_record(folder / "record.json")
    assert record["settings"]["updates"] == 15 and len(record["history"]["loss"]) == 5
    assert record["history"]["loss"][-1] < record["history"]["loss"][0]
    assert record["test"] == pytest.approx(score(load_trained(folder / "epoch_0005.safetensors"), "labels"), rel=1e-5)
    untrained, first = build("labels", 5).state_dict(), load_tensors(folder / "epoch_0000.safetensors")[0]
    assert all(torch.equal(value, untrained[name]) for name, value in first.items())


def test_both_objectives_see_the_same_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Same order, same distortions, same hidden patches, update by update."""
    seen: dict[str, list] = {}
    real = small_vit.loss

    def spy(model, objective, images, labels, hidden):
        seen.setdefault(objective, []).append((images, labels, hidden))
        return real(model, objective, images, labels, hidden)

    monkeypatch.setattr(small_vit, "loss", spy)
    for objective in OBJECTIVES:
        train(objective, 1, tmp_path / objective, epochs=2)
    assert len(seen["labels"]) == len(seen["masked"]) == 6
    for ours, theirs in zip(seen["labels"], seen["masked"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_callers_generator_is_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    train("labels", 0, tmp_path, epochs=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"objective": "both"}, "objective is 'both'; pass labels or masked"),
        ({"epochs": 0}, "epochs is 0; it must be at least 1"),
        ({"seed": -1}, "seed is -1; it must be from 0"),
    ],
)
def test_arguments_out_of_range(tmp_path: Path, arguments: dict, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        train(**{"objective": "labels", "seed": 0, "folder": tmp_path / "run"} | arguments)
    assert not (tmp_path / "run").exists()


def test_another_run_in_the_folder_and_a_foreign_file_are_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="holds a run with another objective; pass another folder"):
        train("masked", 5, runs / "labels" / "seed_5", epochs=5)
    small_vit.save_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(1)}, {"settings": {"blocks": 3}})
    with pytest.raises(TrainingError, match="holds no vision transformer"):
        load_trained(tmp_path / "x.safetensors")
    with pytest.raises(TrainingError, match="does not exist; train first"):
        load_trained(tmp_path / "y.safetensors")


def test_a_loss_that_is_not_finite_stops_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(small_vit, "LEARNING_RATE", 1e30)
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf) in epoch \d, step \d: training has diverged"):
        train("labels", 0, tmp_path, epochs=5)


# What is measured ---------------------------------------------------------------------------------------------------


def reference_attention(model: VisionTransformer, images: torch.Tensor) -> np.ndarray:
    """Head-averaged attention out of timm's own parts: shape (layers, images, 17, 17)."""
    found = []

    def keep(block, arguments):
        x = block.norm1(arguments[0])
        n, tokens, _ = x.shape
        qkv = block.attn.qkv(x).double().view(n, tokens, 3, model.blocks[0].attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = qkv[0] @ qkv[1].mT / math.sqrt(qkv.shape[-1])
        found.append(scores.softmax(-1).mean(1).numpy())

    handles = [block.register_forward_pre_hook(keep) for block in model.blocks]
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return np.stack(found)


def pairs(A: np.ndarray) -> tuple[float, list[tuple[int, int]], bool]:
    """kappa, the pairs that attain it, and whether one of them is mutually self-dominant."""
    tv = squareform(pdist(A, "cityblock")) / 2
    attaining = [(int(i), int(j)) for i, j in np.argwhere(np.triu(tv >= tv.max() - 1e-12, 1))]
    holds = any(A[i, i] >= A[j, i] and A[j, j] >= A[i, j] for i, j in attaining)
    return tv.max(), attaining, holds


def test_counts_agree_with_timms_parts_and_scipy(runs: Path, few: Digits) -> None:
    """A stored checkpoint recomputed; float32 attention may flip a verdict whose margin is within rounding."""
    model = load_trained(runs / "masked" / "seed_5" / "epoch_0005.safetensors")
    found = measure_images(model, few.test)
    whole = reference_attention(model, few.test)
    for layer, matrices in enumerate(whole):
        everything = [pairs(A) for A in matrices]
        content = [A[1:, 1:] / A[1:, 1:].sum(-1, keepdims=True) for A in matrices]
        patchwise = [pairs(A) for A in content]
        for tokens, reports in (("content", patchwise), ("all", everything)):
            part = found[tokens]
            assert abs(part["held"][layer] - sum(holds for *_, holds in reports)) <= part["near_ties"][layer]
            quantiles = np.quantile([kappa for kappa, *_ in reports], [0.05, 0.5, 0.95])
            assert part["kappa"][layer] == pytest.approx(quantiles, rel=1e-4)
        assert abs(found["cls_pairs"][layer] - sum(0 in pair[0] for _, pair, _ in everything)) <= 1
        failing = sum(0 in pair[0] and not holds for _, pair, holds in everything)
        assert abs(found["cls_failing"][layer] - failing) <= 1
        members = np.bincount(np.ravel([pair[0] for _, pair, _ in patchwise]), minlength=16)
        assert np.abs(np.array(found["members"][layer]) - members).sum() <= 4
        itself = matrices.diagonal(axis1=1, axis2=2)[:, 1:].mean()
        assert found["mass"]["itself"][layer] == pytest.approx(itself, rel=1e-4)
        assert found["mass"]["cls"][layer] == pytest.approx(matrices[:, 1:, 0].mean(), rel=1e-4)
        mean = matrices.mean(0)
        assert found["all"]["averaged"][layer] == pairs(mean)[2]
    assert found["heads_tested"] == 40 * small_vit.HEADS


def test_an_evaluation_has_every_run_through_training_and_the_null(runs: Path, tmp_path: Path) -> None:
    record = evaluate(runs, [5], untrained=2)
    assert [run["settings"]["objective"] for run in record["runs"]] == ["labels", "masked"]
    for run in record["runs"]:
        steps = run["through_training"]
        assert [step["epoch"] for step in steps] == [0, 1, 2, 4, 5] and steps[-1]["test"] == run["test"]
        assert run["some_hidden"]["n"] == 40
    first, second = (run["through_training"][0] for run in record["runs"])
    assert first["content"] == second["content"]  # untrained, they are the same model
    assert [one["seed"] for one in record["untrained"]] == [10_000, 10_001]
    assert record["untrained"][0]["content"] != record["untrained"][1]["content"]
    path = tmp_path / "evaluation.json"
    save_evaluation(record, path)
    assert read_evaluation(path) == record
    path.write_text(path.read_text().replace('"held": [', '"held": [1, ', 1))
    with pytest.raises(TrainingError, match="does not match its digest"):
        read_evaluation(path)


def test_the_command_trains_and_reads_what_is_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "vit", "--epochs", "1", "--seeds", "0", "1", "1", "--untrained", "1"]
    command += ["--out", str(tmp_path / "run")]
    assert cli.main(command) == 0
    first = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in first[:-1:2]] == [
        f"{objective}, seed {seed}" for objective in ("labels", "masked") for seed in (0, 1)
    ]
    assert len(read_evaluation(tmp_path / "run" / "evaluation.json")["runs"]) == 4
    record = json.loads((tmp_path / "run" / "masked" / "seed_1" / "record.json").read_text())
    assert f"masked, seed 1  test R2 {record['test']:.4f}" in first
    assert cli.main(command) == 0
    assert capsys.readouterr().out.splitlines() == [*first[1:-1:2], first[-1]]
    assert cli.main([*command, "--objective", "labels", "--epochs", "2"]) == 2
    assert "holds a run with another epochs and updates" in capsys.readouterr().err


# Tables and figures -------------------------------------------------------------------------------------------------


def synthetic() -> dict:
    """Two layers, ten images; two seeds an objective, two untrained models."""

    def model(content: list[int], everything: list[int], kappa: float) -> dict:
        part = {"kappa": [[0.0, kappa, 1.0]] * 2, "margin": [[0.0, 0.02, 1.0]] * 2, "failing_gap": [None, 0.25]}
        return {
            "n": 10, "content": {"held": content, **part}, "all": {"held": everything, **part},
            "cls_pairs": [1, 4], "cls_failing": [0, 3], "mass": {"itself": [1 / 17, 2 / 17], "cls": [0.0, 1.0]},
        }  # fmt: skip

    def run(objective: str, seed: int, content: list[int]) -> dict:
        steps = [
            {"epoch": 0, "test": 0.1, **model([0, 0], [10, 10], 0.1)},
            {"epoch": 1, "test": 0.9, **model(content, [10, 4], 0.5)},
        ]
        return {"settings": {"objective": objective, "seed": seed}, "metric": "accuracy", "through_training": steps}

    return {
        "runs": [run("labels", 0, [10, 0]), run("labels", 1, [6, 2]), run("masked", 0, [10, 10]),
                 run("masked", 1, [10, 10])],
        "untrained": [model([0, 10], [5, 5], 0.2), model([10, 10], [5, 5], 0.2)],
    }  # fmt: skip


def test_tables_by_hand() -> None:
    found = against_null(synthetic())
    assert found.loc[("content", "1"), "labels"] == "80 \N{PLUS-MINUS SIGN} 28 (0.50, 2e-02)"  # 100 and 60
    assert found.loc[("content", "all"), "labels"] == "45 \N{PLUS-MINUS SIGN} 7"  # 50 and 40
    assert found.loc[("content", "2"), "masked"] == "100 \N{PLUS-MINUS SIGN} 0 (0.50, 2e-02)"
    assert found.loc[("content", "1"), "untrained"] == "50 \N{PLUS-MINUS SIGN} 71 (0.20, 2e-02)"
    assert found.loc[("all", "2"), "labels"] == "40 \N{PLUS-MINUS SIGN} 0 (0.50, 2e-02)"
    found = who_attends(synthetic())
    assert found.loc[("labels", 2)].tolist() == ["2.00", "17.00", "40", "50", "25.0"]  # 6 of 20 of 12 that fail
    assert found.loc[("labels", 1)].tolist() == ["1.00", "0.00", "10", "none fail", "none fail"]


def test_figures_show_the_record() -> None:
    record = synthetic()
    axes = plots.objectives_by_layer(record).axes
    bold = [line for line in axes[0].lines if line.get_label() in ("labels", "masked", "untrained")]
    assert [list(line.get_ydata()) for line in bold] == [[50, 100], [80, 10], [100, 100]]
    assert list(axes[2].lines[1].get_ydata()) == [0.5, 0.5]
    runs = [run for run in record["runs"] if run["settings"]["objective"] == "labels"]
    heat = plots.layers_through_training({"labels": runs}).axes[0]
    assert [text.get_text() for text in heat.texts] == ["0", "80", "0", "10"]  # layer 1 at both epochs, then layer 2
    assert [label.get_text() for label in heat.get_xticklabels()] == ["0\n0.10", "1\n0.90"]
    kappa = plots.layers_through_training({"labels": runs}, "kappa").axes[0]
    assert [text.get_text() for text in kappa.texts] == ["10", "50"] * 2
    maps = plots.pair_members({"labels": np.arange(32).reshape(2, 4, 4)}).axes
    assert len(maps) == 2 and maps[0].images[0].get_array()[3, 3] == 1
    assert maps[1].images[0].get_array()[0, 0] == 16 / 31


# The record ---------------------------------------------------------------------------------------------------------


def test_the_record_is_whole_and_its_models_are_competent() -> None:
    record = read_evaluation(Path(__file__).parents[1] / "results" / "vit_digits.json")
    assert record["provenance"]["settings"]["data_digest"] == digits().digest
    assert not record["provenance"]["commit"].endswith("+")
    seeds = {objective: set() for objective in OBJECTIVES}
    for run in record["runs"]:
        seeds[run["settings"]["objective"]].add(run["settings"]["seed"])
        assert run["test"] >= {"labels": 0.97, "masked": 0.3}[run["settings"]["objective"]]
        steps = run["through_training"]
        assert [step["epoch"] for step in steps][::7] == [0, 60] and steps[-1]["test"] == run["test"]
        for step in steps:
            assert step["n"] == 500 and all(len(step[tokens]["held"]) == 6 for tokens in ("content", "all"))
    assert seeds["labels"] == seeds["masked"] and len(seeds["labels"]) >= 5
    assert len(record["untrained"]) >= 20
