"""A Python kernel that strangers' code may run in: bubblewrap around it, limits on it, a watch over it.

Inside there is the system, read-only, the book's Python with `dobnb` and the fetched weights, and a small scratch
folder in memory. There is no network, no home folder, no other process, and none of the instructor's files: the
notebook comes in cell by cell, through a socket. As root, code runs as a user of its own; else in a user namespace.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assignments.text import ROOT

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/fonts", "/etc/alternatives")
STRANGER = 64001
"""User and group, with nothing to its name, that code runs as where grading runs as root; one more for each at once."""
SCRATCH = "/scratch"
"""The only folder to write to, in memory; where code runs."""
NUMBERS = {"x86_64": (0xC000003E, 272, 56, 319, 29), "aarch64": (0xC00000B7, 97, 220, 279, 194)}
"""By processor: what Linux calls it, and its numbers of the system calls unshare, clone, memfd_create and shmget."""


def system_calls(processor: str) -> bytes:
    """A filter of system calls, as bubblewrap's ``--seccomp`` reads it: no memory that the limit on memory cannot see.

    That is what memfd_create, memfd_secret and shmget give, and a file system in memory, which code could mount in a
    user namespace of its own. clone3 hides its flags from a filter, so it seems not to exist; libraries then use clone.

    :raises KeyError: the processor is not known.
    """
    audit, unshare, clone, memfd_create, shmget = NUMBERS[processor]
    memfd_secret, clone3 = 447, 435
    load, jump_equal, jump_least, jump_set, leave = 0x20, 0x15, 0x35, 0x45, 0x06
    allowed, denied, missing = 0x7FFF0000, 0x00050001, 0x00050026  # errno EPERM, ENOSYS
    program = [
        (load, 0, 0, 4), (jump_equal, 1, 0, audit), (leave, 0, 0, missing),  # no 32-bit programs
        (load, 0, 0, 0), (jump_least, 10, 0, 2**30),  # x32, other numbers for the same calls
        (jump_equal, 9, 0, memfd_create), (jump_equal, 8, 0, memfd_secret), (jump_equal, 7, 0, shmget),
        (jump_equal, 6, 0, clone3), (jump_equal, 2, 0, unshare), (jump_equal, 1, 0, clone), (leave, 0, 0, allowed),
        (load, 0, 0, 16), (jump_set, 0, 2, 0x10000000),  # CLONE_NEWUSER
        (leave, 0, 0, denied), (leave, 0, 0, missing), (leave, 0, 0, allowed),
    ]  # fmt: skip
    return b"".join(struct.pack("<HBBI", *line) for line in program)


@dataclass(frozen=True)
class Limits:
    """What one submission may use."""

    cell: float = 60
    """Seconds for a cell; then it is interrupted, and counts as failed."""
    whole: float = 300
    """Seconds for all cells; then the kernel is killed."""
    memory: int = 4 * 2**30
    """Bytes, of all its processes together; more than that for a quarter of a second, and the kernel is killed."""
    processes: int = 256
    """Processes and threads."""
    output: int = 2 * 2**20
    """Bytes of output of all cells; then the kernel is killed."""
    disk: int = 256 * 2**20
    """Bytes of scratch, in memory."""


@dataclass(frozen=True)
class Room:
    """Where kernels run."""

    python: str
    """The interpreter of the book's environment; not resolved, so that it finds its packages."""
    weights: str
    """Folder of the fetched weights (``DOBNB_HOME``)."""
    cache: str
    """Folder of compiled code and fonts, made once by code that is trusted; kernels get a copy."""
    sandboxed: bool = True
    slot: int = 0
    """Which of the submissions graded at once."""
    fill: bool = False
    """Write to `cache` itself: for trusted code only."""


def _prefixes(python: str) -> list[str]:
    """Folders that an interpreter needs, outermost first, without those that the system brings."""
    code = "import sys, os; print(sys.prefix, sys.base_prefix, os.path.realpath(sys.executable), sep='\\n')"
    found = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    folders = {found[0], found[1], str(Path(found[2]).parents[1])}
    return sorted(folder for folder in folders if not folder.startswith(("/usr/bin", "/usr/lib")) and folder != "/usr")


