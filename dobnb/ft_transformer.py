"""FT-Transformer: training that can be killed and goes on to the same weights, and its evaluation.

The model is the reference implementation's, ``rtdl_revisiting_models.FTTransformer``, with its default arguments and
its parameter groups (Gorishniy et al., *Revisiting deep learning models for tabular data*, NeurIPS 2021).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from rtdl_revisiting_models import FTTransformer
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from dobnb import provenance
from dobnb.capture import stream_attention
from dobnb.equality import NEAR_TIE, EqualityReport, check_equality
from dobnb.files import short
from dobnb.tables import Prepared, Table, baselines, prepare, score
from dobnb.tallies import layer_tallies
from dobnb.training import (
    SCHEMA,
    TrainingError,
    alone_in,
    check_finite,
    check_same,
    check_seed,
    finish,
    load_tensors,
    read_record,
    restore,
    save_tensors,
    snapshot,
    state,
    with_digest,
)
from dobnb.untrained import against_null as beside_null

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 1e-5
"""Both are the reference's for its default model; biases, embeddings and normalisations do not decay."""
PATIENCE = 16
"""Training stops once so many epochs in a row have not improved the validation metric."""
BATCH_SIZE = {"higgs": 512}
"""By data set; 256 elsewhere. The reference's."""
ROWS_AT_A_TIME = 2048
"""In evaluation."""
ROWS_MEASURED = 4000
"""Of the test part, as the paper has it."""
UNTRAINED_SEED = 10_000
"""Of the first untrained model."""
Precision = Literal["float32", "bfloat16"]
PACKAGES = ("dobnb", "numpy", "pandas", "rtdl-revisiting-models", "safetensors", "scikit-learn", "scipy", "torch")


def check_blocks(blocks: int) -> None:
    """:raises TrainingError: no depth for which the reference has default arguments."""
    if not 1 <= blocks <= 6:
        raise TrainingError(f"blocks is {blocks}; FT-Transformer has default arguments for 1 to 6")


def build(table: Table, blocks: int, seed: int) -> FTTransformer:
    """The untrained model for a table, its weights drawn with `seed`; the global generator stays as it was.

    :param blocks: 1 to 6; the reference's width and dropout go with the depth.
    :raises TrainingError: another number of blocks.
    """
    check_blocks(blocks)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FTTransformer(
            n_cont_features=len(table.features),
            cat_cardinalities=[],
            d_out=1,
            **FTTransformer.get_default_kwargs(n_blocks=blocks),
        )
    skip_discarded_rows(model)
    return model


def skip_discarded_rows(model: FTTransformer) -> None:
    """Let the last block compute its feed-forward part for cls alone.

    The reference computes it for all tokens and then reads cls only. The output is the same; where dropout is active
    the random numbers of the discarded rows are no longer drawn.
    """
    last = model.backbone.blocks[-1]
    last["ffn_normalization"].register_forward_pre_hook(lambda module, arguments: (arguments[0][:, :1],))


def predict(model: FTTransformer, X: np.ndarray, prepared: Prepared, table: Table) -> np.ndarray:
    """Predictions for prepared rows, in evaluation mode; the model stays in the mode it was in.

    :param X: float32, shape (rows, features), as :func:`dobnb.tables.prepare` gives them.
    :return: float64, shape (rows,): the target in its units, or the probability of class 1.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            rows = torch.from_numpy(X).split(ROWS_AT_A_TIME)
            output = torch.cat([model(part, None).squeeze(-1) for part in rows]).double()
    finally:
        model.train(training)
    if table.task == "classification":
        output = output.sigmoid()
    return (output * prepared.scale + prepared.mean).numpy()


def train(
    table: Table,
    blocks: int,
    seed: int,
    folder: str | Path,
    *,
    batch_size: int | None = None,
    max_epochs: int | None = None,
    patience: int = PATIENCE,
    precision: Precision = "float32",
    report: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Train one model with early stopping, or take up the training that `folder` holds.

    After every epoch all of the run's state is written to one file, whole or not at all: a run that is killed and
    started again ends with the same weights, bit for bit, as one left alone, on the same machine with the same versions
    and the same number of threads. The folder then holds ``best.safetensors``, the weights of the best epoch on the
    validation part, ``record.json``, and ``epoch_*.safetensors``, the weights before training and after epochs 1, 2, 4,
    8 and so on.

    :param blocks: 1 to 6.
    :param seed: of weights, dropout, order of the rows and the noise of the preparation.
    :param batch_size: rows an update; by default that of `BATCH_SIZE`.
    :param max_epochs: stop after so many at the latest.
    :param patience: see `PATIENCE`.
    :param precision: of the matrix products in training; evaluation is in float32 always.
    :param report: called with a line of progress after every epoch.
    :return: what ``record.json`` holds: settings, metrics by part, the history by epoch, provenance.
    :raises TrainingError: another run in the folder, a damaged checkpoint, a loss that is not finite, or arguments out
        of range.
    :raises OSError: the folder cannot be written.
    """
    batch_size = BATCH_SIZE.get(table.name, 256) if batch_size is None else batch_size
    for name, value in (("batch_size", batch_size), ("patience", patience), ("max_epochs", max_epochs)):
        if value is not None and value < 1:
            raise TrainingError(f"{name} is {value}; it must be at least 1")
    check_blocks(blocks)
    check_seed(seed)
    if precision not in ("float32", "bfloat16"):
        raise TrainingError(f"precision is {precision!r}; pass float32 or bfloat16")
    settings = {
        "table": table.name,
        "table_digest": table.digest,
        "blocks": blocks,
        "seed": seed,
        "batch_size": batch_size,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "patience": patience,
        "max_epochs": max_epochs,
        "precision": precision,
    }
    folder = Path(folder)
    with alone_in(folder):
        return _train(table, settings, folder, report)


