"""FT-Transformer: training that goes on after a kill, evaluation, what is refused, and the skipped rows."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rtdl_revisiting_models import FTTransformer

from dobnb import cli, ft_transformer
from dobnb.ft_transformer import TrainingError, build, load_tensors, load_trained, predict, read_record, train
from dobnb.tables import PARTS, Table, load_table, prepare, score


@pytest.fixture(scope="module")
def table() -> Table:
    return load_table("diabetes")


@pytest.fixture(scope="module")
def run(table: Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(table, blocks=2, seed=5, folder=folder, batch_size=32, max_epochs=9)
    return folder


def weights(folder: Path) -> bytes:
    return (folder / "best.safetensors").read_bytes()


# Training -----------------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_best_weights_a_record_and_snapshots(table: Table, run: Path) -> None:
    record = read_record(run / "record.json")
    assert sorted(path.name for path in run.iterdir()) == [
        "best.safetensors", *(f"epoch_000{k}.safetensors" for k in (0, 1, 2, 4, 8)), "record.json",
    ]  # fmt: skip
    validation = record["history"]["val"]
    assert len(validation) == 9 and validation[record["best_epoch"] - 1] == min(validation)
    assert record["metrics"]["val"] == min(validation)
    assert record["settings"]["seed"] == 5 and record["rows"] == {"train": 282, "val": 71, "test": 89}
    prepared = prepare(table, 5)
    model = load_trained(table, run / "best.safetensors")
    assert not model.training
    for part in PARTS:
        assert record["metrics"][part] == score(table, part, predict(model, prepared.X[part], prepared, table))
    untrained = build(table, 2, 5).state_dict()
    assert all(torch.equal(value, untrained[name]) for name, value in load_tensors(run / "epoch_0000.safetensors")[0].items())


def test_training_learns(table: Table, tmp_path: Path) -> None:
    record = train(table, blocks=1, seed=0, folder=tmp_path, batch_size=16, max_epochs=40)
    mean = table.y["train"].mean()
    blind = float(np.sqrt(np.mean((table.y["test"] - mean) ** 2)))
    assert record["metrics"]["test"] < 0.9 * blind
    assert record["history"]["loss"][-1] < record["history"]["loss"][0]


def test_training_ends_after_patience(table: Table, tmp_path: Path) -> None:
    lines: list[str] = []
    record = train(table, blocks=1, seed=0, folder=tmp_path, batch_size=16, patience=3, report=lines.append)
    validation = record["history"]["val"]
    assert len(validation) - record["best_epoch"] == 3 == len(lines) - record["best_epoch"]
    assert f"validation RMSE {validation[-1]:.4f}" in lines[-1] and "0 epochs left" in lines[-1]
    assert "3 epochs left" in lines[record["best_epoch"] - 1]


def test_same_seed_same_weights_other_seed_other_weights(table: Table, run: Path, tmp_path: Path) -> None:
    train(table, blocks=2, seed=5, folder=tmp_path / "5", batch_size=32, max_epochs=9)
    assert weights(tmp_path / "5") == weights(run)
    train(table, blocks=2, seed=6, folder=tmp_path / "6", batch_size=32, max_epochs=9)
    assert weights(tmp_path / "6") != weights(run)


def test_the_callers_generator_is_left_alone(table: Table, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    build(table, 1, 0)
    train(table, blocks=1, seed=0, folder=tmp_path, max_epochs=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_classification(tmp_path: Path, table: Table) -> None:
    """Two classes that one feature divides: accuracy, higher is better, probabilities."""
    X = dict(table.X)
    y = {part: (rows[:, 2] > np.median(table.X["train"][:, 2])).astype(np.float64) for part, rows in X.items()}
    two = replace(table, name="two", task="classification", y=y)
    record = train(two, blocks=1, seed=0, folder=tmp_path, batch_size=16, max_epochs=15)
    assert record["metric"] == "accuracy" and record["metrics"]["test"] > 0.9
    assert record["metrics"]["val"] == max(record["history"]["val"])
    prepared = prepare(two, 0)
    p = predict(load_trained(two, tmp_path / "best.safetensors"), prepared.X["test"], prepared, two)
    assert ((p > 0) & (p < 1)).all() and score(two, "test", p) == record["metrics"]["test"]


def test_bfloat16_trains_and_is_evaluated_in_float32(table: Table, tmp_path: Path) -> None:
    record = train(table, blocks=1, seed=0, folder=tmp_path, batch_size=32, max_epochs=2, precision="bfloat16")
    full = train(table, blocks=1, seed=0, folder=tmp_path / "full", batch_size=32, max_epochs=2)
    assert record["history"]["loss"] != full["history"]["loss"]
    assert record["history"]["loss"] == pytest.approx(full["history"]["loss"], rel=0.05)
    assert all(value.dtype == torch.float32 for value in load_tensors(tmp_path / "best.safetensors")[0].values())


# Killed and started again -------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_run_that_breaks_off_goes_on_to_the_same_weights(table: Table, run: Path, tmp_path: Path, after: int) -> None:
    """After 9 epochs training is over, and only the record is missing."""
    lines: list[str] = []

    def stop(line: str) -> None:
        lines.append(line)
        if len(lines) == after:
            raise Stop

    with pytest.raises(Stop):
        train(table, blocks=2, seed=5, folder=tmp_path, batch_size=32, max_epochs=9, report=stop)
    torch.rand(3)  # what the process drew meanwhile does not matter
    record = train(table, blocks=2, seed=5, folder=tmp_path, batch_size=32, max_epochs=9, report=lines.append)
    assert len(lines) == 9
    assert weights(tmp_path) == weights(run)
    whole = read_record(run / "record.json")
    assert record["history"]["loss"] == whole["history"]["loss"] and record["metrics"] == whole["metrics"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in run.iterdir())


def test_killed_for_good_it_goes_on_to_the_same_weights(table: Table, run: Path, tmp_path: Path) -> None:
    """SIGKILL, twice, at whatever the process is at some time after epochs 2 and 5; then left alone."""
    command = [
        sys.executable, "-c",
        "import sys; from dobnb.ft_transformer import train; from dobnb.tables import load_table; "
        "train(load_table('diabetes'), blocks=2, seed=5, folder=sys.argv[1], batch_size=32, max_epochs=9, "
        "report=lambda line: print(line, flush=True))",
        str(tmp_path),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    for last in (2, 5):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(f"epoch {last:3d} "):
                    break
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "record.json").exists()
    rest = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()
    assert rest[-1].startswith("epoch   9 ") and len(rest) <= 4
    assert weights(tmp_path) == weights(run)


def test_a_finished_run_is_read_not_repeated(table: Table, run: Path) -> None:
    before = weights(run)
    record = train(
        table, blocks=2, seed=5, folder=run, batch_size=32, max_epochs=9, report=lambda line: pytest.fail(line)
    )
    assert record == read_record(run / "record.json") and weights(run) == before


def test_half_a_write_leaves_the_checkpoint_before_it(
    table: Table, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full while the checkpoint of epoch 4 is written."""
    real, written = ft_transformer.save_file, []

    def save_file(tensors: dict, path: str, metadata: dict) -> None:
        if "checkpoint" in path:
            written.append(path)
            if len(written) == 4:
                Path(path).write_bytes(b"half")
                raise OSError("no space left")
        real(tensors, path, metadata)

    monkeypatch.setattr(ft_transformer, "save_file", save_file)
    with pytest.raises(OSError, match="no space left"):
        train(table, blocks=2, seed=5, folder=tmp_path, batch_size=32, max_epochs=9)
    monkeypatch.undo()
    assert not list(tmp_path.glob(".*"))
    assert len(load_tensors(tmp_path / "checkpoint.safetensors")[1]["history"]["val"]) == 3
    train(table, blocks=2, seed=5, folder=tmp_path, batch_size=32, max_epochs=9)
    assert weights(tmp_path) == weights(run)


