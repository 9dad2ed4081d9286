"""The command line: what it prints, writes, and how it ends."""

import json
import os
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dobnb import __version__, cli
from dobnb.files import write_record
from dobnb.inputs import photographs
from dobnb.measurement import measure
from dobnb.models import MODELS, is_cached
from dobnb.weights import EMBEDDED

NAME = "dinov2-small-saliency"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a measurement that the command line made: two embedded photographs."""
    folder = tmp_path_factory.mktemp("measured") / "runs" / "found"
    assert cli.main(["measure", NAME, "--n", "2", "--batch-size", "1", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of some 600 word pieces."""
    file = tmp_path_factory.mktemp("prose") / "prose.txt"
    file.write_text("\n".join(f"The {n}th of {n + 7} grey herons flew over a lake at dawn." for n in range(40)))
    return file


def texts(prose: Path, out: Path, *more: str) -> list[str]:
    """A run of the embedded text model in two blocks, 32 and 8 inputs of 12 word pieces."""
    return ["measure", "minilm-l6", "--inputs", str(prose), "--n", "40", "--length", "12", "--out", str(out), *more]


def record(folder: Path) -> dict[str, Any]:
    """What a run found, without when and how long."""
    found = json.loads((folder / "result.json").read_text())
    for name in ("started", "seconds", "machines", "commit"):
        del found["provenance"][name]
    return found


def test_models_lists_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "layers", "heads", "tokens", "weights", "source"]
    assert [row.split()[0] for row in rows] == list(MODELS)
    cached = {row.split()[0]: is_cached(row.split()[0]) for row in rows}
    assert all(("  cached  " in row) == cached[row.split()[0]] for row in rows)
    # DINOv2-S/14 at 224 px: 12 layers of 6 heads, 16 x 16 patches and cls
    assert any(row.split()[:4] == [NAME, "12", "6", "257"] for row in rows)


def test_fetch_without_names_fetches_all_embedded_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert set(lines) == set(EMBEDDED)
    assert all(Path(path).is_file() for path in lines.values())


def test_measure_is_what_the_package_measures(measured: Path) -> None:
    found = json.loads((measured / "result.json").read_text())
    ours = measure(NAME, photographs(2), batch_size=2)
    assert found["n"] == [2] * 12
    assert found["per_input"]["content"] == ours.per_input["content"]
    assert found["heads"] == ours.heads and found["averaged"]["content"] == ours.averaged["content"]
    assert [path.name for path in measured.iterdir()] == ["result.json"]


