"""The null: what an architecture scores before it is trained (book: ch-untrained).

A share of 100% says something of training only if random weights do not give it too. So the same measurement is made
of K draws of the architecture, with the weights that its library draws before training, seeds 0 to K - 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dobnb.files import short, write_record
from dobnb.inputs import Inputs
from dobnb.measurement import Measurement, MeasurementError, Progress, about_of, prepare
from dobnb.runs import Tell, run

SCHEMA = 1
FILE = "untrained.json"
_OF_A_DRAW = ("seed", "sha256")


def measure_untrained(
    name: str,
    inputs: Inputs,
    draws: int,
    out: str | Path,
    *,
    batch_size: int = 16,
    device: str = "cpu",
    revision: str | None = None,
    scheduler: str | None = None,
    progress: Progress | None = None,
    tell: Tell = lambda line: None,
) -> dict[str, Any]:
    """Measure `draws` untrained models of one architecture into a folder, a run of its own for each.

    The folder gets ``seed_0``, ``seed_1`` and so on, each as :func:`dobnb.runs.run` leaves it, and ``untrained.json``,
    which says the same in short. Called again after an interruption it does what is missing; called with more draws it
    adds them.

    :param name: as for :func:`dobnb.models.load_untrained`.
    :param draws: how many, at least 1; their seeds are 0 to draws - 1.
    :param out: the folder; new, empty, or that of such a run.
    :param progress: called as ``progress(done, n)``, of the inputs of all draws.
    :return: what ``untrained.json`` holds. ``untrained`` has for every draw its ``seed`` and the ``sha256`` of its
        weights; ``content`` and ``all`` with ``held`` (inputs that satisfy the condition), quantiles over inputs of
        ``kappa`` and ``margin``, ``failing_gap``, the median relative gap of the inputs that fail, None where all
        hold, ``near_ties``, and ``averaged``, the verdicts of the averaged matrices, None where there is no average;
        and ``heads`` with ``held`` and ``tested``. Each is a list by layer.
    :raises MeasurementError: as :func:`dobnb.runs.run`; draws below 1; a folder that holds anything else.
    :raises ModelError: as :func:`dobnb.models.load_untrained`.
    """
    out = Path(out)
    if draws < 1:
        raise MeasurementError(f"draws is {draws}; at least one untrained model is needed")
    check_folder(out)
    n, found = len(inputs), []
    for seed in range(draws):
        job = prepare(
            name, inputs, batch_size=batch_size, device=device, revision=revision, untrained=seed,
            load_on="cpu" if scheduler else None,
        )  # fmt: skip
        counted = None if progress is None else _counted(progress, seed * n, draws * n)
        one = run(job, out / f"seed_{seed}", scheduler=scheduler, progress=counted, tell=tell)
        assert one is not None, "a run of all blocks ends in a measurement"
        found.append(one)
    record = null_of(name, found)
    write_record(out / FILE, record)
    return record


def _counted(progress: Progress, before: int, n: int) -> Progress:
    return lambda done, of_this_draw: progress(before + done, n)


def check_folder(out: Path) -> None:
    """Refuse a place that draws cannot be put into, before anything is loaded.

    :raises MeasurementError: a file, or a folder that holds anything but draws.
    """
    if out.exists() and not out.is_dir():
        raise MeasurementError(f"{out} is a file; pass a folder as --out, such as runs/NAME")
    there = [path.name for path in out.iterdir() if not path.name.startswith(".")] if out.exists() else []
    if other := sorted(name for name in there if name != FILE and not re.fullmatch(r"seed_\d+", name)):
        raise MeasurementError(f"{out} holds other files, such as {other[0]}; pass a new folder as --out")


def null_of(name: str, draws: Sequence[Measurement]) -> dict[str, Any]:
    """The record of some draws, see :func:`measure_untrained`.

    :param name: of the model.
    :param draws: measurements of untrained models of that name, see :func:`dobnb.measurement.measure`.
    :raises MeasurementError: there are none, or one is of a trained model.
    """
    if not draws or any("seed" not in one.provenance["model"] for one in draws):
        raise MeasurementError("a null is made of untrained models; measure some with untrained=0, 1, ...")
    born = [one.provenance for one in draws]
    model = {key: value for key, value in born[0]["model"].items() if key not in _OF_A_DRAW}
    machines = {json.dumps(machine, sort_keys=True) for one in born for machine in one["machines"]}
    commits = sorted({commit for one in born for commit in (one["commit"] or "").split(", ")} - {""})
    return {
        "schema": SCHEMA,
        "provenance": {
            **about_of(born[0]),
            "model": model | {"name": name, "title": model["title"].partition(", untrained")[0]},
            "machines": [json.loads(one) for one in sorted(machines)],
            "commit": ", ".join(commits) or None,
            "started": min(one["started"] for one in born),
            "seconds": round(sum(one["seconds"] for one in born), 1),
        },
        "layers": draws[0].layers,
        "n": draws[0].n[0],
        "untrained": [_draw(one) for one in draws],
    }


def _draw(found: Measurement) -> dict[str, Any]:
    draw: dict[str, Any] = {key: found.provenance["model"][key] for key in _OF_A_DRAW}
    for kind in ("content", "all"):
        draw[kind] = {
            "held": found.per_input[kind],
            **{what: _quantiles(found.per_input[f"{kind}_{what}"]) for what in ("kappa", "margin")},
            "failing_gap": [
                short(np.median(gaps)) if gaps else None for gaps in found.per_input[f"{kind}_failing_gaps"]
            ],
            "near_ties": found.per_input[f"{kind}_near_ties"],
            "averaged": found.averaged.get(kind),
        }
    if found.heads:
        draw["heads"] = {"held": found.heads["content"], "tested": found.heads["tested"]}
    return draw


def _quantiles(of: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: [short(value) for value in values] for name, values in of.items()}


def read_null(path: str | Path) -> dict[str, Any]:
    """Read what :func:`measure_untrained` wrote.

    :param path: the JSON file, or the folder that it is in.
    :raises MeasurementError: no such file, not JSON, another schema, or lists that do not have one entry a layer.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MeasurementError(f"{path} does not exist; `dobnb measure NAME --untrained K` writes one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise MeasurementError(f"{path.name} is not a readable JSON file: {error}") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise MeasurementError(f"{path.name} is not a null of schema {SCHEMA}; measure again to write one")
    try:
        whole = _is_whole(record)
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise MeasurementError(f"{path.name} is damaged: its lists do not have one entry a layer; measure again")
    return record


def _is_whole(record: Mapping[str, Any]) -> bool:
    layers, n, draws, born = record["layers"], record["n"], record["untrained"], record["provenance"]
    lists = []
    for draw in draws:
        for kind in ("content", "all"):
            lists += [draw[kind]["held"], draw[kind]["near_ties"]]
            lists += [draw[kind][what][q] for what in ("kappa", "margin") for q in ("q05", "median", "q95")]
        if "heads" in draw:
            lists += [draw["heads"]["held"], draw["heads"]["tested"]]
    numbers = all(isinstance(value, int | float) for values in lists for value in values)
    named = isinstance(born["model"]["title"], str) and isinstance(born["inputs"]["name"], str)
    return named and layers > 0 and n > 0 and len(draws) > 0 and all(len(one) == layers for one in lists) and numbers


# Beside trained models ----------------------------------------------------------------------------------------------

Brief = Mapping[str, Any]
"""Of one model: ``n``, and by token set ``held``, ``kappa`` and ``margin``, lists by layer; medians over inputs."""


def in_brief(found: Measurement | Mapping[str, Any]) -> list[Brief]:
    """A measurement, or the draws of a null, as :func:`against_null` takes them."""
    if isinstance(found, Measurement):
        of = found.per_input
        one = {
            kind: {"held": of[kind], **{what: of[f"{kind}_{what}"]["median"] for what in ("kappa", "margin")}}
            for kind in ("content", "all")
        }
        return [{"n": found.n[0], **one}]
    return [
        {"n": found["n"]}
        | {
            kind: {"held": draw[kind]["held"], **{what: draw[kind][what]["median"] for what in ("kappa", "margin")}}
            for kind in ("content", "all")
        }
        for draw in found["untrained"]
    ]


def against_null(trained: Sequence[Brief], null: Sequence[Brief], kinds: Sequence[str]) -> pd.DataFrame:
    """Trained beside untrained models, layer by layer, printable text: like with like, the same tokens.

    :param trained: of one architecture, one or several; see :func:`in_brief`.
    :param null: untrained ones, better many.
    :param kinds: the token sets.
    :return: one row a token set and layer, and one for all layers. Shares are in per cent: of every trained model, and
        of the untrained ones the mean, the standard deviation and the range over models. kappa and margin are medians
        over inputs, and then over models, in brackets those of the untrained.
    """
    rows = []
    for kind in kinds:
        shares, null_shares = (
            np.array([np.divide(model[kind]["held"], model["n"]) for model in models]) * 100
            for models in (trained, null)
        )
        layers = null_shares.shape[1]
        for layer in (*range(layers), None):
            which = slice(None) if layer is None else slice(layer, layer + 1)
            ours, theirs = shares[:, which].mean(1), null_shares[:, which].mean(1)
            row = {
                "tokens": kind,
                "layer": "all" if layer is None else str(layer + 1),
                "trained, %": ", ".join(f"{share:.1f}" for share in ours),
                "untrained, %": mean_and_deviation(theirs),
                "range": f"{theirs.min():.1f} to {theirs.max():.1f}",
            }
            for what in ("kappa", "margin"):
                medians = [
                    f"{np.median([model[kind][what][layer] for model in models]):.2g}" if layer is not None else ""
                    for models in (trained, null)
                ]
                row[f"{what} (untrained)"] = "{} ({})".format(*medians) if layer is not None else ""
            rows.append(row)
    return pd.DataFrame(rows).set_index(["tokens", "layer"])


def mean_and_deviation(shares: Any) -> str:
    """Mean and standard deviation over models; of one model, its share."""
    shares = np.asarray(shares)
    if shares.size == 1:
        return f"{shares.mean():.1f}"
    return f"{shares.mean():.1f} \N{PLUS-MINUS SIGN} {shares.std(ddof=1):.1f}"


def null_table(nulls: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row a null, printable text: shares in per cent over all layers, mean and standard deviation over draws.

    kappa and margin are medians over inputs and draws, the smallest and the largest layer, on content tokens.

    :param nulls: see :func:`measure_untrained`.
    """
    rows = []
    for null in nulls:
        row = {"architecture": null["provenance"]["model"]["title"], "draws": len(null["untrained"]), "n": null["n"]}
        models = in_brief(null)
        for kind, column in (("content", "content"), ("all", "all tokens")):
            shares = [100 * np.mean(model[kind]["held"]) / model["n"] for model in models]
            row[column] = mean_and_deviation(shares)
        heads = [100 * sum(draw["heads"]["held"]) / sum(draw["heads"]["tested"]) for draw in null["untrained"]]
        row["heads"] = mean_and_deviation(heads)
        for what, form in (("kappa", ".3f"), ("margin", ".0e")):
            by_layer = np.median([model["content"][what] for model in models], 0)
            row[f"{what} by layer"] = f"{by_layer.min():{form}} to {by_layer.max():{form}}"
        rows.append(row)
    return pd.DataFrame(rows).set_index("architecture")