# Refusals -----------------------------------------------------------------------------------------------------------


def test_another_run_in_the_folder_is_refused(table: Table, run: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="holds a run with another seed; pass another folder"):
        train(table, blocks=2, seed=6, folder=run, batch_size=32, max_epochs=9)
    with pytest.raises(TrainingError, match="another batch_size and blocks"):
        train(table, blocks=3, seed=5, folder=run, batch_size=64, max_epochs=9)
    (tmp_path / "checkpoint.safetensors").write_bytes(b"no such thing")
    with pytest.raises(TrainingError, match="checkpoint.safetensors is damaged"):
        train(table, blocks=2, seed=5, folder=tmp_path)
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(TrainingError, match="record.json is damaged"):
        train(table, blocks=2, seed=5, folder=tmp_path)
    (tmp_path / "record.json").write_text("[]")
    with pytest.raises(TrainingError, match="not a record of schema 1"):
        train(table, blocks=2, seed=5, folder=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blocks": 0}, "blocks is 0"),
        ({"blocks": 7}, "blocks is 7; FT-Transformer has defaults for 1 to 6"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_epochs": 0}, "max_epochs is 0"),
        ({"patience": 0}, "patience is 0"),
        ({"precision": "float16"}, "precision is 'float16'"),
    ],
)
def test_arguments_out_of_range(table: Table, tmp_path: Path, arguments: dict, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        train(table, **({"blocks": 1, "seed": 0, "folder": tmp_path / "new"} | arguments))
    assert not (tmp_path / "new").exists()


def test_a_loss_that_is_not_finite_stops_the_run(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ft_transformer, "LEARNING_RATE", 1e30)
    with pytest.raises(TrainingError, match="the loss is (nan|inf) in epoch 1, step [2-9]: training has diverged"):
        train(table, blocks=1, seed=0, folder=tmp_path, batch_size=32)
    assert not (tmp_path / "record.json").exists()


def test_weights_of_another_table_are_refused(table: Table, run: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"gone\.safetensors does not exist"):
        load_trained(table, tmp_path / "gone.safetensors")
    with pytest.raises(TrainingError, match="trained on another table than this diabetes"):
        load_trained(replace(table, digest="0"), run / "best.safetensors")


# The model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_skipping_the_discarded_rows_changes_nothing(table: Table, blocks: int) -> None:
    """Output and gradients of the reference as it is and with the last block's feed-forward part for cls alone."""
    ours = build(table, blocks, 0).double().eval()
    reference = FTTransformer(
        n_cont_features=10, cat_cardinalities=[], d_out=1, **FTTransformer.get_default_kwargs(n_blocks=blocks)
    ).double().eval()  # fmt: skip
    reference.load_state_dict(ours.state_dict())
    X = torch.randn(7, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one, two = ours(X, None), reference(X, None)
    assert torch.allclose(one, two, rtol=0, atol=1e-13)
    one.square().sum().backward()
    two.square().sum().backward()
    for (name, p), q in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12), name


def test_the_rows_are_skipped(table: Table) -> None:
    seen = []
    model = build(table, 2, 0)
    for block in model.backbone.blocks:
        block["ffn"].register_forward_hook(lambda module, arguments, output: seen.append(tuple(output.shape)))
    model(torch.zeros(4, 10), None)
    width = FTTransformer.get_default_kwargs(2)["d_block"]
    assert seen == [(4, 11, width), (4, 1, width)]


def test_embeddings_biases_and_normalisations_do_not_decay(table: Table) -> None:
    model = build(table, 2, 0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decay, none = ({names[p] for p in group["params"]} for group in model.make_parameter_groups())
    assert all(name.endswith("weight") and "normalization" not in name.split(".")[-2] for name in decay - {
        "backbone.output.normalization.weight"
    })  # fmt: skip
    assert {"cls_embedding.weight", "cont_embeddings.weight", "cont_embeddings.bias"} <= none


# Command line -------------------------------------------------------------------------------------------------------


def test_the_command_trains_and_reads_what_is_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "ft-transformer", "--data", "diabetes", "--blocks", "1", "--seeds", "0", "1", "1"]
    command += ["--batch-size", "32", "--max-epochs", "2", "--out", str(tmp_path / "run")]
    assert cli.main(command) == 0
    first = capsys.readouterr().out.splitlines()
    assert first[0] == "diabetes: 10 features, regression, rows: 282 train, 71 val, 89 test"
    assert [line.split("  ")[0] for line in first[3:]] == ["seed 0"] * 3 + ["seed 1"] * 3
    record = json.loads((tmp_path / "run" / "seed_1" / "record.json").read_text())
    assert f"test RMSE {record['metrics']['test']:.4f}" in first[-1]
    assert cli.main(command) == 0
    again = capsys.readouterr().out.splitlines()
    assert again == first[:3] + [first[5], first[8]]
    assert cli.main([*command, "--precision", "bfloat16"]) == 2
    assert "holds a run with another precision" in capsys.readouterr().err


def test_the_command_refuses_a_bad_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.csv").write_text("a,y\n" + "1,2\n1,3\n" * 20)
    assert cli.main(["train", "ft-transformer", "--data", str(tmp_path / "mine.csv"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "dobnb: error: mine: column 'a' is constant in the training part; drop it\n"
