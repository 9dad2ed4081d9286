"""Training that can be killed: a run's folder, its checkpoints, its records.

A folder belongs to one run, and to one process at a time. Every file in it is whole or absent. What the numbers of a
run depend on is in its settings, and a folder with other settings is refused.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dobnb import provenance
from dobnb.errors import DobnbError
from dobnb.files import write_record, write_text

SCHEMA = 1
"""Of records and evaluations."""
EVALUATION = "evaluation.json"
"""In the folder of the runs that it is of."""


class TrainingError(DobnbError):
    """Training cannot start, cannot go on, or a run cannot be read."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a run's folder and keep it to this process; what a killed one left half-written goes.

    :raises TrainingError: another process trains there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise TrainingError(f"another process trains in {folder.name}; wait for it, or pass another folder") from None
    try:
        for left in folder.glob(".*.tmp"):
            left.unlink()
        yield
    finally:
        lock.release()


def check_same(settings: Mapping[str, Any], found: Mapping[str, Any], folder: Path) -> None:
    """:raises TrainingError: the settings of a run and those found in its folder differ."""
    wrong = sorted(key for key in {*settings, *found} if settings.get(key) != found.get(key))
    if wrong:
        raise TrainingError(
            f"{folder.name} holds a run with another {' and '.join(wrong)}; pass another folder, or delete that run"
        )


def check_seed(seed: int) -> None:
    """:raises TrainingError: no seed of every generator."""
    if not 0 <= seed < 2**32:
        raise TrainingError(f"seed is {seed}; it must be from 0 to 2**32 - 1")


def check_finite(value: float, what: str) -> None:
    """:raises TrainingError: `value` is NaN or infinite."""
    if not math.isfinite(value):
        raise TrainingError(f"{what}: training has diverged; look at the features, or start again with another seed")


# The state ----------------------------------------------------------------------------------------------------------


def snapshot(epoch: int) -> str:
    """The name of the file that keeps the weights after an epoch; 0 is before training."""
    return f"epoch_{epoch:04d}.safetensors"


def state(
    model: nn.Module, optimizer: torch.optim.Optimizer, best: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """All that the next epoch depends on, and the best weights so far. The optimizer's part goes by the parameters'
    names: the order in which the reference groups them differs from process to process."""
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    found |= {f"best.{name}": value for name, value in (best or {}).items()}
    for name, parameter in model.named_parameters():
        found |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return found | {"generator": torch.get_rng_state()}


def restore(
    tensors: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Undo :func:`state`; the best weights are returned."""

    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    model.load_state_dict(under("model."))
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = under(f"optimizer.{name}.")
    torch.set_rng_state(tensors["generator"])
    return under("best.")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and what is known of them, as JSON in the header, to a safetensors file: whole or not at all."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(descriptor)
    try:
        header = {"about": json.dumps(about, allow_nan=False)}
        save_file({name: value.contiguous() for name, value in tensors.items()}, temporary, metadata=header)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save_tensors` wrote.

    :raises TrainingError: the file is missing, damaged, or another kind of file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["about"])
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118, it is no dict
    except FileNotFoundError:
        raise TrainingError(f"{path.name} does not exist; train first") from None
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise TrainingError(f"{path.name} is damaged or not ours ({error}); delete it to start again") from None


# Records ------------------------------------------------------------------------------------------------------------


def finish(
    folder: Path, about: Mapping[str, Any], found: Mapping[str, Any], weights: str, packages: Iterable[str]
) -> dict[str, Any]:
    """Write the ``record.json`` of a run that has ended, and remove its checkpoint.

    :param about: ``settings``, ``history``, ``started`` and ``threads`` of the run.
    :param found: what the run found.
    :param weights: the file of its weights, in `folder`.
    :param packages: those whose version can change its numbers.
    :return: the record.
    """
    record = {
        "schema": SCHEMA,
        "settings": about["settings"],
        **found,
        "history": about["history"],
        "weights_sha256": provenance.file_digest(folder / weights),
        "started": about["started"],
        "ended": provenance.now(),
        "threads": about["threads"],
        "versions": provenance.versions(packages),
        "machine": provenance.machine(),
        "commit": provenance.git_commit(Path(__file__).parent),
    }
    write_text(folder / "record.json", json.dumps(record, indent=2, allow_nan=False) + "\n")
    (folder / "checkpoint.safetensors").unlink(missing_ok=True)
    return record


def read_record(path: Path) -> dict[str, Any]:
    """Read the ``record.json`` of a finished run.

    :raises TrainingError: the file is missing, no JSON, or of another schema.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainingError(f"{path.name} does not exist; train first") from None
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path.name} is damaged ({error}); delete it to start again") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise TrainingError(f"{path.name} is not a record of schema {SCHEMA}; train again to write one")
    return record


def with_digest(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the sha256 of the rest as its ``digest``."""
    return {**record, "digest": _digest(record)}


def _digest(record: Mapping[str, Any]) -> str:
    return provenance.digest(json.dumps(record, sort_keys=True, allow_nan=False).encode())


def save_evaluation(record: Mapping[str, Any], path: str | Path) -> None:
    """Write an evaluation as JSON, whole or not at all."""
    write_record(path, record)


def read_evaluation(path: str | Path) -> dict[str, Any]:
    """Read what :func:`save_evaluation` wrote.

    :raises TrainingError: no such file, no JSON, another schema, or contents that do not match their digest.
    """
    record = read_record(Path(path))
    if record.get("digest") != _digest({key: value for key, value in record.items() if key != "digest"}):
        raise TrainingError(f"{Path(path).name} does not match its digest: it was changed after it was written")
    return record