def _train(
    table: Table, settings: Mapping[str, Any], folder: Path, report: Callable[[str], None] | None
) -> dict[str, Any]:
    """:func:`train` with the folder to itself."""
    finished, checkpoint = folder / "record.json", folder / "checkpoint.safetensors"
    if finished.exists():
        record = read_record(finished)
        check_same(settings, record["settings"], folder)
        checkpoint.unlink(missing_ok=True)  # a process may have been killed before its last step
        return record
    blocks, seed = settings["blocks"], settings["seed"]
    model = build(table, blocks, seed)
    groups = model.make_parameter_groups()
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    prepared = prepare(table, seed)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        best: dict[str, Tensor] = {}
        about = {
            "settings": settings,
            "history": {"loss": [], "val": [], "seconds": []},
            "started": provenance.now(),
            "threads": torch.get_num_threads(),
        }
        if checkpoint.exists():
            tensors, about = load_tensors(checkpoint)
            check_same(settings, about["settings"], folder)
            best = restore(tensors, model, optimizer)
        else:
            save_tensors(folder / snapshot(0), model.state_dict(), {"settings": settings, "epoch": 0})
        history = about["history"]
        stopping = _Stopping(history["val"], table.metric, settings["patience"], settings["max_epochs"])
        while stopping.left() > 0:
            clock, epoch = time.monotonic(), len(history["val"]) + 1
            history["loss"].append(_epoch(model, optimizer, table, prepared, settings, epoch))
            history["val"].append(score(table, "val", predict(model, prepared.X["val"], prepared, table)))
            check_finite(history["val"][-1], f"the validation {table.metric} is {history['val'][-1]} in epoch {epoch}")
            history["seconds"].append(round(time.monotonic() - clock, 2))
            if stopping.best() == epoch:
                best = {name: value.clone() for name, value in model.state_dict().items()}
            if epoch & (epoch - 1) == 0:
                save_tensors(folder / snapshot(epoch), model.state_dict(), {"settings": settings, "epoch": epoch})
            save_tensors(checkpoint, state(model, optimizer, best), about)
            if report is not None:
                report(stopping.line(history))

    model.load_state_dict(best)
    save_tensors(folder / "best.safetensors", best, {"settings": settings, "epoch": stopping.best()})
    found = {
        "split": table.split,
        "metric": table.metric,
        "features": list(table.features),
        "rows": {part: len(rows) for part, rows in table.y.items()},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "best_epoch": stopping.best(),
        "metrics": {
            part: score(table, part, predict(model, rows, prepared, table)) for part, rows in prepared.X.items()
        },
    }
    return finish(folder, about, found, "best.safetensors", PACKAGES)


def _epoch(
    model: FTTransformer,
    optimizer: torch.optim.Optimizer,
    table: Table,
    prepared: Prepared,
    settings: Mapping[str, Any],
    epoch: int,
) -> float:
    """One pass over the training rows in random order; the mean loss over the batches."""
    X, y = torch.from_numpy(prepared.X["train"]), torch.from_numpy(prepared.y["train"])
    loss_of = mse_loss if table.task == "regression" else binary_cross_entropy_with_logits
    model.train()
    losses = []
    for step, rows in enumerate(torch.randperm(len(y)).split(settings["batch_size"]), start=1):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=settings["precision"] == "bfloat16"):
            output = model(X[rows], None).squeeze(-1)
        loss = loss_of(output.float(), y[rows])
        value = loss.item()
        check_finite(value, f"the loss is {value} in epoch {epoch}, step {step}")
        loss.backward()
        optimizer.step()
        losses.append(value)
    return sum(losses) / len(losses)


