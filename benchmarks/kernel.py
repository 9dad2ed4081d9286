"""The kernel beside what one would use instead, in one process, interleaved, into results/kernel.json.

`make bench`, or ``python benchmarks/kernel.py [FILE]``. Ours is the complete report: kappa, verdict, pair, attaining
pairs, gap, margin, validation included. The others compute the distances of the pairs and nothing else. Run it on a
quiet machine: the load while it ran is in the record.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic
from scipy.spatial.distance import pdist
from sklearn.metrics.pairwise import manhattan_distances

from dobnb import check_equality, dobrushin_coefficient, leave_one_out, provenance
from dobnb.capture import stream_attention
from dobnb.files import write_text
from dobnb.inputs import from_tensors, photographs
from dobnb.measurement import measurement_of, prepare
from dobnb.models import load_model

SIZES = {9: 100_000, 29: 5_000, 128: 64, 197: 32, 257: 32, 513: 8, 1025: 2}
"""N and the batch. A rival that is slow gets as many of the matrices as take it a few hundredths of a second."""

ROUNDS = 5
LANES, CHAINS = 16, 14


@intrinsic
def _min_add(typingctx, start, steps):
    """Minima and additions on registers alone: `steps` times `CHAINS` vectors of 16, nothing loaded or stored."""

    def generate(context, builder, signature, arguments):
        word = context.get_value_type(signature.args[0])
        vector, index = ir.VectorType(word, LANES), arguments[1].type
        whole = isinstance(word, ir.IntType)
        name = f"llvm.umin.v{LANES}i{word.width}" if whole else f"llvm.minnum.v{LANES}f32"
        function = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(vector, [vector, vector]), name
        )
        add = builder.add if whole else lambda a, b: builder.fadd(a, b, flags=("nnan", "nsz"))
        splat = builder.insert_element(ir.Constant(vector, ir.Undefined), arguments[0], ir.IntType(32)(0))
        splat = builder.shuffle_vector(
            splat, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        )
        starts = [splat]
        for _ in range(CHAINS):
            starts.append(add(starts[-1], splat))
        before, loop, after = builder.block, builder.append_basic_block("ceiling"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        step, moving = builder.phi(index), builder.phi(vector)
        totals = [builder.phi(vector) for _ in range(CHAINS)]
        step.add_incoming(index(0), before)
        moving.add_incoming(splat, before)
        moved = add(moving, splat)  # no minimum is the same twice; one addition for `CHAINS` minima, not counted
        moving.add_incoming(moved, loop)
        grown = []
        for total, left in zip(totals, starts[1:], strict=True):
            flags = () if whole else ("nnan", "nsz")
            grown.append(add(total, builder.call(function, [left, moving], fastmath=flags)))
            total.add_incoming(left, before)
            total.add_incoming(grown[-1], loop)
        following = builder.add(step, index(1))
        step.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, arguments[1]), loop, after)
        builder.position_at_end(after)
        whole_sum = grown[0]
        for total in grown[1:]:
            whole_sum = add(whole_sum, total)
        result = builder.extract_element(whole_sum, ir.IntType(32)(0))
        for lane in range(1, LANES):
            result = add(result, builder.extract_element(whole_sum, ir.IntType(32)(lane)))
        return result

    return start(start, steps), generate


@njit
def _run_ceiling(start, steps):
    return _min_add(start, steps)


def ceiling() -> dict[str, float]:
    """The most minima with addition a core does in a second, in 1e9, for either kind of lane: the best of ten tries."""
    found, steps = {}, 2_000_000
    for name, start in (("integer", np.uint32(3)), ("float32", np.float32(1e-3))):
        _run_ceiling(start, 10)
        seconds = min(timed(lambda start=start: _run_ceiling(start, steps)) for _ in range(10))
        found[name] = round(steps * CHAINS * LANES / seconds / 1e9, 1)
    return found


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def flat(draw: np.random.Generator, batch: int, n: int) -> np.ndarray:
    return draw.dirichlet(np.ones(n), size=(batch, n))


def peaked(draw: np.random.Generator, batch: int, n: int) -> np.ndarray:
    return softmax(2 * draw.standard_normal((batch, n, n)) + 3 * np.eye(n))


def saturated(draw: np.random.Generator, batch: int, n: int) -> np.ndarray:
    """Every row puts all its mass on a token of its own: all pairs tie at 1."""
    return np.stack([np.eye(n)[draw.permutation(n)] for _ in range(batch)])


def underflowing(draw: np.random.Generator, batch: int, n: int) -> np.ndarray:
    """Saturated but for tiny overlaps, which only 64 bits can tell from ties."""
    return softmax(60 * draw.standard_normal((batch, n, n)))


def uniform(draw: np.random.Generator, batch: int, n: int) -> np.ndarray:
    return np.full((batch, n, n), 1 / n)


def two_class(draw: np.random.Generator, batch: int, n: int) -> np.ndarray:
    return np.stack([draw.dirichlet(np.ones(n), size=2)[draw.integers(0, 2, n)] for _ in range(batch)])


def circulant(draw: np.random.Generator, batch: int, n: int) -> np.ndarray:
    rows = draw.dirichlet(np.ones(n), size=batch)
    return np.stack([[np.roll(row, shift) for shift in range(n)] for row in rows])


def near_tied(draw: np.random.Generator, batch: int, n: int) -> np.ndarray:
    A = two_class(draw, batch, n) * (1 + 1e-9 * draw.random((batch, n, n)))
    return A / A.sum(-1, keepdims=True)


def sample(kind: Callable[..., np.ndarray], batch: int, n: int) -> torch.Tensor:
    """float32, as a model's attention is."""
    return torch.from_numpy(kind(np.random.default_rng(n), batch, n).astype(np.float32))


