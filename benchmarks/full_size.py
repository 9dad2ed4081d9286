"""Seconds and peak memory of the paper's models at full size on a CPU, into results/full_size.json.

``python benchmarks/full_size.py [FILE]``. What a run costs does not hang on the weights' values: with random ones it
can be told without the hub. Each model has a process of its own with one thread: a warm-up, then four inputs with heads
and depth bounds, as ``dobnb measure`` does by default.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from dobnb import MODELS, measure, provenance
from dobnb.files import write_text
from dobnb.inputs import photographs, random_words

INPUTS, BATCH = 4, 4


def work(name: str) -> dict[str, Any]:
    """One model: seconds an input and the process's peak of resident memory."""
    torch.set_num_threads(1)
    card = MODELS[name]
    if card.preprocessing:
        inputs = photographs(INPUTS, preprocessing=card.preprocessing)
    else:
        inputs = random_words(name, INPUTS, card.content)
    measure(name, inputs, untrained=0, batch_size=BATCH)
    found = measure(name, inputs, untrained=0, batch_size=BATCH)
    born = found.provenance  # its seconds leave out the drawing of the weights
    return {
        "model": name,
        "layers": found.layers,
        "tokens": born["model"]["tokens"],
        "seconds": round(born["seconds"] / INPUTS, 3),
        "peak_mb": _peak_mb(),
    }


def _peak_mb() -> int:
    """Linux's peak of this program; getrusage would give that of the process which started it, where that is larger."""
    status = Path("/proc/self/status").read_text()
    return round(int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(work(sys.argv[2])))
        return
    target = Path(sys.argv[1] if sys.argv[1:] else "results/full_size.json")
    started, before = provenance.now(), os.getloadavg()[0]
    rows = []
    for name, card in MODELS.items():
        if card.embedded:
            continue
        command = [sys.executable, __file__, "--worker", name]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed; see the lines above")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{name}: {rows[-1]['seconds']:.2f} s an input, peak memory {rows[-1]['peak_mb']} MB", flush=True)
    about = {
        "versions": provenance.versions(),
        "machine": provenance.machine(),
        "commit": provenance.git_commit(Path(__file__).parent),
        "started": started,
        "threads": 1,
        "inputs": INPUTS,
        "batch_size": BATCH,
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
    }
    write_text(target, json.dumps({"provenance": about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
