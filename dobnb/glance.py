"""The book at a glance: every system of the paper beside what this edition measured, as one table and one figure.

Everything is read from the records in ``results/`` and from :mod:`dobnb.published`, when the pages are rendered. It
imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dobnb.published import ABSTRACT, RANDOM_PERCENT, TABLE_1, TABLE_3, TABLE_4
from dobnb.wording import day, percent


@dataclass(frozen=True)
class Result:
    """What one record says of one system."""

    title: str
    family: str
    """Which of the paper's systems it stands beside, see :data:`FAMILY`."""
    weights: str
    """Where the weights come from, in words."""
    inputs: str
    n: int
    """Inputs, or rows; of each model where there are several."""
    started: str
    record: str
    """Name of the file in ``results/``."""
    depth: tuple[float, ...]
    """Of each tested layer, its number over the number of layers."""
    content: tuple[int, ...]
    """Inputs that satisfy the condition on content tokens, by layer, over all models."""
    all: tuple[int, ...]
    """The same on all tokens."""
    tested: int
    """Inputs by layer, over all models."""
    beside: str = ""
    """How it stands to the paper's systems, where it is none of them."""

    def share(self, tokens: str) -> float:
        """Input-layer pairs that satisfy the condition on ``content`` or ``all`` tokens, in per cent."""
        return 100 * sum(getattr(self, tokens)) / (self.tested * len(self.depth))

    def written(self, tokens: str) -> str:
        """:meth:`share` as the paper prints it."""
        return percent(sum(getattr(self, tokens)), self.tested * len(self.depth))


FAMILY = {
    **{name: "DINOv2" if name.startswith("DINOv2") else "supervised vision" for name in (*TABLE_1, "ViT-B/16")},
    "RoBERTa": "language",
    "DistilBERT": "language",
}
"""The family of each of the paper's pretrained models; a measurement of another model stands in for its family."""
STANDS_IN = {"dinov2-small-saliency": "DINOv2", "minilm-l6": "language"}
"""The family that an embedded model stands in for."""
TITLES = {"california": "California", "higgs": "Higgs", "higgs_sample": "Higgs, a part of its rows"}
"""What a reader calls a table; others go by their own names."""


def results(folder: Path) -> list[Result]:
    """What the records in `folder` say, of the kinds known here; runs at other input sizes are left to their chapter.

    A measurement's file is called ``MODEL_INPUTS.json``; one at another size has a third part.
    """
    found: list[Result] = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        match record:
            case {"per_input": _, "provenance": _} if path.stem.count("_") == 1:
                found += _of_measurement(path, record)
            case {"table": _, "runs": [*_], "provenance": _}:
                found.append(_of_tables(path, record))
            case {"runs": [{"through_training": _, "settings": {"objective": _}}, *_], "provenance": _}:
                found += _of_digits(path, record)
    return found


def _of_measurement(path: Path, record: Mapping[str, Any]) -> Iterator[Result]:
    model, inputs = record["provenance"]["model"], record["provenance"]["inputs"]
    family = FAMILY.get(model["title"]) or STANDS_IN.get(model["name"])
    if family is None or "seed" in model:
        return
    layers, per_input = record["layers"], record["per_input"]
    yield Result(
        model["title"], family, f"`{model['source']}`", inputs["name"], record["n"][0], record["provenance"]["started"],
        path.name, _depth(layers, layers), tuple(per_input["content"]), tuple(per_input["all"]), record["n"][0],
    )  # fmt: skip


def _of_tables(path: Path, record: Mapping[str, Any]) -> Result:
    attention = [run["attention"] for run in record["runs"]]
    blocks, features = record["provenance"]["settings"]["blocks"], attention[0]["features"]["held"]
    table = TITLES.get(record["table"], record["table"])
    name = f"{table}, {blocks} blocks"
    known = TABLE_3.get((record["table"], blocks))
    return Result(
        f"FT-Transformer, {known.configuration if known else name}",
        f"FT-T {record['table']} {blocks}", _trained(len(attention)), f"test rows of {table}",
        attention[0]["n"], record["provenance"]["started"], path.name, _depth(len(features), blocks),
        _sum(one["features"]["held"] for one in attention), _sum(one["all"]["held"] for one in attention),
        sum(one["n"] for one in attention),
    )  # fmt: skip