def broadcast(A: np.ndarray) -> list[np.ndarray]:
    """Half L1 by a broadcast: one whole for small N, a row at a time where N x N x N would not fit the cache."""
    if A.shape[-1] <= 32:
        return [np.abs(part[:, :, None] - part[:, None]).sum(-1) for part in np.array_split(A, max(1, len(A) // 64))]
    return [np.abs(matrix[i] - matrix[i + 1 :]).sum(-1) for matrix in A for i in range(len(matrix) - 1)]


RIVALS: dict[str, Callable[[torch.Tensor], Any]] = {
    "scipy pdist": lambda A: [pdist(matrix, "cityblock") for matrix in A.double().numpy()],
    "torch.cdist float32": lambda A: torch.cdist(A, A, p=1.0),
    "torch.cdist float64": lambda A: torch.cdist(A.double(), A.double(), p=1.0),
    "sklearn manhattan_distances": lambda A: [manhattan_distances(matrix) for matrix in A.numpy()],
    "numpy broadcast": lambda A: broadcast(A.numpy()),
}
LOOPS = ("scipy pdist", "sklearn manhattan_distances")
OURS = "dobnb check_equality"


def compare(A: torch.Tensor, rounds: int = ROUNDS) -> dict[str, float]:
    """Median seconds a matrix of ours and of each rival, which take turns."""
    calls, parts = {OURS: check_equality} | RIVALS, {OURS: A}
    for name, call in calls.items():  # warm up, and find how many matrices a rival gets
        once = timed(lambda call=call: call(A[:2]))
        few = A.shape[-1] > 32 or name in LOOPS
        parts.setdefault(name, A[: max(1, int(0.05 * 2 / once))] if few else A)
    check_equality(A)
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            took[name].append(timed(lambda call=call, name=name: call(parts[name])) / len(parts[name]))
    return {name: statistics.median(seconds) for name, seconds in took.items()}


def kinds_of_257() -> dict[str, float]:
    """Median seconds a matrix for each kind of matrix, N = 257, one thread: is there a cliff?"""
    kinds = (flat, peaked, saturated, underflowing, uniform, two_class, circulant, near_tied)
    batches = {kind.__name__: sample(kind, 16, 257) for kind in kinds}
    took: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(2 * ROUNDS):
        for name, A in batches.items():
            took[name].append(timed(lambda A=A: check_equality(A)) / len(A))
    return {name: statistics.median(seconds) for name, seconds in took.items()}


def functions_of_257() -> dict[str, float]:
    """Median seconds a matrix of each of the three functions, flat Dirichlet, N = 257."""
    A = sample(flat, 32, 257)
    took: dict[str, list[float]] = {f.__name__: [] for f in (dobrushin_coefficient, check_equality, leave_one_out)}
    for _ in range(ROUNDS):
        for function in (dobrushin_coefficient, check_equality, leave_one_out):
            took[function.__name__].append(timed(lambda function=function: function(A)) / len(A))
    return {name: statistics.median(seconds) for name, seconds in took.items()}


def end_to_end(images: int = 16, rounds: int = ROUNDS) -> dict[str, Any]:
    """Seconds of a forward pass of DINOv2-S with sdpa, with capture, and with capture and all that `measure` tests, on
    one batch that lies in memory: without the bounds on each rollout, which are products of matrices, and with them."""
    model = load_model("dinov2-small-saliency")
    batch = photographs(images).batch(0, images)
    jobs = [prepare(model, from_tensors(batch, "a batch"), depth=depth, batch_size=images) for depth in (False, True)]

    def forward() -> None:
        with torch.no_grad():
            model(**batch)

    calls = {
        "sdpa forward": forward,
        "forward with capture": lambda: stream_attention(model, batch, lambda layer, weights: None),
        "measure": lambda: measurement_of(jobs[0].about, jobs[0].measure(0), provenance.now()),
        "measure with depth bounds": lambda: measurement_of(jobs[1].about, jobs[1].measure(0), provenance.now()),
    }
    for call in calls.values():
        call()
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            took[name].append(timed(call))
    return {name: statistics.median(seconds) for name, seconds in took.items()} | {"images": images}


def main(path: Path) -> None:
    started, began = provenance.now(), time.monotonic()
    cores, load = torch.get_num_threads(), [os.getloadavg()[0]]
    top = ceiling()
    print(f"ceiling, 1e9 minima with addition a second and core: {top}", flush=True)
    rows = []
    for threads in sorted({1, cores}):
        torch.set_num_threads(threads)
        for n, batch in SIZES.items():
            for kind in (flat, peaked, saturated):
                seconds = compare(sample(kind, batch, n))
                ours = seconds[OURS]
                share = n * n * (n - 1) / 2 / ours / (1e9 * top["integer"] * min(threads, batch))
                ratios = {name: round(seconds[name] / ours, 1) for name in RIVALS}
                rows.append(
                    {
                        "threads": threads, "N": n, "batch": batch, "kind": kind.__name__,
                        "seconds": {name: float(f"{value:.3g}") for name, value in seconds.items()},
                        "ratio": ratios, "share_of_ceiling": round(share, 3),
                    }
                )  # fmt: skip
                print(f"{threads}, N {n}, {kind.__name__}: {ours * 1e3:.4g} ms, {share:.0%}, {ratios}", flush=True)
                load.append(os.getloadavg()[0])
    torch.set_num_threads(1)
    kinds, functions = kinds_of_257(), functions_of_257()
    torch.set_num_threads(cores)
    whole = end_to_end()
    print(kinds, functions, whole, sep="\n")
    load.append(os.getloadavg()[0])
    record = {
        "provenance": {
            "versions": provenance.versions((*provenance.PACKAGES, "llvmlite", "numba", "scikit-learn", "scipy")),
            "machine": provenance.machine(),
            "commit": provenance.git_commit(Path(__file__).parent),
            "started": started,
            "seconds": round(time.monotonic() - began, 1),
            "rounds": ROUNDS,
            "load_average": {"least": round(min(load), 2), "median": round(statistics.median(load), 2),
                             "most": round(max(load), 2)},
        },
        "ceiling": top,
        "comparison": rows,
        "kinds_257": kinds,
        "functions_257": functions,
        "end_to_end": whole | {"threads": cores},
    }  # fmt: skip
    write_text(path, json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "results" / "kernel.json")
