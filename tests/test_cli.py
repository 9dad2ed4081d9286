"""The command line: what it prints, writes, and how it ends."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dobnb import __version__, cli
from dobnb.inputs import photographs
from dobnb.measurement import measure
from dobnb.models import MODELS
from dobnb.weights import EMBEDDED

NAME = "dinov2-small-saliency"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A measurement that the command line made: two embedded photographs."""
    file = tmp_path_factory.mktemp("measured") / "found.json"
    assert cli.main(["measure", NAME, "--n", "2", "--batch-size", "1", "--out", str(file)]) == 0
    return file


def test_models_lists_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "layers", "heads", "tokens", "weights", "source"]
    assert [row.split()[0] for row in rows] == list(MODELS)
    # DINOv2-S/14 at 224 px: 12 layers of 6 heads, 16 x 16 patches and cls
    assert any(row.split()[:4] == [NAME, "12", "6", "257"] for row in rows)


def test_fetch_without_names_fetches_all_embedded_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert set(lines) == set(EMBEDDED)
    assert all(Path(path).is_file() for path in lines.values())


def test_measure_is_what_the_package_measures(measured: Path) -> None:
    found = json.loads(measured.read_text())
    ours = measure(NAME, photographs(2), batch_size=2)
    assert found["n"] == [2] * 12
    assert found["per_input"]["content"] == ours.per_input["content"]
    assert found["heads"] == ours.heads and found["averaged"]["content"] == ours.averaged["content"]


def test_measure_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = tmp_path / "images"
    images.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (2, 240, 260, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(images / f"{number}.png")
    out = tmp_path / "deep" / "found.json"
    assert cli.main(["measure", NAME, "--inputs", str(images), "--n", "1", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["n"] == [1] * 12
    assert str(out) in capsys.readouterr().out


def test_show_prints_one_row_a_measurement(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(measured), str(measured)]) == 0
    printed = capsys.readouterr().out
    held = sum(json.loads(measured.read_text())["per_input"]["content"])
    assert f"{held}/24" in printed and NAME in printed
    assert "per input, content" in printed and "averaged, exact layers" in printed


@pytest.mark.parametrize(
    "arguments",
    [
        ["measure", "dinov3", "--out", "x.json"],
        ["measure", NAME, "--inputs", "no-such-folder", "--out", "x.json"],
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
        ["measure", NAME, "--n", "0", "--out", "x.json"],
        ["measure", NAME, "--n", "two", "--out", "x.json"],
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