@dataclass(frozen=True)
class _Stopping:
    """When training ends, by the validation metric after each epoch so far."""

    values: list[float]
    metric: str
    patience: int
    max_epochs: int | None

    def best(self) -> int:
        """The epoch, counted from 1, of the best value; the first of several. 0 before the first epoch."""
        sign = -1 if self.metric == "RMSE" else 1
        return 1 + max(range(len(self.values)), key=lambda k: sign * self.values[k], default=-1)

    def left(self) -> int:
        """Epochs until training ends, should validation not improve again."""
        left = self.patience - (len(self.values) - self.best())
        return left if self.max_epochs is None else min(left, self.max_epochs - len(self.values))

    def line(self, history: Mapping[str, list[float]]) -> str:
        """Progress after an epoch. When training ends is known only if validation does not improve again, or if the
        epochs are limited and the limit comes first."""
        recent, best, left = history["seconds"][-5:], self.best(), self.left()
        seconds = round(left * sum(recent) / len(recent))
        longest = None if self.max_epochs is None else self.max_epochs - len(self.values)
        unless = "" if left == longest else " unless it improves"
        return (
            f"epoch {len(self.values):3d}  loss {history['loss'][-1]:.4f}  "
            f"validation {self.metric} {self.values[-1]:.4f}, best {self.values[best - 1]:.4f} (epoch {best})  "
            f"{recent[-1]:.1f} s  "
            f"{left} epoch{'' if left == 1 else 's'} left ({seconds // 60} min {seconds % 60:02d} s){unless}"
        )


def load_trained(table: Table, path: str | Path) -> FTTransformer:
    """The model whose weights :func:`train` wrote, in evaluation mode.

    :param table: the table it was trained on.
    :param path: ``best.safetensors`` or an ``epoch_*.safetensors``.
    :raises TrainingError: no such file, not ours, or trained on another table.
    """
    tensors, about = load_tensors(Path(path))
    if about["settings"]["table_digest"] != table.digest:
        raise TrainingError(f"{Path(path).name} was trained on another table than this {table.name}; pass that one")
    model = build(table, about["settings"]["blocks"], 0)
    model.load_state_dict(tensors)
    return model.eval()


# Evaluation ---------------------------------------------------------------------------------------------------------


