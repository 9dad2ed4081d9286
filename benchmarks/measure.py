"""Inputs against time and peak memory of a whole run, with one worker process and with two, into results/measure.json.

`make bench`, or ``python benchmarks/measure.py [FILE]``. Each worker is a process with one thread that runs its shard
of the blocks into a folder, as ``dobnb measure --shard`` does; the shards are then merged. What is claimed: time on
the processor is linear in the inputs, memory is flat, each of two workers does half, and they change no bit.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dobnb import Measurement, provenance
from dobnb.files import write_text
from dobnb.inputs import photographs
from dobnb.measurement import prepare
from dobnb.runs import merge, run

MODEL, BLOCK, BATCH = "dinov2-small-saliency", 16, 8
SIZES = (32, 64, 128)


def work(n: int, k: int, m: int, out: str) -> dict[str, float]:
    """One worker: seconds of measuring, without loading, by the clock and on the processor, which other processes
    hardly touch; and the process's peak of resident memory."""
    torch.set_num_threads(1)
    job = prepare(MODEL, photographs(n), batch_size=BATCH, block_size=BLOCK)
    began, worked = time.monotonic(), time.process_time()
    run(job, out, shard=(k, m))
    seconds, cpu = time.monotonic() - began, time.process_time() - worked
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    megabytes = peak / (1e6 if sys.platform == "darwin" else 1e3)
    return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "peak_mb": round(megabytes)}


def spread(n: int, workers: int, folder: Path) -> tuple[dict[str, Any], Measurement]:
    """`n` inputs over so many processes: what the slowest took, the largest peak, and the merged measurement."""
    outs = [folder / f"{n}_{k}_{workers}" for k in range(1, workers + 1)]
    commands = [[sys.executable, __file__, "--worker", str(n), str(k + 1), str(workers), str(out)]
                for k, out in enumerate(outs)]  # fmt: skip
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    printed = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"a worker failed on {n} inputs")
    rows = [json.loads(text) for text in printed]
    found = Measurement.load(outs[0]) if workers == 1 else merge(outs, folder / f"{n}_merged_{workers}")
    row = {"inputs": n, "workers": workers} | {name: max(row[name] for row in rows) for name in rows[0]}
    return row, found


def alike(a: Measurement, b: Measurement) -> bool:
    """Equal in all that the settings decide."""
    return replace(a, provenance=b.provenance) == b


def main(path: Path, sizes: tuple[int, ...] = SIZES) -> None:
    started, began, load = provenance.now(), time.monotonic(), [os.getloadavg()[0]]
    rows, same = [], True
    with tempfile.TemporaryDirectory() as folder:
        for n in sizes:
            found = []
            for workers in (1, 2):
                row, one = spread(n, workers, Path(folder))
                rows.append(row)
                found.append(one)
                load.append(os.getloadavg()[0])
                print(row, flush=True)
            same = same and alike(*found)
    one = [row for row in rows if row["workers"] == 1]
    inputs, seconds = (np.array([row[name] for row in one], dtype=float) for name in ("inputs", "cpu_seconds"))
    slope, start = np.polyfit(inputs, seconds, 1)
    record = {
        "provenance": {
            "versions": provenance.versions(),
            "machine": provenance.machine(),
            "commit": provenance.git_commit(Path(__file__).parent),
            "started": started,
            "seconds": round(time.monotonic() - began, 1),
            "load_average": {"least": round(min(load), 2), "most": round(max(load), 2)},
        },
        "model": MODEL,
        "block_size": BLOCK,
        "batch_size": BATCH,
        "rows": rows,
        "line": {
            "cpu_seconds_an_input": round(float(slope), 3),
            "cpu_seconds_to_start": round(float(start), 2),
            "largest_deviation": round(float(np.abs(slope * inputs + start - seconds).max() / seconds.max()), 3),
        },
        "workers_change_no_bit": same,
    }
    write_text(path, json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(work(*map(int, sys.argv[2:5]), sys.argv[5])))
    else:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "results" / "measure.json")
