"""Runs that are interrupted, damaged, spread or merged give what an undisturbed run gives, to the last bit."""

import errno
import io
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from tiny import noise, tiny, tiny_bert, without_time

from dobnb import Measurement, measure
from dobnb.inputs import Inputs, from_tensors
from dobnb.measurement import MeasurementError, prepare
from dobnb.runs import merge, run

SETTINGS = {"batch_size": 2, "block_size": 4}  # 18 inputs make 5 blocks, the last of 2 inputs


def job(n=18, **settings):
    return prepare(tiny(), noise(n), **(SETTINGS | settings))


@pytest.fixture(scope="module")
def undisturbed():
    return measure(tiny(), noise(18), **SETTINGS)


def same(found, undisturbed):
    """Equal to the last bit, in memory and in the file, but for when, where and how long."""
    assert without_time(found) == without_time(undisturbed)
    sums = [one.tallies.sums.tobytes() for one in (found, undisturbed) if one.tallies is not None]
    assert len(set(sums)) == 1
    return True


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def stop_after(batches, error=KeyboardInterrupt):
    """A progress that raises at a batch."""

    def progress(done, n):
        nonlocal batches
        batches -= 1
        if batches == 0:
            raise error

    return progress


def begin(out, batches=5, **options):
    """A run that is interrupted: with the default, after two whole blocks and half of the third."""
    with pytest.raises(KeyboardInterrupt):
        run(job(), out, progress=stop_after(batches), **options)
    return sorted((out / "blocks").glob("*.npz"))


# Undisturbed --------------------------------------------------------------------------------------------------------


def test_a_run_leaves_one_file_that_says_what_measure_says(tmp_path, undisturbed):
    seen, said = [], []
    found = run(job(), tmp_path / "new", progress=lambda done, n: seen.append((done, n)), tell=said.append)
    assert files(tmp_path / "new") == ["result.json"] and same(found, undisturbed)
    assert Measurement.load(tmp_path / "new") == found == Measurement.load(tmp_path / "new" / "result.json")
    assert seen == [(done, 18) for done in (2, 4, 6, 8, 10, 12, 14, 16, 18)] and said == []


def test_a_finished_run_is_not_measured_again(tmp_path):
    found, said = run(job(), tmp_path), []
    (tmp_path / "blocks").mkdir()  # as if it had been killed before it swept up
    again = run(job(), tmp_path, progress=stop_after(1), tell=said.append)
    assert again == found and said == [f"{tmp_path} is finished already: all 18 inputs skipped"]
    assert files(tmp_path) == ["result.json"] and not (tmp_path / "blocks").exists()
    with pytest.raises(MeasurementError, match=r"another run: inputs\.digest .* settings\.batch_size is 2 here and 4"):
        run(job(16, batch_size=4), tmp_path)
    with pytest.raises(MeasurementError, match="its matrices were not kept"):
        run(job(), tmp_path, matrices=True)


# Interrupted --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", range(1, 10))
def test_an_interrupted_run_goes_on(tmp_path, undisturbed, batches):
    whole = [0, 0, 1, 1, 2, 2, 3, 3, 4][batches - 1]  # the interrupt comes before the block of the batch is written
    blocks = begin(tmp_path, batches)
    assert len(blocks) == whole
    assert [name for name in files(tmp_path) if ".tmp" in name] == []
    seen, said = [], []
    found = run(job(), tmp_path, progress=lambda done, n: seen.append(done), tell=said.append)
    assert same(found, undisturbed) and files(tmp_path) == ["result.json"]
    assert seen == list(range(4 * whole + 2, 19, 2)), "nothing is measured twice"
    skipped = f"skipped {whole} of 5 blocks, {4 * whole} inputs: they are measured"
    assert said == ([skipped] if whole else [])


KILLED = """
import os, signal, sys
import dobnb.files, dobnb.runs
from test_runs import job

number, replace, rmtree = int(sys.argv[2]), os.replace, dobnb.runs.shutil.rmtree

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def counting(source, target):
    global number
    number -= 1
    if number == 0:
        die()
    replace(source, target)

os.replace = counting
if number < 0:
    dobnb.runs.shutil.rmtree = die
dobnb.runs.run(job(), sys.argv[1])
"""


