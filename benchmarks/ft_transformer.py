"""What makes a training step of FT-Transformer faster, one thing after another, into results/ft_transformer_speed.json.

``python benchmarks/ft_transformer.py [FILE]``. Steps of the variants are interleaved and the fastest of each counts, so
that a busy machine disturbs little. Beside it: the test error of bfloat16 and float32 training on diabetes, over seeds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

import torch
from rtdl_revisiting_models import FTTransformer
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from dobnb import provenance
from dobnb.files import write_text
from dobnb.ft_transformer import PACKAGES, skip_discarded_rows, train
from dobnb.tables import load_table

ROUNDS, SEEDS = 12, 8
ROWS, FEATURES, BATCH = 13_209, 8, 256
"""California's."""


def loader(X: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches as the plain loop has them, on and on."""
    for _ in repeat(None):
        yield from DataLoader(TensorDataset(X, y), batch_size=BATCH, shuffle=True, drop_last=True)


def tensors(X: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in repeat(None):
        for rows in torch.randperm(len(y)).split(BATCH)[:-1]:
            yield X[rows], y[rows]


def variant(blocks: int, batches: Callable, fused: bool, skip: bool, half: bool, compiled: bool) -> Callable[[], float]:
    """A function that does one step and returns its seconds."""
    torch.manual_seed(0)
    model = FTTransformer(
        n_cont_features=FEATURES, cat_cardinalities=[], d_out=1, **FTTransformer.get_default_kwargs(n_blocks=blocks)
    )
    if skip:
        skip_discarded_rows(model)
    groups = model.make_parameter_groups()
    optimizer = torch.optim.AdamW(groups, lr=1e-4, weight_decay=1e-5, fused=fused)
    forward = torch.compile(model) if compiled else model
    source = batches(torch.randn(ROWS, FEATURES), torch.randn(ROWS))

    def step() -> float:
        clock = time.perf_counter()
        X, y = next(source)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            output = forward(X, None).squeeze(-1)
        mse_loss(output.float(), y).backward()
        optimizer.step()
        return time.perf_counter() - clock

    return step


def main(path: Path) -> None:
    torch.set_num_threads(1)
    started, load = provenance.now(), [os.getloadavg()[0]]
    settings = {
        "plain loop": (loader, False, False, False, False),
        "data as one tensor": (tensors, False, False, False, False),
        "fused AdamW": (tensors, True, False, False, False),
        "discarded rows skipped": (tensors, True, True, False, False),
        "the last, compiled": (tensors, True, True, False, True),
        "the last but one, bfloat16": (tensors, True, True, True, False),
    }
    steps = []
    for blocks in (3, 6):
        calls = {name: variant(blocks, *how) for name, how in settings.items() if blocks == 3 or "compiled" not in name}
        for call in calls.values():
            call()
        took = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                took[name].append(call())
        fastest = {name: min(seconds) for name, seconds in took.items()}
        plain = fastest["plain loop"]
        steps += [
            {"blocks": blocks, "variant": name, "ms": round(1e3 * seconds, 1), "faster": round(plain / seconds, 2)}
            for name, seconds in fastest.items()
        ]
        print(*steps[-len(calls) :], sep="\n", flush=True)
        load.append(os.getloadavg()[0])
    table, accuracy = load_table("diabetes"), {}
    for precision in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            runs = [train(table, 3, seed, Path(folder) / str(seed), precision=precision) for seed in range(SEEDS)]
        accuracy[precision] = [round(run["metrics"]["test"], 3) for run in runs]
        print(precision, accuracy[precision], flush=True)
    load.append(os.getloadavg()[0])
    record = {
        "provenance": {
            "versions": provenance.versions(PACKAGES),
            "machine": provenance.machine(),
            "commit": provenance.git_commit(Path(__file__).parent),
            "started": started,
            "rounds": ROUNDS,
            "load_average": [round(min(load), 2), round(max(load), 2)],
        },
        "batch": BATCH,
        "features": FEATURES,
        "steps": steps,
        "diabetes_test_rmse": accuracy,
    }
    write_text(path, json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    default = Path(__file__).parents[1] / "results" / "ft_transformer_speed.json"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