def _of_digits(path: Path, record: Mapping[str, Any]) -> Iterator[Result]:
    for objective in dict.fromkeys(run["settings"]["objective"] for run in record["runs"]):
        last = [run["through_training"][-1] for run in record["runs"] if run["settings"]["objective"] == objective]
        layers = len(last[0]["content"]["held"])
        yield Result(
            f"small ViT, {objective}", "supervised vision", _trained(len(last)), "test images of handwritten digits",
            last[0]["n"], record["provenance"]["started"], path.name, _depth(layers, layers),
            _sum(one["content"]["held"] for one in last), _sum(one["all"]["held"] for one in last),
            sum(one["n"] for one in last), "" if objective == "labels" else "the same network without labels",
        )  # fmt: skip


def _trained(seeds: int) -> str:
    return f"trained here, {seeds} seed{'s' if seeds > 1 else ''}"


def _depth(layers: int, of: int) -> tuple[float, ...]:
    return tuple((layer + 1) / of for layer in range(layers))


def _sum(lists: Iterator[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*lists, strict=True)))


def random_shares(folder: Path) -> dict[int, float]:
    """The recorded share of uniformly random matrices that satisfy the condition, in per cent, by number of tokens."""
    path = folder / "random_baseline.json"
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {row["n"]: 100 * row["held"] / row["drawn"] for row in rows}


# The table


def table(folder: Path) -> str:
    """The table, Markdown: a row for each system of the paper and for each measurement that stands in for a family.

    Shares are on content tokens, then on all tokens. Those of other weights than the paper's are compared with nothing.

    :param folder: the records.
    """
    found = results(folder)
    rows = ["| system | the paper | this edition | measured on | compared |", "|---|---|---|---|---|"]
    for family in dict.fromkeys(FAMILY.values()):
        names = [name for name, of in FAMILY.items() if of == family]
        for name in names:
            row = TABLE_1.get(name)
            said = (percent(row.content_held, row.content_tested), f"{row.all_percent}%") if row else (ABSTRACT[name],)
            rows += _rows(name, said, [one for one in found if one.title == name])
        others = [one for one in found if one.family == family and one.title not in names]
        rows += [_stand_in(one, one.beside or f"stands in for {family}") for one in others]
    for (data, blocks), row in TABLE_3.items():
        ours = [one for one in found if one.family == f"FT-T {data} {blocks}"]
        said = (f"{row.features_percent}%", f"{row.all_percent}%")
        rows += _rows(f"FT-Transformer, {row.configuration}", said, ours)
        others = [one for one in found if re.fullmatch(rf"FT-T {data}_\w+ {blocks}", one.family)]
        rows += [_stand_in(one, f"stands in for {row.configuration}; a part of its training rows") for one in others]
    return "\n".join([*rows, *_random_row(random_shares(folder))])


def _stand_in(one: Result, compared: str) -> str:
    return f"| *{one.title}* | | {_shares(one)} | {_measured(one)} | {compared} |"


def _rows(name: str, said: tuple[str, ...], ours: Sequence[Result]) -> Iterator[str]:
    """Rows of a system of the paper, whose own weights or training `ours` are of."""
    if not ours:
        yield f"| {name} | {', '.join(said)} | not measured | | |"
    for one in ours:
        pairs = zip(("content", "all"), said, strict=False)
        points = [one.share(tokens) - float(theirs[:-1]) for tokens, theirs in pairs if theirs.endswith("%")]
        compared = f"{', '.join(f'{difference:+.1f}' for difference in points)} points" if points else ""
        yield f"| {name} | {', '.join(said)} | {_shares(one)} | {_measured(one)} | {compared} |"


def _shares(one: Result) -> str:
    return f"{one.written('content')}, {one.written('all')}"


def _measured(one: Result) -> str:
    """On what, when, and where the record is."""
    inputs = one.inputs if one.inputs.startswith(f"{one.n} ") else f"{one.n} {one.inputs}"
    return f"{one.weights}; {inputs}; {day(one.started)}; {{download}}`record <../results/{one.record}>`"