def environment(room: Room) -> dict[str, str]:
    """Environment variables of a kernel: none of the instructor's."""
    scratch = SCRATCH if room.sandboxed else tempfile.gettempdir()
    cache = room.cache if room.fill or not room.sandboxed else f"{SCRATCH}/.cache"
    return {
        "DOBNB_HOME": room.weights,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "1",
        "HOME": scratch,
        "IPYTHONDIR": f"{scratch}/.ipython",
        "LANG": "C.UTF-8",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "MPLCONFIGDIR": f"{cache}/matplotlib",
        "NUMBA_CACHE_DIR": f"{cache}/numba",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(room.python).parent}:/usr/bin:/bin",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "TMPDIR": scratch,
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "USER": "student",
    }


def command(room: Room, limits: Limits, sockets: str, arguments: list[str]) -> list[str]:
    """`arguments` (a program of the room's Python environment) in a sandbox, or with limits alone.

    :param sockets: folder that the kernel shares with the grader.
    """
    bounds = ["--core=0", f"--cpu={int(limits.whole) + 5}", f"--fsize={limits.disk}", "--nofile=1024"]
    if not room.sandboxed:
        variables = [f"{name}={value}" for name, value in environment(room).items()]
        prefix = ["prlimit", *bounds, "--"] if shutil.which("prlimit") else []
        return ["env", "-i", *variables, *prefix, *arguments]
    root = os.geteuid() == 0
    wrap = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    wrap += ["--die-with-parent", "--new-session", "--clearenv"]
    wrap += ["--cap-drop", "ALL"]
    wrap += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if root else ["--unshare-user"]
    shown: list[str] = []
    made: set[Path] = set()

    def show(path: str, how: str = "--ro-bind") -> None:
        if not any(Path(path).is_relative_to(done) for done in shown):
            for parent in reversed(Path(path).parents[:-1]):
                if parent not in made:
                    wrap.extend(["--perms", "0755", "--dir", str(parent)])  # else bwrap makes it root's alone
                    made.add(parent)
            wrap.extend([how, path, path])
            shown.append(path)

    for path in SYSTEM:
        if Path(path).is_symlink() and Path(path).parent == Path("/"):
            wrap += ["--symlink", os.readlink(path), path]
        elif Path(path).exists():
            show(path)
    for path in [*_prefixes(room.python), str(ROOT / "dobnb"), room.weights]:
        if Path(path).exists():
            show(path)
    show(room.cache, "--bind" if room.fill else "--ro-bind")
    show(sockets, "--bind")
    wrap += ["--proc", "/proc", "--dev", "/dev", "--size", str(2**26), "--perms", "1777", "--tmpfs", "/dev/shm"]
    wrap += ["--remount-ro", "/dev", "--size", str(limits.disk), "--perms", "1777", "--tmpfs", SCRATCH]
    wrap += ["--remount-ro", "/", "--chdir", SCRATCH]
    for name, value in environment(room).items():
        wrap += ["--setenv", name, value]
    user = str(STRANGER + room.slot)
    stranger = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs"] if root else []
    bounds += [f"--nproc={limits.processes}", f"--data={2 * limits.memory}"]
    copy = 'cp -r "$0" .cache && exec "$@"' if not room.fill else 'exec "$@"'
    filtered = Path(sockets) / "system-calls"
    filtered.unlink(missing_ok=True)
    filtered.write_bytes(system_calls(platform.machine()))  # read before the kernel runs
    wrap = ["sh", "-c", 'exec "$@" 9<"$0"', str(filtered), *wrap, "--seccomp", "9"]
    return [*wrap, "--", *stranger, "prlimit", *bounds, "--", "sh", "-c", copy, room.cache, *arguments]