@pytest.mark.parametrize(
    ("number", "left"),
    [
        (1, 0),  # with the settings written and not in place
        (3, 1),  # with the second block written and not in place
        (7, 5),  # with the result written and not in place: settings and five blocks came before
        (-1, 5),  # with the result in place and the blocks not swept up
    ],
)
def test_kill_9_loses_no_block(tmp_path, undisturbed, number, left):
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "out"), str(number)]
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(arguments, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    assert ended.returncode == -signal.SIGKILL
    assert len([name for name in files(tmp_path / "out") if name.endswith(".npz")]) == left
    assert any(name.endswith(".tmp") for name in files(tmp_path / "out")) == (number > 0)
    said = []
    found = run(job(), tmp_path / "out", tell=said.append)
    assert same(found, undisturbed) and files(tmp_path / "out") == ["result.json"]
    words = {0: "", 1: "skipped 1 of 5 blocks, 4 inputs", 5: "skipped 5 of 5 blocks, 18 inputs"}[left]
    assert "".join(said).startswith(words if number > 0 else f"{tmp_path / 'out'} is finished already")


# Damaged ------------------------------------------------------------------------------------------------------------


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def alter(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, alter, empty])
def test_a_damaged_block_is_measured_again(tmp_path, undisturbed, damage):
    damage(begin(tmp_path)[1])
    said = []
    assert same(run(job(), tmp_path, tell=said.append), undisturbed)
    assert said == [
        "block 2 is damaged: it is measured again", "skipped 1 of 5 blocks, 4 inputs: they are measured"
    ]  # fmt: skip


def test_a_block_damaged_while_the_run_lasts_is_found_too(tmp_path, undisturbed):
    begin(tmp_path)

    def spoil(done, n):
        if done == n:
            cut(sorted((tmp_path / "blocks").glob("*.npz"))[0])

    with pytest.raises(MeasurementError, match=r"block 1 in .* is damaged; run the command that wrote it again"):
        run(job(), tmp_path, progress=spoil)
    assert same(run(job(), tmp_path), undisturbed)


def test_a_block_of_another_run_is_refused(tmp_path):
    mine, other = begin(tmp_path / "mine"), tmp_path / "other"
    with pytest.raises(KeyboardInterrupt):
        run(job(batch_size=4), other, progress=stop_after(4))
    theirs = sorted((other / "blocks").glob("*.npz"))
    mine[0].unlink()
    theirs[0].rename(mine[0].parent / theirs[0].name)
    with pytest.raises(MeasurementError, match="does not belong here: it is of a run with other settings"):
        run(job(), tmp_path / "mine")


class Burglar:
    def __reduce__(self):
        return (pytest.fail, ("code out of a file was run",))


def test_a_block_from_a_stranger_cannot_run_code(tmp_path):
    """Named after its content, as a sound block is, with a pickle inside."""
    blocks = begin(tmp_path)
    buffer = io.BytesIO()
    np.savez(buffer, inputs=np.array([Burglar()], dtype=object))
    for content in (buffer.getvalue(), pickle.dumps(Burglar())):
        blocks[0].unlink(missing_ok=True)
        blocks[0] = blocks[0].with_name(f"00000.{sha256(content).hexdigest()}.npz")
        blocks[0].write_bytes(content)
        with pytest.raises(MeasurementError, match="does not belong here: it holds no tallies"):
            run(job(), tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"schema": 2, "about": [], "started": ""}', "[1, 2"])
def test_damaged_settings_are_refused(tmp_path, content):
    begin(tmp_path)
    (tmp_path / "blocks" / "settings.json").write_text(content)
    with pytest.raises(MeasurementError, match=r"settings.json cannot be read .* delete .* and measure again"):
        run(job(), tmp_path)


def test_lost_settings_and_another_schema_are_refused(tmp_path):
    begin(tmp_path)
    path = tmp_path / "blocks" / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 1}))
    with pytest.raises(MeasurementError, match="begun by another version of dobnb"):
        run(job(), tmp_path)
    path.unlink()
    with pytest.raises(MeasurementError, match="has blocks and no settings"):
        run(job(), tmp_path)


# Full disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "blocks"),
    [(1, 0), (4, 2), (7, 5), (8, 5)],  # settings, the third block, the matrices, the result
)
def test_a_full_disk_loses_no_block(tmp_path, undisturbed, monkeypatch, number, blocks):
    replace, writes = os.replace, []

    def full(source, target):
        writes.append(target)
        if len(writes) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(MeasurementError, match="No space left on device; make room, then run the same command"):
            run(job(), tmp_path, matrices=True)
    assert [name for name in files(tmp_path) if ".tmp" in name] == []
    said = []
    assert same(run(job(), tmp_path, matrices=True, tell=said.append), undisturbed)
    skipped = f"skipped {blocks} of 5 blocks, {min(4 * blocks, 18)} inputs: they are measured"
    assert said == ([skipped] if blocks else []) and files(tmp_path) == ["matrices.npz", "result.json"]


