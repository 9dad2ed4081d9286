"""Runs that survive: a folder of finished blocks, from which an interrupted run goes on, and shards are merged.

While a run lasts, its folder holds ``blocks/``: the settings, and one npz for every finished block of inputs, called
``NUMBER.SHA256.npz`` after its own content, so that a truncated or altered one is known before it is read. Each is
written whole or not at all. Once all blocks are there, ``result.json`` is written and ``blocks/`` goes.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from dobnb import provenance
from dobnb.files import replacing, write_text
from dobnb.measurement import (
    SCHEMA,
    Job,
    Measurement,
    MeasurementError,
    Progress,
    about_of,
    counter,
    differences,
    measurement_of,
    shard_blocks,
)
from dobnb.tallies import Tallies, TallyError

MATRICES_LIMIT = 50_000_000
"""Bytes of averaged matrices that a result may keep."""
_BLOCK = re.compile(r"(\d{5,})\.([0-9a-f]{64})\.npz")

Tell = Callable[[str], None]
"""Called with one line for people."""


def run(
    job: Job,
    out: str | Path,
    *,
    shard: tuple[int, int] = (1, 1),
    scheduler: str | None = None,
    matrices: bool = False,
    progress: Progress | None = None,
    tell: Tell = lambda line: None,
) -> Measurement | None:
    """Measure into a folder. Called again after an interruption, of any kind, it does what is missing.

    :param job: see :func:`dobnb.measurement.prepare`.
    :param out: the folder; new, empty, or that of the same run.
    :param shard: (k, m): part k of m of the blocks alone. Shards of one folder fill it up; those of several folders
        are put together by :func:`merge`.
    :param scheduler: address of a Dask scheduler, ``tcp://HOST:PORT``: its workers measure, this process writes.
    :param matrices: keep the averaged matrices in ``matrices.npz``, at most :data:`MATRICES_LIMIT` bytes of them.
    :param progress: called as ``progress(done, n)``, n the inputs of this part, those of earlier runs among `done`.
    :return: the measurement; None where blocks of other shards are missing.
    :raises MeasurementError: the folder is another run's, holds other files, is in use, or cannot be written to; a
        shard that does not exist; no cluster, or one that loses a block again and again; matrices too large to keep.
    """
    out = Path(out)
    check_folder(out)
    numbers = shard_blocks(job.blocks, shard)
    if (found := _finished(out)) is not None:
        if different := differences(about_of(found.provenance), job.about):
            raise _other_run(out, different)
        if matrices:
            _check_matrices(out, found)
        shutil.rmtree(out / "blocks", ignore_errors=True)  # the last run may have been killed before it did
        tell(f"{out} is finished already: all {found.n[0]} inputs skipped")
        return found
    with _locked(out):
        started = _settle(out, job.about)
        have = _sound(out, tell)
        missing = [number for number in numbers if number not in have]
        done = sum(last - first for number in numbers if number in have for first, last in [job.span(number)])
        if done:
            tell(f"skipped {len(numbers) - len(missing)} of {len(numbers)} blocks, {done} inputs: they are measured")
        counted = counter(job, numbers, progress, done)
        make = _here(job, missing, counted) if scheduler is None else _on_cluster(job, missing, scheduler, counted)
        fingerprint = _fingerprint(job.about)
        for number, tallies in make:
            if matrices:
                _check_size(tallies)
            have[number] = _write_block(out, number, tallies, fingerprint)
        if len(have) < job.blocks:
            tell(
                f"{len(have)} of {job.blocks} blocks are in {out}; when all shards have run, "
                "`dobnb merge` puts their folders together"
            )
            return None
        return _finish(out, job.about, _reduce(have, fingerprint), started, matrices)


def merge(folders: Sequence[str | Path], out: str | Path, *, matrices: bool = False) -> Measurement:
    """The whole run out of its shards, which stay as they are.

    :param folders: those of the shards.
    :param out: a folder, new or empty.
    :param matrices: as for :func:`run`.
    :raises MeasurementError: they are of different runs, a block is missing or damaged, a folder is no shard's, or
        `out` holds files.
    """
    out = Path(out)
    check_folder(out, new=True)
    first: tuple[str | Path, dict[str, Any], str] | None = None
    have: dict[int, Path] = {}
    for folder in folders:
        if (Path(folder) / "result.json").exists():
            raise MeasurementError(f"{folder} is a finished run, not a shard; there is nothing to merge in it")
        about, started = _read_settings(Path(folder))
        if first is None:
            first = (folder, about, started)
        elif different := differences(first[1], about):
            raise MeasurementError(f"{first[0]} and {folder} are shards of different runs: {different}")
        else:
            first = (first[0], about, min(started, first[2]))
        for number, path in _blocks(Path(folder)).items():
            have.setdefault(number, path)
    if first is None:
        raise MeasurementError("there are no shards; pass their folders")
    _, about, started = first
    total = -(-about["inputs"]["n"] // about["settings"]["block_size"])
    if missing := [number for number in range(total) if number not in have]:
        some = ", ".join(str(number + 1) for number in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise MeasurementError(
            f"{len(missing)} of {total} blocks are in none of the folders (number {some}); run the shards that lack "
            "them to their end, or pass their folders too"
        )
    return _finish(out, about, _reduce(have, _fingerprint(about)), started, matrices)


def _reduce(have: Mapping[int, Path], fingerprint: str) -> Tallies:
    """The sum of the blocks, one at a time in memory."""
    total: Tallies | None = None
    for number in sorted(have):
        tallies = _read_block(have[number], fingerprint)
        if tallies is None:
            raise MeasurementError(
                f"block {number + 1} in {have[number].parent.parent} is damaged; "
                "run the command that wrote it again, which measures it anew"
            )
        total = tallies if total is None else total + tallies
    assert total is not None, "a run has at least one block"
    return total


def _finish(out: Path, about: Mapping[str, Any], total: Tallies, started: str, matrices: bool) -> Measurement:
    found = measurement_of(about, total, started)
    if matrices:
        _check_size(total)
        _guarded(out, lambda: _save_matrices(out / "matrices.npz", total))
    _guarded(out, lambda: found.save(out / "result.json"))
    shutil.rmtree(out / "blocks", ignore_errors=True)
    return found


# Matrices -----------------------------------------------------------------------------------------------------------


def _check_size(tallies: Tallies) -> None:
    if tallies.sums is None:
        raise MeasurementError("inputs differ in their tokens, so there are no averaged matrices; leave --matrices out")
    if (size := tallies.sums[0].nbytes) > MATRICES_LIMIT:
        raise MeasurementError(
            f"the averaged matrices take {size / 1e6:.0f} MB, more than the {MATRICES_LIMIT / 1e6:.0f} MB that a "
            "result may keep; leave --matrices out"
        )


def _check_matrices(out: Path, found: Measurement) -> None:
    """Refuse a finished run whose matrices are not there whole."""
    path = out / "matrices.npz"
    if not path.exists():
        raise MeasurementError(f"{out} is finished, and its matrices were not kept; measure into another --out")
    try:
        with np.load(path, allow_pickle=False) as kept:
            whole = kept["averaged"].shape[0] == found.layers and len(kept["roles"]) == kept["averaged"].shape[-1]
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error):
        whole = False
    if not whole:
        raise MeasurementError(f"{path} is damaged; delete {out} and run again, which measures anew")


def _save_matrices(path: Path, tallies: Tallies) -> None:
    """``averaged``, (L, N, N); ``roles``, (N,); and what is known of each input, by the names of :class:`Tallies`."""
    with replacing(path) as file:
        np.savez(
            file, averaged=tallies.averaged(), roles=np.array(tallies.roles), inputs=tallies.inputs, **tallies.by_input
        )


# The folder ---------------------------------------------------------------------------------------------------------


def _finished(out: Path) -> Measurement | None:
    return Measurement.load(out) if (out / "result.json").exists() else None


def check_folder(out: Path, new: bool = False) -> None:
    """Refuse a place that a run, or a `new` one, cannot be put into, before anything is loaded.

    :raises MeasurementError: a file, or a folder that holds anything but a run.
    """
    if out.exists() and not out.is_dir():
        raise MeasurementError(f"{out} is a file; pass a folder as --out, such as runs/NAME")
    if not out.exists() and out.suffix == ".json":
        raise MeasurementError(f"--out is a folder, in which result.json is written; pass {out.with_suffix('')}")
    known = set() if new else {"blocks", "matrices.npz", "result.json"}
    there = [path.name for path in out.iterdir() if not path.name.startswith(".")] if out.exists() else []
    if other := sorted(set(there) - known):
        raise MeasurementError(f"{out} holds other files, such as {other[0]}; pass a new folder as --out")


def _locked(out: Path) -> AbstractContextManager[Any]:
    """The folder, for this process alone; the system frees it when the process ends, however it ends."""
    try:
        (out / "blocks").mkdir(parents=True, exist_ok=True)
        return FileLock(out / "blocks" / "lock", timeout=0).acquire()
    except Timeout:
        raise MeasurementError(f"another process is measuring into {out}; wait for it, or pass another --out") from None
    except OSError as error:
        raise MeasurementError(f"cannot write to {out}: {error.strerror or error}; pass another --out") from error


def _settle(out: Path, about: Mapping[str, Any]) -> str:
    """Note what is measured here, or check that it is the same; sweep up. Returns when the run was started."""
    for left in (*out.glob(".*.tmp"), *(out / "blocks").glob(".*.tmp")):  # of a process that was killed while it wrote
        left.unlink(missing_ok=True)
    if (out / "blocks" / "settings.json").exists():
        theirs, started = _read_settings(out)
        if different := differences(about, theirs):
            raise _other_run(out, different)
        return started
    if _blocks(out):
        raise MeasurementError(f"{out} has blocks and no settings, so whose they are is not known; pass another --out")
    started = provenance.now()
    settings = {"schema": SCHEMA, "about": dict(about), "started": started}
    _guarded(out, lambda: write_text(out / "blocks" / "settings.json", json.dumps(settings, indent=2) + "\n"))
    return started


def _read_settings(folder: Path) -> tuple[dict[str, Any], str]:
    path = folder / "blocks" / "settings.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        about, started, schema = found["about"], found["started"], found["schema"]
        int(about["inputs"]["n"]), int(about["settings"]["block_size"])
    except FileNotFoundError:
        raise MeasurementError(f"{folder} holds no run; pass the --out of a run that was begun") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise MeasurementError(f"{path} cannot be read ({error!r}); delete {folder} and measure again") from None
    if schema != SCHEMA:
        raise MeasurementError(f"{folder} was begun by another version of dobnb; delete it and measure again")
    return about, started


def _other_run(out: Path, different: str) -> MeasurementError:
    return MeasurementError(f"{out} is another run: {different}; pass another --out, or delete {out}")


def _fingerprint(about: Mapping[str, Any]) -> str:
    """What ties a block to its run."""
    return provenance.digest(json.dumps(about, sort_keys=True).encode())


def _blocks(folder: Path) -> dict[int, Path]:
    """The files of finished blocks by number."""
    found = {}
    for path in sorted((folder / "blocks").glob("*.npz")):
        if match := _BLOCK.fullmatch(path.name):
            found[int(match[1])] = path
    return found


def _sound(out: Path, tell: Tell) -> dict[int, Path]:
    """The finished blocks that are as they were written; the others are deleted."""
    found = {}
    for number, path in _blocks(out).items():
        if provenance.file_digest(path) == _stated(path):
            found[number] = path
        else:
            path.unlink()
            tell(f"block {number + 1} is damaged: it is measured again")
    return found


def _stated(path: Path) -> str:
    return path.name.split(".")[1]


def _read_block(path: Path, fingerprint: str) -> Tallies | None:
    """A block's tallies; None where its content is not what its name states.

    :raises MeasurementError: it is of another run.
    """
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != _stated(path):
        return None
    try:
        return Tallies.read(content, fingerprint)
    except TallyError as error:
        raise MeasurementError(f"{path} does not belong here: {error}; delete it and run again") from None


def _write_block(out: Path, number: int, tallies: Tallies, fingerprint: str) -> Path:
    buffer = io.BytesIO()
    tallies.write(buffer, fingerprint)
    content = buffer.getbuffer()
    path = out / "blocks" / f"{number:05}.{hashlib.sha256(content).hexdigest()}.npz"

    def write() -> None:
        with replacing(path) as file:
            file.write(content)

    _guarded(out, write)
    return path


def _guarded(out: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        raise MeasurementError(
            f"cannot write to {out}: {error.strerror or error}; make room, then run the same command again: "
            "it goes on from the blocks that are finished"
        ) from error


# Who measures -------------------------------------------------------------------------------------------------------


def _here(job: Job, numbers: Iterable[int], counted: Callable[[int], None] | None) -> Iterator[tuple[int, Tallies]]:
    for number in numbers:
        yield number, job.measure(number, counted)


def _on_cluster(
    job: Job, numbers: Sequence[int], address: str, counted: Callable[[int], None] | None
) -> Iterator[tuple[int, Tallies]]:
    """The blocks as workers of a Dask cluster finish them. Those of a worker that is lost are given to the others."""
    try:
        from distributed import CancelledError, Client, KilledWorker, as_completed
    except ModuleNotFoundError:
        raise MeasurementError("--scheduler needs Dask; install it: pip install 'dobnb[dask]'") from None
    try:
        client = Client(address, timeout=30, set_as_default=False)
    except (OSError, ValueError) as error:
        raise MeasurementError(f"no Dask scheduler answers at {address} ({error}); start one: dask scheduler") from None
    with client:
        if not client.scheduler_info()["workers"]:
            raise MeasurementError(f"the scheduler at {address} has no workers; start some: dask worker {address}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sending large graph", UserWarning)
            # As the result of a task and not as scattered data, which is lost with the workers that hold it.
            shared = client.submit(_as_is, job, pure=False)
            futures = {client.submit(_measure_block, shared, number, pure=False): number for number in numbers}
        for future in as_completed(list(futures), loop=client.loop):
            number = futures.pop(future)
            try:
                tallies = future.result()
            except (KilledWorker, CancelledError) as error:
                raise MeasurementError(
                    f"block {number + 1} was lost with the workers that tried it ({type(error).__name__}); "
                    "look at their memory, then run the same command again"
                ) from None
            future.release()
            if counted is not None:
                counted(len(tallies.inputs))
            yield number, tallies


def _as_is(job: Job) -> Job:
    return job


def _measure_block(job: Job, number: int) -> Tallies:
    """What a worker runs.

    :raises MeasurementError: its packages are not those of the process that asks.
    """
    here = provenance.versions()
    if here != job.about["versions"]:
        different = differences({"versions": here}, {"versions": job.about["versions"]})
        raise MeasurementError(f"a worker has other packages: {different}; install the same ones everywhere")
    return job.measure(number)
