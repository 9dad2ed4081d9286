"""The birth certificate of a number: versions, machine, digests, commit, seconds. No path and no host name in it."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

PACKAGES = ("dobnb", "numpy", "pillow", "timm", "torch", "transformers")
"""The packages whose version can change a measured number."""


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Version of Python and of each installed package in `packages`; absent ones are left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str | int]:
    """Operating system, architecture, processor and the number of cores this process may use."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"system": platform.system(), "architecture": platform.machine(), "processor": processor, "cores": cores}


def origin(device: str = "cpu") -> dict[str, str | int | None]:
    """Where this process computes: :func:`machine`, torch's threads, the accelerator if there is one, the commit."""
    import torch  # the book is rendered without it

    found: dict[str, str | int | None] = {**machine(), "threads": torch.get_num_threads()}
    if torch.device(device).type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
    return found | {"commit": _own_commit()}


@cache
def _own_commit() -> str | None:
    """The commit of this package, asked once a process: the code that was imported is the code that runs."""
    return git_commit(Path(__file__).parent)


def now() -> str:
    """The time, UTC, ISO 8601, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def digest(*parts: bytes) -> str:
    """sha256 of `parts`, each preceded by its length, so that moving a boundary changes the digest."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "big"))
        total.update(part)
    return total.hexdigest()


def file_digest(path: str | Path) -> str:
    """sha256 of a file's bytes, as ``sha256sum`` prints it."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def git_commit(folder: str | Path = ".") -> str | None:
    """Commit that `folder` is at, with ``+`` where tracked files differ from it; None outside a git checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