def test_a_file_that_cannot_grow_is_not_left_half_written(tmp_path, undisturbed):
    """The system refuses the bytes beyond the limit, as it does on a full disk or over quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # a block takes more, the settings less
        with pytest.raises(MeasurementError, match=r"cannot write to .*; make room"):
            run(job(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path) == ["blocks/lock", "blocks/settings.json"]
    assert same(run(job(), tmp_path), undisturbed)


# Refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"batch_size": 4}, r"settings\.batch_size is 4 here and 2 there"),
        ({"heads": False}, r"settings\.heads is False here and True there"),
        ({"block_size": 9}, r"settings\.block_size is 9 here and 4 there"),
        ({"content": torch.ones(17, dtype=torch.bool)}, r"settings\.content is 'mask \w+' here and 'by role' there"),
        ({"n": 17}, r"inputs\.digest is .*; inputs\.n is 17 here and 18 there"),
    ],
)
def test_a_run_with_other_settings_is_refused(tmp_path, settings, says):
    blocks = begin(tmp_path)
    with pytest.raises(MeasurementError, match=f"is another run: {says}"):
        run(job(**settings), tmp_path)
    assert sorted((tmp_path / "blocks").glob("*.npz")) == blocks


def test_another_model_or_torch_is_another_run(tmp_path, monkeypatch):
    begin(tmp_path)
    other = job()
    with torch.no_grad():
        next(other.model.parameters()).mul_(1.0001)
    with pytest.raises(MeasurementError, match=r"model\.sha256 is"):
        run(prepare(other.model, other.inputs, **SETTINGS), tmp_path)
    monkeypatch.setattr("dobnb.provenance.versions", lambda: {"torch": "9.9"})
    with pytest.raises(MeasurementError, match=r"versions\.torch is '9\.9' here and"):
        run(job(), tmp_path)


def test_places_that_are_no_runs_are_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for out, says in [
        (tmp_path, "holds other files, such as file"),
        (tmp_path / "file", "is a file; pass a folder"),
        (tmp_path / "found.json", r"--out is a folder, in which result.json is written; pass .*found"),
        (tmp_path / "file" / "below", "cannot write to"),
    ]:
        with pytest.raises(MeasurementError, match=says):
            run(job(), out)
    assert files(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_two_processes_do_not_measure_into_one_folder(tmp_path, undisturbed):
    begin(tmp_path)
    with FileLock(tmp_path / "blocks" / "lock"), pytest.raises(MeasurementError, match="another process is measuring"):
        run(job(), tmp_path)
    assert same(run(job(), tmp_path), undisturbed)


# Shards -------------------------------------------------------------------------------------------------------------


def test_shards_in_folders_of_their_own_merge(tmp_path, undisturbed):
    said = []
    for k in (2, 3, 1):
        assert run(job(), tmp_path / f"{k}", shard=(k, 3), tell=said.append) is None
    assert said[0].startswith(f"2 of 5 blocks are in {tmp_path / '2'}; when all shards have run, `dobnb merge`")
    folders = [tmp_path / name for name in ("1", "2", "3")]
    before = [files(folder) for folder in folders]
    found = merge(folders, tmp_path / "whole")
    assert same(found, undisturbed) and Measurement.load(tmp_path / "whole") == found
    assert found.provenance["started"] == min(
        json.loads((folder / "blocks" / "settings.json").read_text())["started"] for folder in folders
    )
    assert [files(folder) for folder in folders] == before, "shards stay"
    assert same(merge(folders[::-1], tmp_path / "again"), undisturbed)


def test_shards_may_share_a_folder(tmp_path, undisturbed):
    assert run(job(), tmp_path, shard=(2, 2)) is None
    assert same(run(job(), tmp_path, shard=(1, 2)), undisturbed) and files(tmp_path) == ["result.json"]


def test_an_interrupted_shard_goes_on(tmp_path, undisturbed):
    begin(tmp_path / "1", 3, shard=(1, 2))
    said = []
    run(job(), tmp_path / "1", shard=(1, 2), tell=said.append)
    assert said[0] == "skipped 1 of 3 blocks, 4 inputs: they are measured"
    run(job(), tmp_path / "2", shard=(2, 2))
    assert same(merge([tmp_path / "1", tmp_path / "2"], tmp_path / "whole"), undisturbed)


def test_what_does_not_make_a_whole_is_not_merged(tmp_path):
    one, two, other, done = (tmp_path / name for name in ("one", "two", "other", "done"))
    run(job(), one, shard=(1, 2))
    run(job(), two, shard=(2, 2))
    run(job(heads=False), other, shard=(2, 2))
    run(job(), done)
    for folders, says in [
        ([one], r"2 of 5 blocks are in none of the folders \(number 2, 4\)"),
        ([one, other], r"shards of different runs: settings\.heads is True here and False there"),
        ([one, done], "done is a finished run, not a shard"),
        ([one, tmp_path / "absent"], "absent holds no run"),
        ([], "there are no shards"),
    ]:
        with pytest.raises(MeasurementError, match=says):
            merge(folders, tmp_path / "whole")
    with pytest.raises(MeasurementError, match=r"done holds other files, such as result\.json"):
        merge([one, two], done)
    cut(sorted((two / "blocks").glob("*.npz"))[0])
    with pytest.raises(MeasurementError, match=r"block 2 in .*two is damaged; run the command that wrote it again"):
        merge([one, two], tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


# Matrices -----------------------------------------------------------------------------------------------------------


def test_matrices_are_kept_where_asked(tmp_path, undisturbed):
    found = run(job(), tmp_path / "out", matrices=True)
    assert files(tmp_path / "out") == ["matrices.npz", "result.json"] and same(found, undisturbed)
    with np.load(tmp_path / "out" / "matrices.npz", allow_pickle=False) as kept:
        assert kept["averaged"].shape == (3, 17, 17) and kept["averaged"].dtype == np.float64
        np.testing.assert_array_equal(kept["averaged"], undisturbed.tallies.averaged())
        np.testing.assert_array_equal(kept["content_kappa"], undisturbed.tallies.by_input["content_kappa"])
        assert kept["roles"].tolist() == ["cls"] + ["content"] * 16
    assert run(job(), tmp_path / "out", matrices=True) == found
    path = tmp_path / "out" / "matrices.npz"
    content = path.read_bytes()
    for damaged in (content[:-200], content[:100], b"", content.replace(b"averaged", b"averages")):
        path.write_bytes(damaged)
        with pytest.raises(MeasurementError, match=r"matrices\.npz is damaged; delete .* and run again"):
            run(job(), tmp_path / "out", matrices=True)
    path.unlink()
    with pytest.raises(MeasurementError, match="its matrices were not kept"):
        run(job(), tmp_path / "out", matrices=True)


def test_matrices_that_are_too_large_are_refused_at_the_first_block(tmp_path, monkeypatch):
    monkeypatch.setattr("dobnb.runs.MATRICES_LIMIT", 3 * 17 * 17 * 8 - 1)
    seen = []
    with pytest.raises(MeasurementError, match=r"the averaged matrices take 0 MB, more than .*; leave --matrices out"):
        run(job(), tmp_path, matrices=True, progress=lambda done, n: seen.append(done))
    assert seen == [2, 4]
    ids = torch.tensor([[101, 7, 8, 9, 102], [101, 7, 8, 102, 0]])
    texts = from_tensors({"input_ids": ids, "attention_mask": (ids != 0).long()}, "two lengths")
    with pytest.raises(MeasurementError, match="so there are no averaged matrices"):
        run(prepare(tiny_bert(), texts, **SETTINGS), tmp_path / "texts", matrices=True)


# A cluster ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path):
    """Address of a Dask scheduler on the loopback, and its two worker processes."""
    file, started = tmp_path / "scheduler.json", []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}

    def start(*arguments):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([sys.executable, "-m", "dask", *arguments], env=environment, cwd=tmp_path, **quiet)
        started.append(process)
        return process

    start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
    try:
        waited = time.monotonic()
        while not (file.exists() and file.read_text().endswith("}")):  # it is written in place
            assert time.monotonic() - waited < 60, "the scheduler did not start"
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        options = ("--nworkers", "1", "--nthreads", "1", "--no-nanny", "--no-dashboard", "--host", "127.0.0.1")
        workers = [start("worker", address, *options) for _ in range(2)]
        from distributed import Client

        with Client(address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=120)
        yield address, workers
    finally:
        for process in started:
            process.kill()
            process.wait()


def slow(inputs, seconds):
    """The same inputs, each batch of which takes a while: so that a block is under way when a worker is killed."""

    def batch(start, stop):
        time.sleep(seconds)
        return inputs.batch(start, stop)

    return Inputs(inputs.name, inputs.digest, inputs.n, batch, inputs.size)


def test_a_cluster_that_loses_a_worker_gives_the_same_bits(tmp_path, undisturbed, cluster):
    address, workers = cluster
    seen, said = [], []

    def kill_one(done, n):
        if not seen:
            workers[0].kill()
        seen.append(done)

    spread = prepare(tiny(), slow(noise(18), 0.5), **SETTINGS)
    found = run(spread, tmp_path / "out", scheduler=address, progress=kill_one, tell=said.append)
    assert workers[0].wait() == -signal.SIGKILL and workers[1].poll() is None
    assert same(found, undisturbed) and files(tmp_path / "out") == ["result.json"] and said == []
    assert seen[-1] == 18 and len(seen) == 5
    # And a run that was begun here goes on there.
    begin(tmp_path / "begun")
    again = run(job(), tmp_path / "begun", scheduler=address, tell=said.append)
    assert same(again, undisturbed) and said == ["skipped 2 of 5 blocks, 8 inputs: they are measured"]


def test_no_cluster_is_one_line(tmp_path):
    with pytest.raises(MeasurementError, match="no Dask scheduler answers at nonsense"):
        run(job(), tmp_path / "a", scheduler="nonsense://1")