def measure_rows(model: FTTransformer, X: np.ndarray) -> dict[str, Any]:
    """How often the equality condition (book: thm-equality) holds in a model's attention, row by row of a table.

    The last block queries cls alone: its attention is 1 x N, no Markov chain, and is left out. Heads are averaged
    first; restriction to the feature tokens comes last and renormalises.

    :param model: in evaluation mode, of two blocks or more.
    :param X: prepared rows, float32, shape (rows, features).
    :return: for JSON. ``features`` and ``all``, the two token sets, each with lists by layer: ``held``, the rows that
        satisfy the condition; ``kappa`` and ``margin``, quantiles over rows; ``failing_gap``, the median relative gap
        of the rows that do not, None where all do; ``near_ties``; ``averaged``, verdict, kappa, margin and relative gap
        of the matrix averaged over rows. ``attention``: that matrix on all tokens, cls first. ``pairs``: the ten
        commonest first maximising pairs of features, as ``[i, j, rows]``, features counted from 0.
    """
    features, tokens = X.shape[1], X.shape[1] + 1
    content = torch.arange(tokens) > 0
    on: dict[str, dict[int, list[EqualityReport]]] = {"features": {}, "all": {}}
    totals: dict[int, Tensor] = {}

    def sink(layer: int, weights: Tensor) -> None:
        _, averaged, reports = layer_tallies(weights.contiguous(), content, heads=False)
        on["features"].setdefault(layer, []).append(reports["content"])
        on["all"].setdefault(layer, []).append(reports["all"])
        totals[layer] = totals.get(layer, 0) + averaged.sum(0)

    for rows in torch.from_numpy(X).split(ROWS_AT_A_TIME):
        stream_attention(model, (rows, None), sink)
    whole = torch.stack([totals[layer] for layer in sorted(totals)]) / len(X)
    averaged = {"features": check_equality(whole, tokens=content), "all": check_equality(whole)}

    def values(name: str, layer: int, what: str) -> Tensor:
        return torch.cat([getattr(report, what) for report in on[name][layer]])

    layers = range(len(whole))
    found: dict[str, Any] = {"n": len(X)}
    for name in on:
        held = [values(name, layer, "holds") for layer in layers]
        gaps = [values(name, layer, "relative_gap")[~held[layer]] for layer in layers]
        margins = [values(name, layer, "margin") for layer in layers]
        found[name] = {
            "held": [int(one.sum()) for one in held],
            "kappa": [_quantiles(values(name, layer, "kappa")) for layer in layers],
            "margin": [_quantiles(one) for one in margins],
            "failing_gap": [short(one.median()) if len(one) else None for one in gaps],
            "near_ties": [int((one < NEAR_TIE).sum()) for one in margins],
            "averaged": {
                "holds": averaged[name].holds.tolist(),
                **{what: [short(v) for v in getattr(averaged[name], what)] for what in ("kappa", "margin")},
                "gap": [short(value) for value in averaged[name].relative_gap],
            },
        }
    found["attention"] = [[[short(entry) for entry in row] for row in matrix] for matrix in whole]
    found["pairs"] = []
    for layer in layers:
        codes = values("features", layer, "pair") @ torch.tensor([features, 1])
        code, count = codes.unique(return_counts=True)
        common = count.sort(descending=True, stable=True).indices[:10]
        found["pairs"].append([[int(code[k]) // features, int(code[k]) % features, int(count[k])] for k in common])
    return found


def _quantiles(values: Tensor) -> list[float]:
    """5%, median and 95%."""
    return [short(value) for value in values.quantile(values.new_tensor([0.05, 0.5, 0.95]))]


def evaluate(table: Table, folder: str | Path, seeds: Sequence[int], untrained: int = 20) -> dict[str, Any]:
    """What a row of the paper's Table 3 needs, from runs that :func:`train` has finished, and the null beside it.

    The condition is counted on the first 4000 rows of the test part, in the order of the split (all, if there are
    fewer); the paper's rule is not known. The null is the same count on models that were never trained, seeded from
    `UNTRAINED_SEED` on, each with its own preparation of the table, as training has. For comparison the trained models
    are also measured on all test rows.

    :param folder: with one folder ``seed_...`` a run.
    :param untrained: how many models the null has.
    :return: for JSON; its ``digest`` is the sha256 of the rest.
    :raises TrainingError: a run that is not finished, is of another table or has one block; runs that differ in more
        than the seed.
    """
    started, clock = provenance.now(), time.monotonic()
    runs = []
    for seed in seeds:
        one = Path(folder) / f"seed_{seed}"
        record = read_record(one / "record.json")
        if record["settings"]["blocks"] == 1:
            raise TrainingError("a model of one block queries cls alone: no attention to measure; train two blocks")
        whole = prepare(table, seed).X["test"]
        X = whole[:ROWS_MEASURED]
        through = []
        for path in sorted(one.glob("epoch_*.safetensors")):
            epoch = load_tensors(path)[1]["epoch"]
            found = measure_rows(load_trained(table, path), X)
            through.append({"epoch": epoch, "validation": record["history"]["val"][epoch - 1] if epoch else None})
            through[-1] |= _brief(found)
        model = load_trained(table, one / "best.safetensors")
        runs.append(record | {"attention": measure_rows(model, X), "through_training": through})
        runs[-1]["attention_all_test_rows"] = _brief(measure_rows(model, whole))
    if not runs:
        raise TrainingError("there are no seeds; pass those of finished runs")
    shared = {key: value for key, value in runs[0]["settings"].items() if key != "seed"}
    for record in runs:
        check_same(shared, {key: value for key, value in record["settings"].items() if key != "seed"}, Path(folder))
    null = []
    for seed in range(UNTRAINED_SEED, UNTRAINED_SEED + untrained):
        model = build(table, shared["blocks"], seed).eval()
        null.append({"seed": seed} | _brief(measure_rows(model, prepare(table, seed).X["test"][:ROWS_MEASURED])))
    record = {
        "schema": SCHEMA,
        "provenance": {
            "settings": shared,
            "versions": provenance.versions(PACKAGES),
            "machine": provenance.machine(),
            "commit": provenance.git_commit(Path(__file__).parent),
            "started": started,
            "seconds": round(time.monotonic() - clock, 1),
        },
        "table": table.name,
        "features": list(table.features),
        "rows_measured": f"the first {len(X)} of the {len(table.y['test'])} test rows, in the order of the split",
        "baselines": baselines(table),
        "runs": runs,
        "untrained": null,
    }
    return with_digest(record)


def _brief(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of :func:`measure_rows`, what is kept of a model among many: counts, and medians of kappa and margin."""
    brief: dict[str, Any] = {"n": found["n"]}
    for name in ("features", "all"):
        brief[name] = {"held": found[name]["held"], "averaged": found[name]["averaged"]["holds"]}
        brief[name] |= {what: [quantiles[1] for quantiles in found[name][what]] for what in ("kappa", "margin")}
    return brief


def against_null(record: Mapping[str, Any]) -> pd.DataFrame:
    """Trained against untrained models, layer by layer, printable text: like with like, the same tokens and rows.

    :param record: what :func:`evaluate` returned.
    :return: as :func:`dobnb.untrained.against_null`, of every seed.
    """
    runs = [_brief(run["attention"]) for run in record["runs"]]
    return beside_null(runs, record["untrained"], ("features", "all"))