def test_measure_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = tmp_path / "images"
    images.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (2, 240, 260, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(images / f"{number}.png")
    out = tmp_path / "deep" / "found"
    assert cli.main(["measure", NAME, "--inputs", str(images), "--n", "1", "--out", str(out)]) == 0
    found = json.loads((out / "result.json").read_text())
    assert found["n"] == [1] * 12
    assert str(out) in capsys.readouterr().out


def test_what_is_left_out_is_said_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (240, 260, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    assert cli.main(["measure", NAME, "--inputs", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    left_out = json.loads((tmp_path / "out" / "result.json").read_text())["provenance"]["inputs"]["left_out"]
    assert left_out["count"] == 1 and left_out["files"][0][0] == "bad.png"
    assert "left out: bad.png: " in capsys.readouterr().err


def test_a_result_names_no_path(prose: Path, tmp_path: Path) -> None:
    assert cli.main(texts(prose, tmp_path / "out")) == 0
    text = (tmp_path / "out" / "result.json").read_text()
    for place in (tmp_path, prose.parent, Path.home(), Path(cli.__file__).parent):
        assert str(place) not in text
    assert "prose" in json.loads(text)["provenance"]["inputs"]["name"]


def test_shards_merge(prose: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, merged, whole = (tmp_path / name for name in ("one", "two", "merged", "whole"))
    assert cli.main(texts(prose, one, "--shard", "1/2")) == 0
    assert f"1 of 2 blocks are in {one}" in capsys.readouterr().err
    assert cli.main(texts(prose, two, "--shard", "2/2")) == 0
    assert cli.main(["merge", str(one), str(two), "--out", str(merged), "--matrices"]) == 0
    assert "40 inputs out of 2 folders" in capsys.readouterr().out
    assert cli.main(texts(prose, whole)) == 0
    assert record(merged) == record(whole)
    with np.load(merged / "matrices.npz", allow_pickle=False) as kept:
        assert kept["averaged"].shape == (6, 14, 14)  # [CLS], 12 word pieces, [SEP]


def test_an_interrupted_run_goes_on(
    prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(done: int, n: int) -> None:
        if done == n:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(cli, "_progress", lambda: interrupt)
        assert cli.main(texts(prose, tmp_path / "out")) == 130
    assert "run the same command again" in capsys.readouterr().err
    assert cli.main(texts(prose, tmp_path / "out")) == 0
    printed = capsys.readouterr()
    assert "skipped 1 of 2 blocks, 32 inputs: they are measured" in printed.err and "40/40 inputs" in printed.err
    assert cli.main(texts(prose, tmp_path / "whole")) == 0
    assert record(tmp_path / "out") == record(tmp_path / "whole")
    assert cli.main(texts(prose, tmp_path / "out", "--batch-size", "8")) == 2
    assert "is another run: settings.batch_size is" in capsys.readouterr().err


def test_progress_is_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = cli._progress()
    clock = iter([0.0, 10.0, 70.0, 80.0, 100.0])
    monkeypatch.setattr(cli.time, "monotonic", lambda: next(clock))
    for done in (16, 32, 128, 144, 176):
        lines(done, 176)
    assert capsys.readouterr().err.splitlines() == [
        "16/176 inputs", "128/176 inputs, 1.6 a second, 30 s left", "176/176 inputs, 1.6 a second, 0 s left"
    ]  # fmt: skip


def test_progress_is_a_bar_on_a_terminal() -> None:
    """A pseudo-terminal, and a process of its own: where notebooks are run, bars are off."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    code = "from dobnb import cli; bar = cli._progress(); bar(16, 32); bar(32, 32)"
    environment = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    root = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], stderr=theirs, env=environment, cwd=root, check=True)
    printed = os.read(ours, 10_000).decode()
    os.close(ours), os.close(theirs)
    assert "16/32" in printed and "100%" in printed and "32/32" in printed and "inputs/s" in printed


def test_show_prints_one_row_a_measurement(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(measured), str(measured / "result.json")]) == 0
    printed = capsys.readouterr().out
    held = sum(json.loads((measured / "result.json").read_text())["per_input"]["content"])
    assert printed.count(f"{held}/24") == 2 and NAME in printed
    assert "per input, content" in printed and "averaged, exact layers" in printed
    assert "As the paper's Table 1" in printed and "as the paper's Table 4" in printed


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("ft_transformer_california_3", "features 1"),
        ("vit_digits", "labels"),
        ("untrained_minilm-l6", "Untrained, % of inputs"),
    ],
)
def test_show_prints_trainings_and_nulls(name: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Told by what is in the file, not by its name."""
    assert cli.main(["show", str(Path(__file__).parents[1] / "results" / f"{name}.json")]) == 0
    assert shown in " ".join(capsys.readouterr().out.split())


def test_show_of_an_unfinished_run_names_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "seed_0").mkdir(parents=True)
    assert cli.main(["show", str(tmp_path / "run")]) == 2
    assert "holds a run that has not ended; give its command again" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["ft-transformer", "vit"])
def test_seeds_are_checked_before_the_first_is_trained(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", "nowhere.csv"] if model == "ft-transformer" else []
    assert cli.main(["train", model, *data, "--seeds", "0", "-1", "--out", str(tmp_path / "run")]) == 2
    assert "seed is -1" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["\x1b[2J\x1b[31mred", "two\nlines", "\x9b2J"])
def test_show_prints_no_escape_character_of_a_file(
    name: str, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = json.loads((measured / "result.json").read_text())
    other["provenance"]["model"]["name"] = other["provenance"]["inputs"]["name"] = name
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert cli.main(["show", str(tmp_path / "other.json")]) == 0
    printed = capsys.readouterr().out
    assert all(line.isprintable() for line in printed.split("\n")) and name not in printed
    other["provenance"]["inputs"]["digest"] = other[name] = name
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert cli.main(["show", str(tmp_path / "other.json")]) == 2
    assert capsys.readouterr().err.rstrip("\n").isprintable()


def test_compare_counts_the_verdicts_that_flip(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = json.loads((measured / "result.json").read_text())
    other["per_input"]["content_failing"][4] = [0, 1]
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert cli.main(["compare", str(measured), str(tmp_path / "other.json")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[:2] for row in rows] == [[str(n), "2" if n == 5 else "0"] for n in range(1, 13)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["measure", "dinov3", "--out", "x"],
        ["measure", NAME, "--inputs", "no-such-folder", "--out", "x"],
        ["measure", NAME, "--out", "x.json"],
        ["measure", NAME, "--n", "1", "--shard", "2/2", "--out", "x"],
        ["merge", "no-such-folder", "--out", "x"],
        ["compare", "no-such-file.json", "no-such-folder"],
        ["fetch", "dinov3"],
        ["show", "no-such-file.json"],
        ["book", "html"],
        ["book", "run", "--only", "01"],
    ],
)
def test_mistakes_end_in_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("dobnb: error: ") and printed.err.count("\n") == 1
    assert printed.out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["measure", NAME],
        ["measure", NAME, "--n", "0", "--out", "x"],
        ["measure", NAME, "--n", "two", "--out", "x"],
        ["measure", NAME, "--shard", "0/2", "--out", "x"],
        ["measure", NAME, "--shard", "3/2", "--out", "x"],
        ["measure", NAME, "--shard", "half", "--out", "x"],
        ["merge", "--out", "x"],
        ["compare", "one"],
        ["show"],
        ["book", "serve"],
    ],
)
def test_usage_mistakes(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2 and "usage: dobnb" in capsys.readouterr().err


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dobnb.weights.fetch", interrupted)
    assert cli.main(["fetch", NAME]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"dobnb {__version__}\n"


@pytest.mark.parametrize(
    ("written", "value"),
    [("3", 3), ("0.5", 0.5), ("[1, 2]", [1, 2]), ("None", None), ("dinov2-small", "dinov2-small"), ("a b", "a b")],
)
def test_parameters_on_the_command_line(written: str, value: object) -> None:
    assert cli._literal(written) == value


def test_a_record_is_written_as_it_is(tmp_path: Path) -> None:
    """Names of files may hold what JSON uses for itself, and any number of spaces."""
    record = {"files": ["a  b.png", "[1,  2]", "{\n}"], "names": [["x  [y]"], []], "o": {}, "n": {"k": (1, 2.5, None)}}
    write_record(tmp_path / "record.json", record)
    found = json.loads((tmp_path / "record.json").read_text())
    assert found == record | {"n": {"k": [1, 2.5, None]}}
    with pytest.raises(ValueError):
        write_record(tmp_path / "other.json", {"x": [float("nan")]})
    assert not (tmp_path / "other.json").exists()
