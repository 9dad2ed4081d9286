"""The benchmark at tiny sizes, and the record that it left."""

import importlib.util
import json
import math
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
RIVALS = {
    "scipy pdist", "torch.cdist float32", "torch.cdist float64", "sklearn manhattan_distances", "numpy broadcast"
}  # fmt: skip
SIZES = [9, 29, 128, 197, 257, 513, 1025]


@pytest.fixture(scope="module")
def kernel_benchmark():
    spec = importlib.util.spec_from_file_location("kernel_benchmark", ROOT / "benchmarks" / "kernel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def positive(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def check_layout(record, sizes):
    """Everything that the book reads from a record, and how its numbers hang together."""
    born = record["provenance"]
    assert {"python", "numpy", "torch", "numba", "llvmlite", "scipy", "scikit-learn"} <= born["versions"].keys()
    assert all(re.match(r"\d+\.\d+", version) for version in born["versions"].values())
    assert born["machine"].keys() == {"system", "architecture", "processor", "cores"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", born["started"])
    assert positive(born["seconds"]) and positive(born["rounds"])
    load = born["load_average"]
    assert 0 <= load["least"] <= load["median"] <= load["most"]
    assert record["ceiling"].keys() == {"integer", "float32"} and all(map(positive, record["ceiling"].values()))

    rows = record["comparison"]
    threads = sorted({row["threads"] for row in rows})
    assert threads[0] == 1
    kinds = ("flat", "peaked", "saturated")
    assert [(row["threads"], row["N"], row["kind"]) for row in rows] == [
        (count, n, kind) for count in threads for n in sizes for kind in kinds
    ]
    for row in rows:
        ours = row["seconds"]["dobnb check_equality"]
        assert row["seconds"].keys() == {*RIVALS, "dobnb check_equality"} and row["ratio"].keys() == RIVALS
        assert all(map(positive, row["seconds"].values())) and positive(row["batch"])
        for name, ratio in row["ratio"].items():  # seconds are rounded to three digits, ratios to one place
            quotient = row["seconds"][name] / ours
            assert abs(ratio - quotient) <= 0.051 + 0.011 * quotient
        operations = row["N"] ** 2 * (row["N"] - 1) / 2
        lanes = min(row["threads"], row["batch"]) * record["ceiling"]["integer"] * 1e9
        share = operations / ours / lanes
        assert abs(row["share_of_ceiling"] - share) <= 0.0006 + 0.006 * share

    assert {*kinds, "underflowing", "uniform", "two_class", "circulant", "near_tied"} == record["kinds_257"].keys()
    assert record["functions_257"].keys() == {"dobrushin_coefficient", "check_equality", "leave_one_out"}
    whole = record["end_to_end"]
    calls = {"sdpa forward", "forward with capture", "measure", "measure with depth bounds"}
    assert whole.keys() == {*calls, "images", "threads"}
    for part in (record["kinds_257"], record["functions_257"], whole):
        assert all(map(positive, part.values()))


def test_a_tiny_run_leaves_a_whole_record(kernel_benchmark, monkeypatch, tmp_path):
    whole, threads = kernel_benchmark.end_to_end, torch.get_num_threads()
    monkeypatch.setattr(kernel_benchmark, "SIZES", {5: 3, 40: 2})
    monkeypatch.setattr(kernel_benchmark, "end_to_end", lambda: whole(images=1, rounds=1))
    kernel_benchmark.main(tmp_path / "kernel.json")
    assert torch.get_num_threads() == threads
    record = json.loads((tmp_path / "kernel.json").read_text())
    check_layout(record, [5, 40])
    assert {row["threads"] for row in record["comparison"]} == {1, threads}


def test_the_committed_record_is_whole():
    record = json.loads((ROOT / "results" / "kernel.json").read_text())
    check_layout(record, SIZES)
    assert re.fullmatch(r"[0-9a-f]{40}", record["provenance"]["commit"]), "of a checkout without changes"
    assert record["provenance"]["rounds"] >= 5


@pytest.mark.parametrize("kind", ["flat", "peaked", "saturated", "underflowing", "uniform", "two_class", "circulant",
                                  "near_tied"])  # fmt: skip
def test_samples_are_float32_attention(kernel_benchmark, kind):
    A = kernel_benchmark.sample(getattr(kernel_benchmark, kind), 2, 33)
    assert A.dtype == torch.float32 and A.shape == (2, 33, 33) and (A >= 0).all()
    assert (A.double().sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("n", [7, 40])
def test_rivals_compute_the_distances_of_all_pairs(kernel_benchmark, n):
    """Each does the work that it is timed for: every pair once, or twice where it returns a square."""
    A = kernel_benchmark.sample(kernel_benchmark.flat, 3, n)
    once = (A.double().unsqueeze(2) - A.double().unsqueeze(1)).abs().sum().item() / 2
    for name, call in kernel_benchmark.RIVALS.items():
        times = sum(float(part.sum()) for part in call(A)) / once
        assert times == pytest.approx(round(times), rel=1e-5) and round(times) in (1, 2), name


# Whole runs


def check_runs(record, sizes):
    """Layout of results/measure.json, and what it claims that no clock decides."""
    assert [(row["inputs"], row["workers"]) for row in record["rows"]] == [(n, w) for n in sizes for w in (1, 2)]
    assert all(all(map(positive, (row["seconds"], row["cpu_seconds"], row["peak_mb"]))) for row in record["rows"])
    assert record["workers_change_no_bit"] is True
    assert record["line"].keys() == {
        "cpu_seconds_an_input", "cpu_seconds_to_start", "largest_deviation"
    }  # fmt: skip
    assert positive(record["line"]["cpu_seconds_an_input"])


@pytest.mark.slow
def test_a_tiny_benchmark_of_runs_leaves_a_whole_record(tmp_path):
    spec = importlib.util.spec_from_file_location("measure_benchmark", ROOT / "benchmarks" / "measure.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path / "measure.json", (17, 18))  # of two blocks, so that there is one for each worker
    check_runs(json.loads((tmp_path / "measure.json").read_text()), (17, 18))


def test_the_committed_record_of_runs_shows_flat_memory_and_linear_time():
    record = json.loads((ROOT / "results" / "measure.json").read_text())
    check_runs(record, (32, 64, 128))
    alone = [row["peak_mb"] for row in record["rows"] if row["workers"] == 1]
    assert max(alone) <= 1.1 * min(alone), "four times the inputs, the same memory"
    assert record["line"]["largest_deviation"] <= 0.1
    cpu = {(row["inputs"], row["workers"]): row["cpu_seconds"] for row in record["rows"]}
    assert all(cpu[n, 2] <= 0.65 * cpu[n, 1] for n in (32, 64, 128)), "each of two workers does about half"
    assert re.fullmatch(r"[0-9a-f]{40}", record["provenance"]["commit"]), "of a checkout without changes"