def _random_row(shares: Mapping[int, float]) -> Iterator[str]:
    low, high = RANDOM_PERCENT
    if not shares:
        yield f"| uniformly random matrices | {low}-{high}% | not measured | | |"
        return
    sizes = sorted(shares)
    inside = [low <= shares[n] <= high for n in sizes]
    first = next((n for k, n in enumerate(sizes) if all(inside[k:])), None)
    compared = f"inside from {first} tokens on" if first else "outside"
    if sizes[0] == 2:
        compared += "; exactly 1/2 for 2 tokens ({prf:ref}`prop-share-bounds`)"
    ours = f"{shares[sizes[0]]:.1f}% ({sizes[0]} tokens) to {shares[sizes[-1]]:.1f}% ({sizes[-1]})"
    on = "see {doc}`06_random_baseline`; {download}`record <../results/random_baseline.json>`"
    yield f"| uniformly random matrices | {low}-{high}% | {ours} | {on} | {compared} |"


def unmeasured(folder: Path) -> list[str]:
    """The paper's systems that this edition has not measured with the weights, or the training, that they name."""
    found = results(folder)
    models = [name for name in FAMILY if not any(one.title == name for one in found)]
    tables = [
        f"FT-Transformer, {row.configuration}"
        for (data, blocks), row in TABLE_3.items()
        if not any(one.family == f"FT-T {data} {blocks}" for one in found)
    ]
    return models + tables


# The figure


def curves(folder: Path) -> tuple[dict[str, list[tuple[Sequence[float], Sequence[float]]]], dict[str, Any]]:
    """What the figure shows: label -> curves of (relative depth, share in per cent), first the paper's, then ours."""
    paper: dict[str, list[tuple[Sequence[float], Sequence[float]]]] = {}
    for name, failing in TABLE_4.items():
        layers, inputs = TABLE_1[name].layers, TABLE_1[name].content_tested // TABLE_1[name].layers
        shares = [100 * (1 - failing.get(layer + 1, 0) / inputs) for layer in range(layers)]
        label = "DINOv2, four models" if name.startswith("DINOv2") else name
        paper.setdefault(label, []).append((_depth(layers, layers), shares))
    ours = {one.title: [(one.depth, [100 * held / one.tested for held in one.content])] for one in results(folder)}
    return paper, ours


def figure(folder: Path) -> Figure:
    """Share of inputs that satisfy the condition on content tokens against relative depth, and the random baseline.

    Hollow and dotted: the paper's, as far as its Table 4 gives them. Full: ours. The band holds uniformly random
    matrices of at least nine tokens.

    :param folder: the records.
    """
    import matplotlib.pyplot as plt

    from dobnb.style import COLORS, LINES, MARKERS, WIDTH, legend_above, style

    paper, ours = curves(folder)
    band = [share for n, share in random_shares(folder).items() if n >= 9]
    with style():
        figure, axes = plt.subplots(figsize=(WIDTH, 3.6 + 0.21 * (1 + len(paper) + len(ours))))
        if band:
            axes.axhspan(min(band), max(band), color="0.75", linewidth=0, label="random matrices")
        for k, (label, lines) in enumerate(paper.items()):
            look = {"color": "0.35", "linestyle": ":", "marker": MARKERS[k], "markerfacecolor": "white"}
            for number, (depth, shares) in enumerate(lines):
                axes.plot(depth, shares, **look, label=f"{label} (paper)" if number == 0 else None)
        for k, (label, lines) in enumerate(ours.items()):
            look = {"color": COLORS[k], "linestyle": LINES[k % len(LINES)], "marker": MARKERS[k % len(MARKERS)]}
            for depth, shares in lines:
                axes.plot(depth, shares, **look, label=_short(label))
        axes.set_ylim(-4, 104)
        axes.set_xlim(0, 1.03)
        axes.set_xlabel("relative depth, layer / number of layers")
        axes.set_ylabel("inputs that satisfy the condition, %")
        legend_above(figure, axes.get_legend_handles_labels()[0], columns=1)
    return figure


def _short(label: str) -> str:
    return label if len(label) <= 42 else label.replace(", adapted for saliency", ", adapted")


def description(folder: Path) -> str:
    """The figure in words, for those who cannot see it."""
    paper, ours = curves(folder)
    said = []
    for label, lines in {**{f"{label} of the paper": lines for label, lines in paper.items()}, **ours}.items():
        shares = [share for _, one in lines for share in one]
        low, high = (f"{value:.0f}" for value in (min(shares), max(shares)))
        said.append(f"{label}, {low} to {high} per cent" if low != high else f"{label}, {low} per cent")
    band = [share for n, share in random_shares(folder).items() if n >= 9]
    if band:
        said.append(f"random matrices, {np.min(band):.0f} to {np.max(band):.0f} per cent")
    return f"Share of inputs that satisfy the condition over relative depth. {'; '.join(said)}."
