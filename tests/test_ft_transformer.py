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
from filelock import FileLock
from rtdl_revisiting_models import FTTransformer
from scipy.spatial.distance import pdist

from dobnb import cli, ft_transformer, plots, training
from dobnb.capture import stream_attention
from dobnb.ft_transformer import against_null, build, evaluate, load_trained, measure_rows, predict, train
from dobnb.inputs import Inputs
from dobnb.measurement import measure
from dobnb.published import compare_table_3
from dobnb.tables import PARTS, Table, load_table, prepare, score
from dobnb.training import TrainingError, load_tensors, read_evaluation, read_record, save_evaluation


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
    assert sorted(path.name for path in run.iterdir() if path.suffix) == [
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
    untrained, first = build(table, 2, 5).state_dict(), load_tensors(run / "epoch_0000.safetensors")[0]
    assert all(torch.equal(value, untrained[name]) for name, value in first.items())


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


def test_progress_says_when_training_ends() -> None:
    history = {"loss": [1.0], "seconds": [60.0]}

    def line(max_epochs: int | None) -> str:
        return ft_transformer._Stopping([2.0], "RMSE", 16, max_epochs).line(history)

    assert line(None).endswith("16 epochs left (16 min 00 s) unless it improves")
    assert line(40).endswith("16 epochs left (16 min 00 s) unless it improves")
    assert line(2).endswith("1 epoch left (1 min 00 s)")  # however it goes
    assert line(17).endswith("16 epochs left (16 min 00 s)")


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
    """SIGKILL at whatever the process is at after epoch 4; then left alone."""
    command = [
        sys.executable, "-c",
        "import sys; from dobnb.ft_transformer import train; from dobnb.tables import load_table; "
        "train(load_table('diabetes'), blocks=2, seed=5, folder=sys.argv[1], batch_size=32, max_epochs=9, "
        "report=lambda line: print(line, flush=True))",
        str(tmp_path),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch   4 "):
                break
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "record.json").exists()
    rest = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()
    assert rest[-1].startswith("epoch   9 ") and len(rest) <= 5
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
    real, written = training.save_file, []

    def save_file(tensors: dict, path: str, metadata: dict) -> None:
        if "checkpoint" in path:
            written.append(path)
            if len(written) == 4:
                Path(path).write_bytes(b"half")
                raise OSError("no space left")
        real(tensors, path, metadata)

    monkeypatch.setattr(training, "save_file", save_file)
    with pytest.raises(OSError, match="no space left"):
        train(table, blocks=2, seed=5, folder=tmp_path, batch_size=32, max_epochs=9)
    monkeypatch.undo()
    assert not list(tmp_path.glob(".*.tmp"))
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
    with pytest.raises(TrainingError, match=r"checkpoint\.safetensors is damaged"):
        train(table, blocks=2, seed=5, folder=tmp_path)
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(TrainingError, match=r"record\.json is damaged"):
        train(table, blocks=2, seed=5, folder=tmp_path)
    (tmp_path / "record.json").write_text("[]")
    with pytest.raises(TrainingError, match="not a record of schema 1"):
        train(table, blocks=2, seed=5, folder=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blocks": 0}, "blocks is 0"),
        ({"blocks": 7}, "blocks is 7; FT-Transformer has default arguments for 1 to 6"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_epochs": 0}, "max_epochs is 0"),
        ({"patience": 0}, "patience is 0"),
        ({"seed": -1}, r"seed is -1; it must be from 0 to 2\*\*32 - 1"),
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
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf) in epoch 1, step [2-9]: training has diverged"):
        train(table, blocks=1, seed=0, folder=tmp_path, batch_size=32)
    with pytest.raises(TrainingError, match=r"the validation RMSE is (nan|inf) in epoch 1: training has diverged"):
        train(table, blocks=1, seed=0, folder=tmp_path / "one step", batch_size=300)
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


# Attention ----------------------------------------------------------------------------------------------------------


def reference_attention(model: FTTransformer, X: torch.Tensor) -> list[np.ndarray]:
    """Head-averaged attention of all blocks but the last, from the reference's modules and the formula of attention."""
    found = []
    x = torch.cat([model.cls_embedding(X.shape[:1]), model.cont_embeddings(X)], 1)
    for k, block in enumerate(model.backbone.blocks[:-1]):
        read = block["attention_normalization"](x) if k else x
        attention = block["attention"]
        q, key = (
            linear(read).unflatten(-1, (attention._n_heads, -1)).transpose(1, 2)
            for linear in (attention.W_q, attention.W_k)
        )
        weights = torch.softmax(q @ key.mT / key.shape[-1] ** 0.5, -1)
        found.append(weights.double().mean(1).detach().numpy())
        x = x + attention(read, read)
        x = x + block["ffn"](block["ffn_normalization"](x))
    return found


def kappa(A: np.ndarray) -> float:
    return pdist(A, "cityblock").max() / 2


def bound_is_tight(A: np.ndarray) -> bool:
    """By the two coefficients themselves, not by the theorem."""
    A = A / A.sum(-1, keepdims=True)
    return abs((1 + kappa(A)) / 2 - kappa((np.eye(len(A)) + A) / 2)) < 1e-10


def test_shares_against_the_reference_modules_and_scipy(table: Table, run: Path) -> None:
    X = prepare(table, 5).X["test"]
    for path in (run / "best.safetensors", run / "epoch_0000.safetensors"):
        model = load_trained(table, path)
        found = measure_rows(model, X)
        matrices = reference_attention(model, torch.from_numpy(X))
        assert found["n"] == 89 and len(matrices) == 1 == len(found["all"]["held"])
        for layer, A in enumerate(matrices):
            features = A[:, 1:, 1:] / A[:, 1:, 1:].sum(-1, keepdims=True)
            for name, of in (("all", A), ("features", features)):
                expected = sum(map(bound_is_tight, of))
                assert abs(found[name]["held"][layer] - expected) <= found[name]["near_ties"][layer]
                kappas = [kappa(one) for one in of]
                assert found[name]["kappa"][layer] == pytest.approx(np.quantile(kappas, [0.05, 0.5, 0.95]), rel=1e-3)
            assert np.allclose(found["attention"][layer], A.mean(0), atol=1e-6)
            whole = A.mean(0)[1:, 1:] / A.mean(0)[1:, 1:].sum(-1, keepdims=True)
            assert found["features"]["averaged"]["holds"][layer] == bound_is_tight(whole)
            assert found["features"]["averaged"]["kappa"][layer] == pytest.approx(kappa(whole), rel=1e-3)


def test_the_measuring_engine_counts_the_same(table: Table) -> None:
    model, X = build(table, 3, 0).eval(), prepare(table, 0).X["test"]
    rows = torch.from_numpy(X)
    inputs = Inputs("rows", "", len(X), lambda start, stop: {"x_cont": rows[start:stop], "x_cat": None})
    found, ours = measure(model, inputs, heads=False, depth=False), measure_rows(model, X)
    assert found.per_input["content"] == ours["features"]["held"] and found.per_input["all"] == ours["all"]["held"]
    assert found.averaged["content"] == ours["features"]["averaged"]["holds"]


def test_the_last_block_is_left_out(table: Table) -> None:
    found = measure_rows(build(table, 3, 0).eval(), prepare(table, 0).X["test"][:5])
    assert [len(found[name]["held"]) for name in ("features", "all")] == [2, 2]
    assert np.shape(found["attention"]) == (2, 11, 11) and np.allclose(np.sum(found["attention"], -1), 1, atol=1e-4)


def test_pairs_are_those_of_the_largest_total_variation(table: Table) -> None:
    model, X = build(table, 2, 0).eval(), prepare(table, 0).X["test"][:40]
    seen: list[torch.Tensor] = []
    stream_attention(model, (torch.from_numpy(X), None), lambda layer, weights: seen.append(weights.double().mean(1)))
    pairs = []
    for A in seen[0][:, 1:, 1:].numpy():
        A = A / A.sum(-1, keepdims=True)
        pairs.append(tuple(map(int, np.column_stack(np.triu_indices(10, 1))[pdist(A, "cityblock").argmax()])))
    found = measure_rows(model, X)["pairs"][0]
    assert {(i, j): count for i, j, count in found} == {
        pair: pairs.count(pair) for pair in sorted(set(pairs), key=pairs.count, reverse=True)[:10]
    } or len(set(pairs)) > 10
    assert found[0][2] == max(pairs.count(pair) for pair in pairs)


@pytest.fixture(scope="module")
def evaluation(table: Table, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        train(table, blocks=2, seed=seed, folder=folder / f"seed_{seed}", batch_size=32, max_epochs=3)
    return {"folder": folder, "record": evaluate(table, folder, [0, 1], untrained=3)}


def test_an_evaluation_has_runs_null_and_baselines(table: Table, evaluation: dict) -> None:
    record = evaluation["record"]
    assert [run["settings"]["seed"] for run in record["runs"]] == [0, 1]
    assert record["rows_measured"].startswith("the first 89 of the 89 test rows")
    assert record["baselines"].keys() == {"boosting", "linear"}
    for run in record["runs"]:
        assert [step["epoch"] for step in run["through_training"]] == [0, 1, 2]
        assert run["through_training"][0]["validation"] is None
        assert run["attention_all_test_rows"]["all"]["held"] == run["attention"]["all"]["held"]  # all 89 rows are taken
        assert run["through_training"][2]["validation"] == run["history"]["val"][1]
    # the null is what an untrained model gives, and epoch 0 of a run is an untrained model
    model = build(table, 2, record["untrained"][1]["seed"]).eval()
    again = measure_rows(model, prepare(table, record["untrained"][1]["seed"]).X["test"])
    assert record["untrained"][1]["features"]["held"] == again["features"]["held"]
    first = measure_rows(build(table, 2, 1).eval(), prepare(table, 1).X["test"])
    assert record["runs"][1]["through_training"][0]["all"]["held"] == first["all"]["held"]
    assert len({step["seed"] for step in record["untrained"]}) == 3


def test_an_evaluation_is_read_back_and_changes_are_noticed(evaluation: dict, tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    save_evaluation(evaluation["record"], path)
    assert read_evaluation(path) == evaluation["record"]
    held = evaluation["record"]["runs"][0]["attention"]["features"]["held"][0]
    changed = path.read_text().replace(f'"held": [{held}]', f'"held": [{held + 1}]', 1)
    assert changed != path.read_text()
    path.write_text(changed)
    with pytest.raises(TrainingError, match="does not match its digest"):
        read_evaluation(path)


def test_runs_that_do_not_belong_together_are_refused(table: Table, evaluation: dict, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"record\.json does not exist; train first"):
        evaluate(table, evaluation["folder"], [0, 7])
    with pytest.raises(TrainingError, match="there are no seeds"):
        evaluate(table, evaluation["folder"], [])
    for seed, epochs in ((0, 1), (1, 2)):
        train(table, blocks=2, seed=seed, folder=tmp_path / f"seed_{seed}", max_epochs=epochs)
    with pytest.raises(TrainingError, match="another max_epochs"):
        evaluate(table, tmp_path, [0, 1])
    train(table, blocks=1, seed=2, folder=tmp_path / "seed_2", max_epochs=1)
    with pytest.raises(TrainingError, match="model of one block queries cls alone"):
        evaluate(table, tmp_path, [2])


def test_one_process_a_folder(table: Table, tmp_path: Path) -> None:
    with FileLock(tmp_path / ".lock"), pytest.raises(TrainingError, match="another process trains in"):
        train(table, blocks=1, seed=0, folder=tmp_path, max_epochs=1)
    (tmp_path / ".checkpoint.safetensors.x.tmp").write_bytes(b"left by a killed process")
    train(table, blocks=1, seed=0, folder=tmp_path, max_epochs=1)
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*.tmp"))


# Command line -------------------------------------------------------------------------------------------------------


def test_the_command_trains_and_reads_what_is_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "ft-transformer", "--data", "diabetes", "--blocks", "2", "--seeds", "0", "1", "1"]
    command += ["--batch-size", "32", "--max-epochs", "2", "--untrained", "2", "--out", str(tmp_path / "run")]
    assert cli.main(command) == 0
    first = capsys.readouterr().out.splitlines()
    assert first[0] == "diabetes: 10 features, regression, rows: 282 train, 71 val, 89 test"
    assert [line.split("  ")[0] for line in first[3:9]] == ["seed 0"] * 3 + ["seed 1"] * 3
    assert len(read_evaluation(tmp_path / "run" / "evaluation.json")["untrained"]) == 2
    record = json.loads((tmp_path / "run" / "seed_1" / "record.json").read_text())
    assert f"test RMSE {record['metrics']['test']:.4f}" in first[8]
    assert cli.main(command) == 0
    again = capsys.readouterr().out.splitlines()
    assert again == [*first[:3], first[5], first[8], first[9]]
    assert cli.main([*command, "--precision", "bfloat16"]) == 2
    assert "holds a run with another precision" in capsys.readouterr().err


def test_the_command_refuses_a_bad_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.csv").write_text("a,b,y\n" + "1,2,2\n1,3,3\n" * 20)
    assert cli.main(["train", "ft-transformer", "--data", str(tmp_path / "mine.csv"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "dobnb: error: mine: column 'a' is constant in the training part; drop it\n"


def test_one_block_is_trained_and_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "ft-transformer", "--data", "diabetes", "--blocks", "1", "--max-epochs", "1", "--out"]
    assert cli.main([*command, str(tmp_path)]) == 0
    assert "the only block queries cls alone" in capsys.readouterr().out.splitlines()[-1]
    assert not (tmp_path / "evaluation.json").exists()


# Records and what is made of them -----------------------------------------------------------------------------------

RESULTS = Path(__file__).parents[1] / "results"
RECORDS = sorted(path for path in RESULTS.glob("ft_transformer_*.json") if "speed" not in path.name)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_recorded_evaluations_are_whole(path: Path) -> None:
    record = read_evaluation(path)
    settings = record["provenance"]["settings"]
    layers = settings["blocks"] - 1
    assert path.stem.endswith(f"_{settings['blocks']}") and record["untrained"][19]["n"] == 4000
    for run in record["runs"]:
        assert {key: run["settings"][key] for key in settings} == settings
        validation = run["history"]["val"]
        best = min(validation) if run["metric"] == "RMSE" else max(validation)
        assert validation[run["best_epoch"] - 1] == best == run["metrics"]["val"]
        assert len(validation) == run["best_epoch"] + settings["patience"]
        attention = run["attention"]
        tokens = len(record["features"]) + 1
        assert attention["n"] == 4000 and np.shape(attention["attention"]) == (layers, tokens, tokens)
        assert run["attention_all_test_rows"]["n"] == run["rows"]["test"]
        for name in ("features", "all"):
            assert len(attention[name]["held"]) == layers and max(attention[name]["held"]) <= 4000


def test_the_recorded_california_is_the_one_at_hand(test_data: Path) -> None:
    """Same rows, baselines and null: the last depend on rounding, so a few rows may fall the other way elsewhere."""
    record = read_evaluation(RESULTS / "ft_transformer_california_3.json")
    california = load_table("california", data_home=test_data / "scikit_learn_data")
    assert record["provenance"]["settings"]["table_digest"] == california.digest
    one = record["untrained"][0]
    found = measure_rows(build(california, 3, one["seed"]).eval(), prepare(california, one["seed"]).X["test"][:4000])
    assert np.allclose(found["features"]["held"], one["features"]["held"], atol=40)
    assert np.allclose(found["all"]["held"], one["all"]["held"], atol=40)


def synthetic() -> dict:
    """Two runs of three blocks, 10 rows: counts that are easy to add up by hand."""

    def attention(features: list[int], everything: list[int], averaged: list[bool]) -> dict:
        of = {"kappa": [[0.1, 0.2, 0.3]] * 2, "margin": [[0.01, 0.02, 0.03]] * 2}
        return {
            "n": 10,
            "features": {"held": features, "averaged": {"holds": averaged}, **of},
            "all": {"held": everything, "averaged": {"holds": [False, False]}, **of},
        }

    def run(seed: int, test: float, **counts: list) -> dict:
        return {
            "settings": {"seed": seed}, "metric": "RMSE", "metrics": {"test": test}, "best_epoch": 2,
            "history": {"val": [0.6, 0.5, 0.55]}, "attention": attention(**counts),
            "through_training": [
                {"epoch": k, "validation": None if k == 0 else 0.6 - k / 10, "n": 10}
                | {name: {"held": [k, 5], "kappa": [0.1, 0.2]} for name in ("features", "all")} for k in (0, 1, 2)
            ],
        }  # fmt: skip

    def null(*held: int) -> dict:
        of = {"held": list(held), "kappa": [0.001, 0.002], "margin": [1e-4, 2e-4]}
        return {"n": 10, "features": of, "all": of}

    return {
        "features": list("abcdefgh"),
        "baselines": {"boosting": {"test": 0.4702}, "linear": {"test": 0.7257}},
        "runs": [
            run(0, 0.4671, features=[1, 3], everything=[0, 2], averaged=[False, True]),
            run(1, 0.4612, features=[2, 4], everything=[1, 1], averaged=[False, False]),
        ],
        "untrained": [null(2, 4), null(4, 8)],
    }


def test_table_3_beside_ours() -> None:
    table = compare_table_3({("california", 3): synthetic()})
    paper, ours = table.loc["California, 3 blocks", "paper"], table.loc["California, 3 blocks", "this book"]
    columns = ["FT-T", "features", "all", "averaged"]
    assert list(paper[columns]) == ["0.473-0.475", "18.7%", "16.1%", "2/6"]
    assert list(ours[columns]) == ["0.461-0.467", "25.0%", "10.0%", "1/4"]
    assert (ours["seeds"], ours["N"], ours["boosting"], ours["linear"]) == ("2", "9", "0.470", "0.726")
    other = table.loc["Higgs, 3 blocks", "this book"]
    assert (other["seeds"], other["FT-T"], other["features"]) == ("not run", "", "")
    with pytest.raises(KeyError, match="california"):
        compare_table_3({("california", 4): synthetic()})


def test_against_the_null() -> None:
    table = against_null(synthetic())
    assert table.loc[("features", "1"), "trained, %"] == "10.0, 20.0"
    assert table.loc[("features", "all"), "trained, %"] == "20.0, 30.0"
    # untrained models hold 2 + 4 and 4 + 8 of 20: 30% and 60%, mean 45, standard deviation 30/sqrt(2)
    assert table.loc[("all", "all"), "untrained, %"] == "45.0 \N{PLUS-MINUS SIGN} 21.2"
    assert table.loc[("all", "2"), "range"] == "40.0 to 80.0"
    assert table.loc[("features", "1"), "kappa (untrained)"] == "0.2 (0.001)"
    assert table.loc[("features", "2"), "margin (untrained)"] == "0.02 (0.0002)"
    assert table.loc[("features", "all"), "margin (untrained)"] == ""


def test_figures_show_the_record() -> None:
    record = synthetic()
    curves = plots.training_curves({"one": record}).axes[0]
    assert list(curves.lines[0].get_ydata()) == [0.6, 0.5, 0.55]
    assert (curves.lines[1].get_xdata()[0], curves.lines[1].get_ydata()[0]) == (2, 0.5)
    points = plots.trained_and_untrained({"one": record}).axes[0].lines
    assert list(points[0].get_ydata()) == [20, 40] and list(points[1].get_ydata()) == [10, 20]
    assert list(points[3].get_xdata()) == [0.2, 0.2]
    through = plots.through_training(record["runs"][0]).axes
    assert list(through[1].lines[0].get_ydata()) == [0, 10, 20] and list(through[0].lines[0].get_xdata()) == [1, 2]
    heat = plots.named_attention(np.eye(2), ["cls", "age"], "layer 1").axes[0]
    assert [label.get_text() for label in heat.get_yticklabels()] == ["cls", "age"]


@pytest.mark.slow
def test_california_trained_as_the_command_does_is_competent(test_data: Path, tmp_path: Path) -> None:
    """Ten minutes on one core. The paper's models reach 0.473 to 0.475."""
    command = ["train", "ft-transformer", "--data", "california", "--data-home", str(test_data / "scikit_learn_data")]
    assert cli.main([*command, "--untrained", "2", "--out", str(tmp_path)]) == 0
    assert read_record(tmp_path / "seed_0" / "record.json")["metrics"]["test"] <= 0.485