def problem(room: Room) -> str | None:
    """Why strangers' code cannot be sandboxed on this machine; None where it can."""
    missing = [name for name in ("bwrap", "prlimit", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed (on Debian: apt-get install bubblewrap util-linux)"
    if platform.machine() not in NUMBERS:
        return f"no filter of system calls for this processor ({platform.machine()}); {' and '.join(NUMBERS)} have one"
    with tempfile.TemporaryDirectory() as sockets:
        own(Path(sockets), room)
        arguments = command(room, Limits(), sockets, [room.python, "-I", "-c", "print('inside')"])
        ran = subprocess.run(arguments, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    if ran.stdout.strip() == "inside":
        return None
    return (ran.stderr.strip().splitlines() or ["bwrap ended without a word"])[-1]


def own(folder: Path, room: Room) -> None:
    """Let the kernel's user, where it is another, write to `folder`."""
    if room.sandboxed and os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, STRANGER + room.slot, STRANGER + room.slot)


def _tree(process: int) -> list[int]:
    """`process` and all that descend from it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # it ended meanwhile
        children.setdefault(parent, []).append(int(folder.name))
    found = [process]
    for one in found:
        found += children.get(one, ())
    return found


def _resident(process: int) -> int:
    """Bytes of memory that `process` holds."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


class Watch(threading.Thread):
    """Kills a kernel that takes too much memory or time, or fills the folder of its sockets, and says why."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits, sockets: str) -> None:
        super().__init__(daemon=True)
        self.process, self.limits, self.sockets = process, limits, sockets
        self.reason: str | None = None
        self.end = time.monotonic() + limits.whole
        self._stop = threading.Event()

    def kill(self, reason: str) -> None:
        """End the kernel, with all that it started."""
        self.reason = self.reason or reason
        for one in _tree(self.process.pid) if sys.platform == "linux" else [self.process.pid]:
            try:
                os.kill(one, signal.SIGKILL)
            except OSError:
                continue

    def run(self) -> None:
        while not self._stop.wait(0.25) and self.process.poll() is None:
            if time.monotonic() > self.end:
                self.kill("time limit")
            elif sys.platform == "linux" and sum(map(_resident, _tree(self.process.pid))) > self.limits.memory:
                self.kill("memory limit")
            elif len(files := list(os.scandir(self.sockets))) > 64 or sum(_size(file) for file in files) > 2**24:
                self.kill("disk limit")

    def stop(self) -> None:
        """Watch no longer."""
        self._stop.set()


def _size(file: os.DirEntry[str]) -> int:
    try:
        return file.stat(follow_symlinks=False).st_size if not file.is_dir(follow_symlinks=False) else 2**25
    except OSError:
        return 0


def kernel_manager(room: Room, limits: Limits, sockets: str) -> type:
    """A class of kernel managers, as nbclient wants it, whose kernels run in the `room`."""
    import zmq
    import zmq.asyncio
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from traitlets import default

    class Kernels(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            mute = ["sh", "-c", 'exec "$@" </dev/null >/dev/null 2>&1', "kernel"]  # what passes by the kernel's streams
            kernel = [room.python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            argv = command(room, limits, sockets, [*mute, *kernel])
            return KernelSpec(argv=argv, display_name="sandbox", language="python", interrupt_mode="message")

    class Manager(AsyncKernelManager):
        watch: Watch | None = None

        @default("kernel_spec_manager")
        def _kernels(self) -> KernelSpecManager:
            return Kernels(parent=self)

        @default("context")
        def _context(self) -> zmq.asyncio.Context:
            self._created_context = True
            context = zmq.asyncio.Context()
            context.setsockopt(zmq.MAXMSGSIZE, 8 * limits.output)  # longer messages are dropped, with their connection
            return context

        def __init__(self, **traits: Any) -> None:
            traits |= {"transport": "ipc", "ip": f"{sockets}/k", "connection_file": f"{sockets}/connection.json"}
            super().__init__(**traits)

        async def start_kernel(self, **options: Any) -> None:
            self.write_connection_file()
            own(Path(sockets), room)
            await super().start_kernel(**options)
            self.watch = Watch(self.provisioner.process, limits, sockets)
            self.watch.start()

    return Manager
