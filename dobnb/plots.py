"""Figures of the book: one style, every figure a function of data.

Each function returns a closed :class:`matplotlib.figure.Figure`, so a notebook cell that ends with the call shows it
once. Figures are narrow enough for a phone, opaque white so that dark pages read, and tell their series apart by
marker, line style or hatch as well as by a colour-blind palette. In figures tokens count from 1, as in the text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke

from dobnb.depth import DepthBounds, slack
from dobnb.dobrushin import attaining_pairs, pairwise_total_variation, row_pairs, total_variation
from dobnb.equality import NEAR_TIE, EqualityReport, check_equality, dominance_slack
from dobnb.exact import exact_equality
from dobnb.random_matrices import Survey, flat_pair_share, share_bounds, share_interval
from dobnb.stochastic import as_stochastic, check_alpha
from dobnb.style import COLORS, HATCHES, LINES, MARKERS, WIDTH, style
from dobnb.style import legend_above as _legend_above

if TYPE_CHECKING:
    from dobnb.measurement import Measurement

def row_overlaps(A: Any) -> Figure:
    """The two rows of every pair as bars, and in grey what they share: total variation is one minus the grey mass.

    :param A: row-stochastic, shape (N, N); meant for N = 3, one panel a pair.
    """
    rows = as_stochastic(A).numpy()
    tv = pairwise_total_variation(A).numpy()
    pairs = list(itertools.combinations(range(len(rows)), 2))
    columns = np.arange(1, len(rows) + 1)
    attains = max(tv[pair] for pair in pairs) - 1e-12
    with style():
        figure, panels = plt.subplots(len(pairs), 1, figsize=(WIDTH, 1.75 * len(pairs) + 0.6), sharex=True, sharey=True)
        for (i, j), axes in zip(pairs, np.atleast_1d(panels), strict=True):
            axes.bar(columns - 0.2, rows[i], 0.4, color="white", edgecolor=COLORS[0], hatch=HATCHES[0], linewidth=1.5)
            axes.bar(columns + 0.2, rows[j], 0.4, color="white", edgecolor=COLORS[1], hatch=HATCHES[1], linewidth=1.5)
            axes.bar(columns, np.minimum(rows[i], rows[j]), 0.8, color="0.6", edgecolor="0.3", alpha=0.85)
            note = r", which is $\kappa$" if tv[i, j] >= attains else ""
            axes.set_title(f"rows {i + 1} and {j + 1}: TV = {tv[i, j]:.2f}{note}", loc="left")
            axes.set_ylabel("probability")
            axes.grid(axis="x", visible=False)
        axes.set_xticks(columns)
        axes.set_xlabel("token attended to")
        bars = [
            Patch(facecolor="white", edgecolor=COLORS[0], hatch=HATCHES[0], label="first row"),
            Patch(facecolor="white", edgecolor=COLORS[1], hatch=HATCHES[1], label="second row"),
            Patch(facecolor="0.6", edgecolor="0.3", label="shared"),
        ]
        _legend_above(figure, bars, columns=3)
    return figure


def decay(curves: Mapping[str, Sequence[float]], xlabel: str, ylabel: str, start: int = 0) -> Figure:
    """Positive quantities that shrink step by step, on a log scale.

    :param curves: label -> one value a step; values must be positive to be seen.
    :param start: number of the first step.
    """
    with style():
        figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
        for k, (label, values) in enumerate(curves.items()):
            steps = np.arange(start, start + len(values))
            axes.plot(steps, values, color=COLORS[k], marker=MARKERS[k], linestyle=LINES[k % len(LINES)], label=label)
        axes.set_yscale("log")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        _legend_above(figure, axes.get_legend_handles_labels()[0])
    return figure


def matrices(panels: Mapping[str, Any]) -> Figure:
    """Stochastic matrices as heat maps in a grid two wide, on one colour scale: equal rows show as vertical stripes.

    :param panels: title -> matrix of shape (N, N), all of one size.
    """
    arrays = {title: as_stochastic(A).numpy() for title, A in panels.items()}
    top = max(array.max() for array in arrays.values())
    rows = -(-len(arrays) // 2)
    with style():
        figure, grid = plt.subplots(rows, 2, figsize=(WIDTH, 2.6 * rows), sharex=True, sharey=True, squeeze=False)
        figure.set_layout_engine("compressed")
        for axes in grid.flat[len(arrays) :]:
            axes.set_axis_off()
        for axes, (title, array) in zip(grid.flat, arrays.items(), strict=False):
            ends = (0.5, len(array) + 0.5)
            image = axes.imshow(array, cmap="cividis", vmin=0, vmax=top, extent=(*ends, *ends[::-1]))
            axes.set_title(title)
            axes.grid(visible=False)
            axes.set_xticks([1, len(array)])
            axes.set_yticks([1, len(array)])
        for axes in grid[-1]:
            axes.set_xlabel("input token", labelpad=-6)
        for axes in grid[:, 0]:
            axes.set_ylabel("output token", labelpad=-6)
        figure.colorbar(image, ax=grid, shrink=0.6, label="weight")
    return figure


def residual_loss(alpha: float = 0.5) -> Figure:
    """What adding the residual does to one absolute value: ``|alpha + x|`` against ``alpha + |x|`` (book: lem-scalar).

    :param alpha: weight of the residual stream, strictly between 0 and 1.
    """
    alpha = check_alpha(alpha)
    reach = 1 - alpha  # entries lie in [0, 1], so x can be no larger
    x = np.linspace(-reach, reach, 401)
    full, actual = alpha + np.abs(x), np.abs(alpha + x)
    with style():
        figure, axes = plt.subplots(figsize=(WIDTH, 3.8))
        axes.fill_between(x, actual, full, facecolor="0.9", edgecolor="0.55", hatch="///", linewidth=0, label="lost")
        axes.plot(x, actual, color=COLORS[1], label=r"$|\alpha + x|$, what the factor has")
        axes.plot(x, full, color=COLORS[0], linestyle="--", label=r"$\alpha + |x|$, what the bound counts")
        axes.axvline(0, color="0.3", linewidth=1)
        axes.text(0.03, full.max() - 0.04, "dominant,\nnothing lost", va="top")
        axes.text(-0.03, full.max() - 0.04, "not dominant", va="top", ha="right")
        axes.set_xticks([-reach, -alpha, 0, reach], [r"$\alpha-1$", r"$-\alpha$", "0", r"$1-\alpha$"])
        axes.set_yticks([0, alpha, 1], ["0", r"$\alpha$", "1"])
        axes.set_xlabel(r"$x = (1-\alpha)\,(A_{ii} - A_{ji})$")
        axes.set_xlim(-reach, reach)
        _legend_above(figure, axes.get_legend_handles_labels()[0][::-1])
    return figure


def row_differences(cases: Mapping[str, tuple[Any, tuple[int, int]]], alpha: float = 0.5) -> Figure:
    """Row i minus row j of A, scaled by ``1 - alpha``, before and after the residual is added, one panel a case.

    :param cases: title -> (row-stochastic matrix of shape (N, N), pair (i, j) counted from 0).
    :param alpha: weight of the residual stream, strictly between 0 and 1.
    """
    alpha = check_alpha(alpha)
    with style():
        figure, panels = plt.subplots(
            len(cases), 1, figsize=(WIDTH, 2.2 * len(cases) + 0.6), sharey=True, squeeze=False
        )
        for axes, (title, (A, (i, j))) in zip(panels[:, 0], cases.items(), strict=True):
            rows = as_stochastic(A).numpy()
            before = (1 - alpha) * (rows[i] - rows[j])
            after = before.copy()
            after[[i, j]] += alpha, -alpha
            tokens = np.arange(1, len(rows) + 1)
            axes.bar(tokens - 0.2, before, 0.4, color="white", edgecolor=COLORS[0], hatch=HATCHES[0], linewidth=1.5)
            axes.bar(tokens + 0.2, after, 0.4, color=COLORS[1], edgecolor=COLORS[1], linewidth=1.5)
            axes.axhline(0, color="0.3", linewidth=1)
            axes.set_title(title, loc="left")
            names = {i: f"{i + 1} = i", j: f"{j + 1} = j"}
            axes.set_xticks(tokens, [names.get(k, str(k + 1)) for k in range(len(rows))])
            axes.set_ylabel("row i minus row j")
            axes.grid(axis="x", visible=False)
        axes.set_xlabel("column")
        bars = [
            Patch(facecolor="white", edgecolor=COLORS[0], hatch=HATCHES[0], label=r"$(1-\alpha)\,A$"),
            Patch(facecolor=COLORS[1], edgecolor=COLORS[1], label=r"$\alpha I + (1-\alpha)\,A$"),
        ]
        _legend_above(figure, bars, columns=2)
    return figure


def verdict_plane(cases: Mapping[str, Any]) -> Figure:
    """Every pair of rows as a point, total variation against dominance slack: the rightmost point decides.

    The hatched region, as wide as the margin, is free of pairs (book: def-margin).

    :param cases: title -> row-stochastic matrix of shape (N, N), one panel each.
    """
    with style():
        figure, panels = plt.subplots(
            len(cases), 1, figsize=(WIDTH, 2.7 * len(cases) + 0.8), sharex=True, sharey=True, squeeze=False
        )
        limit = 0.0
        for axes, (title, A) in zip(panels[:, 0], cases.items(), strict=True):
            report = check_equality(A)
            kappa, margin, holds = report.kappa.item(), report.margin.item(), report.holds.item()
            tv = total_variation(A)
            slack = dominance_slack(A)[row_pairs(len(A))]
            for mask, marker, color, label in (
                (slack >= 0, "o", COLORS[0], "mutually self-dominant"),
                (slack < 0, "X", COLORS[1], "not self-dominant"),
            ):
                axes.scatter(tv[mask], slack[mask], s=42, marker=marker, color=color, edgecolor="white", label=label)
            attains = attaining_pairs(tv)
            axes.scatter(
                tv[attains], slack[attains], s=190, facecolor="none", edgecolor="0.1", linewidth=1.5,
                label=r"attains $\kappa$",
            )  # fmt: skip
            end = -1 if holds else 1
            edge = margin if holds else -margin
            axes.fill_betweenx(
                [edge, end], kappa - margin, kappa, facecolor="none", edgecolor="0.6", hatch="///", linewidth=0.8,
                label="free of pairs", zorder=0,
            )  # fmt: skip
            axes.axhline(0, color="0.3", linewidth=1)
            limit = max(limit, 1.1 * slack.abs().max().item())
            axes.set_title(title, loc="left")
            axes.set_ylabel("dominance slack")
        axes.set_ylim(-limit, limit)
        axes.set_xlabel("total variation of the pair's rows")
        _legend_above(figure, _handles(panels[:, 0]), columns=2)
    return figure


def _handles(panels: Sequence[Axes]) -> list[Any]:
    """Legend handles of all panels, each label once."""
    found = {label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    return list(found.values())


def photographs(images: np.ndarray, columns: int = 4) -> Figure:
    """A grid of images.

    :param images: uint8, shape (n, H, W, 3).
    """
    rows = -(-len(images) // columns)
    with style():
        figure, grid = plt.subplots(rows, columns, figsize=(WIDTH, WIDTH / columns * rows), squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for axes, image in zip(grid.flat, images, strict=False):
            axes.imshow(image)
    return figure


def pair_on_image(image: np.ndarray, A: Any, pair: tuple[int, int]) -> Figure:
    """Two patches on their image, the attention of each, and what they share: their TV is one minus that. The title
    says how many pairs attain kappa.

    :param image: uint8, shape (H, H, 3).
    :param A: row-stochastic over the patches of the image in reading order, shape (p * p, p * p).
    :param pair: the two patches, counted from 0.
    """
    says = _attains(A)
    A = as_stochastic(A).numpy()
    side = round(len(A) ** 0.5)
    size = len(image) / side
    i, j = pair
    shared = np.minimum(A[i], A[j])
    panels = (
        ("the two patches", image),
        ("i attends to", A[i].reshape(side, side)),
        ("j attends to", A[j].reshape(side, side)),
        (f"they share {shared.sum():.2f}", shared.reshape(side, side)),
    )
    top = max(A[i].max(), A[j].max())
    with style():
        figure, grid = plt.subplots(2, 2, figsize=(WIDTH, WIDTH + 0.5))
        for axes, (title, shown) in zip(grid.flat, panels, strict=True):
            extent = (0, len(image), len(image), 0)
            if shown is image:
                axes.imshow(shown, extent=extent)
            else:
                axes.imshow(shown, extent=extent, cmap="cividis", vmin=0, vmax=top)
            for k, name in ((i, "i"), (j, "j")):
                x, y = k % side * size, k // side * size
                for color, width in (("black", 3.2), ("white", 1.6)):
                    axes.add_patch(Rectangle((x, y), size, size, fill=False, edgecolor=color, linewidth=width))
                above = y > 24
                beside = (x + size / 2, y - 4 if above else y + size + 4)
                label = axes.text(*beside, name, ha="center", va="bottom" if above else "top", color="white")
                label.set_path_effects([withStroke(linewidth=3, foreground="black")])
            axes.set_title(title)
            axes.set_axis_off()
        figure.suptitle(says, fontsize=11)
    return figure


def _attains(A: Any) -> str:
    """Kappa of a matrix, and whether the pair that attains it is the only one."""
    report = check_equality(A)
    count = int(report.attaining)
    pairs = "one pair attains it" if count == 1 else f"{count} pairs attain it, tied"
    return rf"$\kappa$ = {report.kappa:.2f}, {pairs}"


def share_by_depth(measurements: Mapping[str, Measurement]) -> Figure:
    """Share of inputs that satisfy the condition against relative depth, as in the paper's Figure 1.

    Content tokens above, all tokens in the middle, single heads on content tokens below where they were measured.

    :param measurements: label -> measurement.
    """
    with_heads = any(found.heads for found in measurements.values())
    titles = ("per input, content tokens", "per input, all tokens", "single heads, content tokens")[: 2 + with_heads]
    with style():
        figure, panels = plt.subplots(
            len(titles), 1, figsize=(WIDTH, 2.1 * len(titles) + 0.5), sharex=True, sharey=True
        )
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title, loc="left")
            axes.set_ylabel("inputs, %" if "input" in title else "heads, %")
            axes.set_ylim(-4, 104)
        for k, (label, found) in enumerate(measurements.items()):
            depth = np.arange(1, found.layers + 1) / found.layers
            look = {"color": COLORS[k], "marker": MARKERS[k], "linestyle": LINES[k % len(LINES)], "label": label}
            panels[0].plot(depth, 100 * np.divide(found.per_input["content"], found.n), **look)
            panels[1].plot(depth, 100 * np.divide(found.per_input["all"], found.n), **look)
            if found.heads:
                panels[2].plot(depth, 100 * np.divide(found.heads["content"], found.heads["tested"]), **look)
        panels[-1].set_xlabel("relative depth, layer / number of layers")
        _legend_above(figure, _handles(panels))
    return figure


def kappa_and_margin(found: Measurement) -> Figure:
    """kappa and margin of the per-input matrices on content tokens, by layer: the median and the middle nine tenths."""
    layers = np.arange(1, found.layers + 1)
    with style():
        figure, panels = plt.subplots(2, 1, figsize=(WIDTH, 4.6), sharex=True)
        for axes, what, color in zip(panels, ("kappa", "margin"), COLORS[:2], strict=True):
            values = found.per_input[f"content_{what}"]
            axes.fill_between(layers, values["q05"], values["q95"], color=color, alpha=0.25, linewidth=0)
            axes.plot(layers, values["median"], color=color, marker="o")
        panels[0].set_ylabel(r"$\kappa$")
        panels[0].set_ylim(0, 1.02)
        panels[1].set_ylabel("margin")
        panels[1].set_yscale("log")
        panels[1].axhline(NEAR_TIE, color="0.3", linestyle="--", linewidth=1)
        panels[1].set_xlabel("layer")
        panels[1].xaxis.get_major_locator().set_params(integer=True)
    return figure


def doeblin_and_kappa(measurements: Mapping[str, Measurement]) -> Figure:
    """The Doeblin bound above kappa, by layer, of the averaged matrices on content tokens, as in the paper's Figure 2.
    The shaded distance is what reading the bound off single entries costs.

    :param measurements: title -> measurement with averaged matrices, one panel each.
    """
    with style():
        figure, grid = plt.subplots(
            len(measurements), 1, figsize=(WIDTH, 2.3 * len(measurements) + 0.7), sharey=True, squeeze=False
        )
        for axes, (title, found) in zip(grid[:, 0], measurements.items(), strict=True):
            layers = np.arange(1, found.layers + 1)
            bound, kappa = found.averaged["doeblin"], found.averaged["kappa"]
            axes.fill_between(layers, kappa, bound, color="0.88", label="what the bound costs")
            for values, k, label in ((bound, 1, "Doeblin bound"), (kappa, 0, r"$\kappa$")):
                axes.plot(layers, values, color=COLORS[k], marker=MARKERS[k], linestyle=LINES[k], label=label)
            axes.set_ylim(0, 1.02)
            axes.set_title(title, loc="left")
            axes.set_xticks(layers)
        axes.set_xlabel("layer")
        _legend_above(figure, _handles(grid[:, 0]), columns=2)
    return figure


ROLE_LOOKS = {
    "content": (0, "o"), "cls": (1, "s"), "register": (2, "^"), "separator": (3, "D"), "distillation": (4, "v"),
}  # fmt: skip
"""Colour and marker of the role of a token; a tie across roles is grey."""


def carrier_scores(measurements: Mapping[str, Measurement]) -> Figure:
    """The leave-one-out score of each layer's carrier by its role, log scale, as in the paper's Figure 3.

    Averaged matrices on all tokens. A hollow marker: several tokens tie, and none of them is *the* carrier. Grey: they
    are of different roles. A cross at the foot: no token has a positive score.

    :param measurements: title -> measurement with averaged matrices, one panel each.
    """
    with style():
        figure, grid = plt.subplots(
            len(measurements), 1, figsize=(WIDTH, 2.3 * len(measurements) + 0.7), sharey=True, squeeze=False
        )
        for axes, (title, found) in zip(grid[:, 0], measurements.items(), strict=True):
            axes.set_yscale("log")
            roles, averaged = found.carrier_roles(), found.averaged
            for layer, (role, tokens) in enumerate(zip(roles, averaged["carriers"], strict=True), 1):
                if not tokens:
                    foot = axes.get_xaxis_transform()
                    axes.plot(layer, 0.06, "x", color="0.3", transform=foot, label="none: pairs tie")
                    continue
                k, marker = ROLE_LOOKS.get(role[0], (5, "P")) if len(role) == 1 else (None, "X")
                color = "0.5" if k is None else COLORS[k]
                label = (role[0] if k is not None else "different roles") + (", tied" if len(tokens) > 1 else "")
                face = "white" if len(tokens) > 1 else color
                axes.plot(
                    layer, max(averaged["scores"][layer - 1]), marker, color=color, markerfacecolor=face, label=label,
                    markersize=8, markeredgewidth=1.6,
                )  # fmt: skip
            axes.set_title(title, loc="left")
            axes.set_ylim(min(1e-4, axes.get_ylim()[0]), 1)
            axes.set_ylabel("leave-one-out score")
            axes.set_xticks(range(1, found.layers + 1))
        axes.set_xlabel("layer")
        _legend_above(figure, _handles(grid[:, 0]), columns=3)
    return figure


def pair_in_text(pieces: Sequence[str], A: Any, pair: tuple[int, int]) -> Figure:
    """Two word pieces in their sentence, what each attends to, and what they share: :func:`pair_on_image` for text.

    :param pieces: N word pieces as :func:`dobnb.inputs.word_pieces` gives them.
    :param A: row-stochastic over them, shape (N, N).
    :param pair: the two pieces, counted from 0; their boxes are drawn with a solid and a dashed line.
    """
    says = _attains(A)
    A = as_stochastic(A).numpy()
    i, j = pair
    shared = np.minimum(A[i], A[j])
    panels = ((f"i, “{pieces[i].strip()}”, attends to", A[i]), (f"j, “{pieces[j].strip()}”, attends to", A[j]),
              (f"they share {shared.sum():.2f}", shared))  # fmt: skip
    letters = 50  # in a line of the figure's width
    places, line, column = [], 0, 0
    for piece in pieces:
        gap = int(piece.startswith(" ") and column > 0)
        if column + gap + len(piece.strip()) > letters:
            line, column, gap = line + 1, 0, 0
        places.append((column + gap, line))
        column += gap + len(piece.strip())
    top = max(A[i].max(), A[j].max())
    shade = plt.get_cmap("Blues")
    with style():
        figure, grid = plt.subplots(len(panels), 1, figsize=(WIDTH, 3 * (0.45 + 0.3 * (line + 1)) + 0.4))
        for axes, (title, mass) in zip(grid, panels, strict=True):
            axes.set_axis_off()
            axes.set_xlim(-0.5, letters + 0.5)
            axes.set_ylim(line + 1, -0.1)
            axes.set_title(title, loc="left")
            for k, (piece, (x, y)) in enumerate(zip(pieces, places, strict=True)):
                word, strength = piece.strip(), mass[k] / top
                box = {"edgecolor": "none", "linewidth": 0, "linestyle": "-"}
                if k in pair:
                    box = {"edgecolor": "black", "linewidth": 1.6, "linestyle": "-" if k == i else "--"}
                axes.add_patch(Rectangle((x, y + 0.08), len(word), 0.84, facecolor=shade(0.9 * strength), **box))
                color = "white" if strength > 0.6 else "black"
                look = {"fontfamily": "DejaVu Sans Mono", "fontsize": 10, "color": color}
                axes.text(x + len(word) / 2, y + 0.5, word, ha="center", va="center_baseline", **look)
        figure.suptitle(says, fontsize=11)
    return figure


def mass_by_role(shares: Mapping[str, Sequence[float]]) -> Figure:
    """How a row's mass divides among the tokens of each role, by layer, as stacked bars.

    :param shares: role -> share of the mass in each layer; a layer's shares sum to at most 1.
    """
    with style():
        figure, axes = plt.subplots(figsize=(WIDTH, 3.2))
        foot = np.zeros(len(next(iter(shares.values()))))
        layers = range(1, len(foot) + 1)
        for k, (role, values) in enumerate(shares.items()):
            look = {"facecolor": COLORS[k], "hatch": HATCHES[k % len(HATCHES)], "edgecolor": "white", "linewidth": 0}
            axes.bar(layers, 100 * np.asarray(values), bottom=100 * foot, label=role, **look)
            foot = foot + np.asarray(values)
        axes.set_ylabel("mass of a row, %")
        axes.set_xlabel("layer")
        axes.set_xticks(layers)
        axes.grid(axis="x", visible=False)
        _legend_above(figure, axes.get_legend_handles_labels()[0], columns=3)
    return figure


def share_by_size(groups: Mapping[str, Sequence[Measurement]]) -> Figure:
    """Models at several input sizes, as in the paper's Figure 4: the share of input-layer pairs that satisfy the
    condition, the median relative gap among those that fail, where at least 20 do, and kappa.

    Solid lines and full markers: content tokens. Dashed lines and hollow markers: all tokens.

    :param groups: label -> the model's measurements, by size.
    """
    with style():
        figure, panels = plt.subplots(3, 1, figsize=(WIDTH, 7.4), sharex=True)
        for k, (label, series) in enumerate(groups.items()):
            tokens = [found.provenance["model"]["content_tokens"] for found in series]
            kinds = (("content", "content", "-", COLORS[k]), ("all", "all tokens", "--", "white"))
            for kind, named, line, face in kinds:
                look = {"color": COLORS[k], "marker": MARKERS[k], "linestyle": line, "markerfacecolor": face,
                        "label": f"{label}, {named}"}  # fmt: skip
                held = [100 * sum(found.per_input[kind]) / sum(found.n) for found in series]
                gaps = [found.median_gap(kind) for found in series]
                kappa = [np.median(found.per_input[f"{kind}_kappa"]["median"]) for found in series]
                panels[0].plot(tokens, held, **look)
                panels[1].plot(tokens, [np.nan if gap is None else 100 * gap for gap in gaps], **look)
                panels[2].plot(tokens, kappa, **look)
        panels[0].set_ylabel("pairs that hold, %")
        panels[1].set_ylabel(r"median gap, % of $\kappa$/2")
        panels[1].set_ylim(bottom=0)
        panels[2].set_ylabel(r"median $\kappa$")
        panels[2].set_ylim(0, 1.02)
        panels[2].set_xscale("log", base=2)
        panels[2].xaxis.set_major_formatter("{x:.0f}")
        panels[2].set_xlabel("content tokens N")
        _legend_above(figure, _handles(panels), columns=1)
    return figure


def shared_mass(cases: Mapping[str, tuple[Any, tuple[int, int]]], alpha: float = 0.5) -> Figure:
    """What two rows share, scaled by ``1 - alpha`` and after the residual is added: the bound and its gap at a glance.

    :param cases: title -> (row-stochastic matrix of shape (N, N), pair (i, j) counted from 0), one line of panels each.
    :param alpha: weight of the residual stream, strictly between 0 and 1.
    """
    alpha = check_alpha(alpha)
    with style():
        figure, grid = plt.subplots(
            len(cases), 2, figsize=(WIDTH, 2.5 * len(cases) + 0.7), sharex="row", sharey=True, squeeze=False
        )
        for panels, (title, (A, (i, j))) in zip(grid, cases.items(), strict=True):
            scaled = (1 - alpha) * as_stochastic(A).numpy()[[i, j]]
            block = np.zeros_like(scaled)
            block[0, i] = block[1, j] = alpha
            tokens = np.arange(1, scaled.shape[1] + 1)
            for axes, added in zip(panels, (np.zeros_like(block), block), strict=True):
                for side, k in ((-0.2, 0), (0.2, 1)):
                    look = {"color": "white", "edgecolor": COLORS[k], "linewidth": 1.5}
                    axes.bar(tokens + side, scaled[k], 0.4, hatch=HATCHES[0] if k == 0 else HATCHES[1], **look)
                    put = added[k] > 0
                    axes.bar((tokens + side)[put], added[k][put], 0.4, bottom=scaled[k][put], **look)
                shared = np.min(scaled + added, axis=0)
                axes.bar(tokens, shared, 0.8, color="0.6", edgecolor="0.3", alpha=0.85)
                axes.text(0.97, 0.95, f"shared {shared.sum():.2f}", transform=axes.transAxes, ha="right", va="top")
                axes.set_xticks(tokens, [{i: f"{i + 1}=i", j: f"{j + 1}=j"}.get(k - 1, str(k)) for k in tokens])
                axes.grid(axis="x", visible=False)
            panels[0].set_title(title + "\n" + r"$(1-\alpha)\,A$", loc="left")
            panels[1].set_title("with the residual", loc="left")
            panels[0].set_ylabel("probability")
        figure.supxlabel("column", fontsize=11)
        top = max(axes.get_ylim()[1] for axes in grid.flat)
        grid[0, 0].set_ylim(0, 1.2 * top)
        bars = [
            Patch(facecolor="white", edgecolor=COLORS[0], hatch=HATCHES[0], label="row i"),
            Patch(facecolor="white", edgecolor=COLORS[1], hatch=HATCHES[1], label="row j"),
            Patch(facecolor="white", edgecolor="0.3", label="residual"),
            Patch(facecolor="0.6", edgecolor="0.3", label="shared"),
        ]
        _legend_above(figure, bars, columns=4)
    return figure


def bound_plane(A: Any) -> Figure:
    """kappa of the factor against kappa of the matrix, at alpha 1/2: matrices whose bound is tight lie on a line.

    The dashed lines enclose what is possible (book: prop-gap-bounds).

    :param A: row-stochastic, shape (n, N, N), N at least 3, one point a matrix.
    """
    report = check_equality(A)
    kappa, factor, holds = (field.numpy() for field in (report.kappa, report.factor_kappa, report.holds))
    x = np.linspace(0, 1, 101)
    with style():
        figure, axes = plt.subplots(figsize=(WIDTH, 4.4))
        possible = np.maximum((1 - x) / 2, x / 2)
        axes.fill_between(x, possible, (1 + x) / 2, color="0.93", linewidth=0)
        axes.plot(x, (1 + x) / 2, color="0.2", label=r"bound $(1 + \kappa)/2$")
        axes.plot(x, (1 - x) / 2, color="0.2", linestyle="--", label=r"least for $N = 2$: $(1 - \kappa)/2$")
        axes.plot(x, x / 2, color="0.2", linestyle=":", label=r"for $N \geq 3$ also at least $\kappa/2$")
        for mask, marker, color, label in (
            (holds, "o", COLORS[0], "tight"),
            (~holds, "X", COLORS[1], "not tight"),
        ):
            axes.scatter(kappa[mask], factor[mask], s=26, marker=marker, color=color, edgecolor="white", linewidth=0.4,
                         label=label, zorder=3)  # fmt: skip
        axes.set_xlim(0, 1.02)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel(r"$\kappa(A)$")
        axes.set_ylabel(r"$\kappa\,((I + A)/2)$")
        _legend_above(figure, axes.get_legend_handles_labels()[0], columns=2)
    return figure


def gap_by_alpha(cases: Mapping[str, Any]) -> Figure:
    """The gap of the layerwise bound against the weight of the residual (book: prop-gap-alpha).

    :param cases: label -> row-stochastic matrix of shape (N, N).
    """
    alphas = np.linspace(0, 1, 121)[1:-1]
    with style():
        figure, axes = plt.subplots(figsize=(WIDTH, 3.8))
        axes.axvline(0.5, color="0.6", linewidth=1)
        for k, (label, A) in enumerate(cases.items()):
            gaps = [0.0, *(check_equality(A, alpha).gap.item() for alpha in alphas), 0.0]
            axes.plot([0, *alphas, 1], gaps, color=COLORS[k], linestyle=LINES[k % len(LINES)], marker=MARKERS[k],
                      markevery=(6 + 5 * k, 24), label=label)  # fmt: skip
        axes.set_xlabel(r"weight of the residual, $\alpha$")
        axes.set_ylabel("gap")
        axes.set_xlim(0, 1)
        _legend_above(figure, axes.get_legend_handles_labels()[0], columns=2)
    return figure


def small_matrices(cases: Mapping[str, Any]) -> Figure:
    """Matrices of fractions with the two comparisons that decide marked: own entry of i and j against the other's.

    Per matrix the pair is the one that the verdict rests on; tokens count from 1.

    :param cases: title -> row-stochastic matrix of fractions, shape (N, N).
    """
    rows = -(-len(cases) // 2)
    with style():
        figure, grid = plt.subplots(rows, 2, figsize=(WIDTH, 2.85 * rows + 0.8), squeeze=False)
        figure.get_layout_engine().set(h_pad=0.1)
        for axes in grid.flat[len(cases) :]:
            axes.set_axis_off()
        for axes, (title, A) in zip(grid.flat, cases.items(), strict=False):
            report = exact_equality(A)
            A, N = np.array(A, dtype=object), len(A)
            axes.imshow(A.astype(float), cmap="Greys", vmin=0, vmax=2.2, extent=(0.5, N + 0.5, N + 0.5, 0.5))
            for (row, column), entry in np.ndenumerate(A):
                axes.text(column + 1, row + 1, str(entry), ha="center", va="center", fontsize=10 if N < 4 else 9)
            for own, other in (report.pair, report.pair[::-1]):
                larger = A[other, own] > A[own, own]
                for row, color, line in ((own, COLORS[0], "-"), (other, COLORS[1] if larger else "0.35", "--")):
                    cell = (own + 0.56, row + 0.56)
                    hatch = HATCHES[0] if larger and row == other else None
                    axes.add_patch(Rectangle(cell, 0.88, 0.88, fill=False, edgecolor=color, linewidth=2, linestyle=line,
                                             hatch=hatch))  # fmt: skip
            verdict = "tight" if report.holds else f"gap {report.gap}"
            axes.set_title(f"{title}\n$\\kappa$ = {report.kappa}, {verdict}", fontsize=10)
            axes.set_xticks(range(1, N + 1))
            axes.set_yticks(range(1, N + 1))
            axes.grid(visible=False)
        marks = [
            Patch(facecolor="white", edgecolor=COLORS[0], linewidth=2, label="of i and j, to itself"),
            Patch(facecolor="white", edgecolor="0.35", linewidth=2, linestyle="--", label="of the other, not larger"),
            Patch(facecolor="white", edgecolor=COLORS[1], linewidth=2, linestyle="--", hatch=HATCHES[0],
                  label="of the other, larger: fails"),
        ]  # fmt: skip
        _legend_above(figure, marks)
    return figure


def depth_curves(panels: Mapping[str, DepthBounds]) -> Figure:
    """The depth bound, the sharper product and the truth against the number of layers, one panel a case, log scale.

    Where a case has a batch, lines are geometric means over it and bands reach from the smallest to the largest.

    :param panels: title -> bounds of shape (L,) or (L, inputs).
    """
    curves = (
        ("bound", r"depth bound $\prod (1 + \kappa(A_l))/2$"),
        ("product", r"sharper product $\prod \kappa((I + A_l)/2)$"),
        ("truth", r"$\kappa$ of the rollout"),
    )
    with style():
        figure, grid = plt.subplots(
            len(panels), 1, figsize=(WIDTH, 2.2 * len(panels) + 0.9), sharex=True, sharey=True, squeeze=False
        )
        for axes, (title, found) in zip(grid[:, 0], panels.items(), strict=True):
            layers = np.arange(1, len(found.truth) + 1)
            for k, (field, label) in enumerate(curves):
                values = getattr(found, field).reshape(len(layers), -1)
                # the open marker on top leaves the one below to be seen where two curves coincide
                look = {"marker": "os^"[k], "linestyle": LINES[k], "markersize": (8, 4.5, 6)[k], "color": COLORS[k]}
                hollow = {"markerfacecolor": "white", "markeredgewidth": 1.6} if field == "bound" else {}
                axes.plot(layers, values.log().mean(1).exp(), label=label, **look, **hollow)
                axes.fill_between(layers, values.amin(1), values.amax(1), color=COLORS[k], alpha=0.2, linewidth=0)
            axes.set_yscale("log")
            axes.set_title(title, loc="left")
            axes.set_ylabel(r"$\kappa$ and bounds")
        axes.set_xlabel("number of layers")
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend_above(figure, _handles(grid[:, 0]))
    return figure


def slack_by_layer(panels: Mapping[str, DepthBounds]) -> Figure:
    """What each layer adds to the logarithm of bound over truth, split in two, one panel a case (book: eq-slack).

    Where a case has a batch, bars are means over it. A dot marks a layer whose bound is tight for the whole batch.

    :param panels: title -> bounds of shape (L,) or (L, inputs).
    """
    with style():
        figure, grid = plt.subplots(
            len(panels), 1, figsize=(WIDTH, 2.0 * len(panels) + 0.9), sharex=True, sharey=True, squeeze=False
        )
        for axes, (title, found) in zip(grid[:, 0], panels.items(), strict=True):
            layers = np.arange(1, len(found.truth) + 1)
            parts = slack(found)
            layerwise, product = (part.reshape(len(layers), -1).mean(1).numpy() for part in parts)
            axes.bar(layers, layerwise, color=COLORS[1], edgecolor=COLORS[1], label="layerwise bound")
            axes.bar(
                layers, product, bottom=layerwise, color="white", edgecolor=COLORS[0], hatch=HATCHES[0],
                linewidth=1.2, label="multiplying coefficients",
            )  # fmt: skip
            tight = found.holds.reshape(len(layers), -1).all(1).numpy()
            if tight.any():
                look = {"color": "0.1", "markersize": 5, "clip_on": False, "zorder": 3}
                axes.plot(layers[tight], np.zeros(tight.sum()), "o", label="layer tight in every case", **look)
            axes.set_title(title, loc="left")
            axes.set_ylabel("slack, nats")
            axes.grid(axis="x", visible=False)
        axes.set_xlabel("layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend_above(figure, _handles(grid[:, 0]))
    return figure


def row_signs(A: Any) -> Figure:
    """Row i minus row j of the attaining pair, column by column: where i is larger, where j is (book: lem-shuffle).

    :param A: row-stochastic, shape (N, N).
    """
    A = as_stochastic(A)
    i, j = check_equality(A).pair.tolist()
    difference = (A[i] - A[j]).numpy()
    columns = np.arange(1, len(difference) + 1)
    larger = difference >= 0
    with style():
        figure, axes = plt.subplots(figsize=(WIDTH, 2.9))
        for mask, color, hatch, label in (
            (larger, COLORS[0], HATCHES[0], f"{larger.sum()} columns: row i larger"),
            (~larger, COLORS[1], HATCHES[1], f"{(~larger).sum()} columns: row j larger"),
        ):
            axes.bar(columns[mask], difference[mask], 0.7, color="white", edgecolor=color, hatch=hatch, label=label)
        axes.axhline(0, color="0.3", linewidth=1)
        names = {i: f"{i + 1}\ni", j: f"{j + 1}\nj"}
        axes.set_xticks(columns, [names.get(k, str(k + 1)) for k in range(len(columns))])
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("column")
        axes.set_ylabel("row i minus row j")
        _legend_above(figure, axes.get_legend_handles_labels()[0])
    return figure


def random_shares(rows: Sequence[Mapping[str, Any]], paper: tuple[float, float]) -> Figure:
    """Share of random matrices that satisfy the condition against N, with what is known about it.

    :param rows: ``n`` and the fields of :class:`dobnb.random_matrices.Survey`, one mapping a size.
    :param paper: the range that the paper gives, in per cent.
    """
    n = np.array([row["n"] for row in rows])
    held = np.array([100 * row["held"] / row["drawn"] for row in rows])
    ends = 100 * np.array([share_interval(row["held"], row["drawn"]) for row in rows]).T
    low, high = 100 * np.array([share_bounds(size) for size in n]).T
    with style():
        figure, axes = plt.subplots(figsize=(WIDTH, 4.4))
        axes.fill_between(n, low, high, color="0.9", linewidth=0, label="provably between", zorder=0)
        label = f"paper: {paper[0]}-{paper[1]}%"
        axes.axhspan(*paper, facecolor="none", edgecolor=COLORS[2], hatch=HATCHES[1], linewidth=0.5, label=label)
        axes.errorbar(n, held, np.abs(ends - held), fmt="o", color=COLORS[0], capsize=3, label="verdicts, 95% interval")
        axes.plot(
            n, [100 * row["shuffled"] for row in rows], "--", color=COLORS[1], label="verdicts averaged over shuffles"
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(n[n & (n - 1) == 0], [str(size) for size in n[n & (n - 1) == 0]])
        axes.minorticks_off()
        axes.set_ylim(10, 55)
        axes.set_xlabel("number of tokens N")
        axes.set_ylabel("condition holds, %")
        _legend_above(figure, axes.get_legend_handles_labels()[0], columns=2)
    return figure


def random_excess(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """How far the share of random matrices is above one quarter, against N, both on a log scale.

    :param rows: as in :func:`random_shares`.
    """
    n = np.array([row["n"] for row in rows])
    excess = np.array([row["shuffled"] - 0.25 for row in rows])
    error = 1.96 * np.array([row["shuffled_error"] for row in rows])
    sizes = np.arange(n.min(), n.max() + 1)
    exact = [flat_pair_share(int(size)) - 0.25 for size in sizes]
    with style():
        figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
        axes.errorbar(
            n, excess, error, fmt="o", color=COLORS[1], capsize=3, label="attaining pair, measured, 95% interval"
        )
        axes.plot(sizes, exact, color=COLORS[0], label=r"fixed pair, exact: $1/(8N - 12)$")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(n[n & (n - 1) == 0], [str(size) for size in n[n & (n - 1) == 0]])
        axes.minorticks_off()
        axes.set_xlabel("number of tokens N")
        axes.set_ylabel("share minus 1/4")
        _legend_above(figure, axes.get_legend_handles_labels()[0])
    return figure


def share_by_setting(
    panels: Mapping[str, Mapping[int, Mapping[float, Survey]]],
    curves: Mapping[str, tuple[str, Callable[[float], float]]] | None = None,
) -> Figure:
    """Share of random matrices that satisfy the condition, against a parameter of their law, one panel a parameter.

    Points are verdicts with 95% intervals, open where one draw in a hundred or more has several attaining pairs.

    :param panels: parameter -> number of tokens -> value of the parameter -> what was counted. Positive values are
        drawn on a log scale.
    :param curves: parameter -> label and function of the parameter, in [0, 1], drawn as a dotted line.
    """
    with style():
        figure, grid = plt.subplots(
            len(panels), 1, figsize=(WIDTH, 2.4 * len(panels) + 0.9), sharey=True, squeeze=False
        )
        for axes, (name, sizes) in zip(grid[:, 0], panels.items(), strict=True):
            for k, (n, found) in enumerate(sizes.items()):
                values = np.array(list(found))
                held = np.array([100 * row.held / row.drawn for row in found.values()])
                ends = 100 * np.array([share_interval(row.held, row.drawn) for row in found.values()]).T
                clear = np.array([row.tied < 0.01 * row.drawn for row in found.values()])
                beside = values * 1.12**k if min(values) > 0 else values + 0.08 * k  # so that none hides another
                look = {"color": COLORS[k], "capsize": 3, "fmt": MARKERS[k]}
                for mask, fill in ((clear, COLORS[k]), (~clear, "white")):
                    label = f"N = {n}" + ("" if fill == COLORS[k] else r", ties at $\kappa = 1$")
                    error = np.abs(ends - held)[:, mask]
                    if mask.any():
                        axes.errorbar(beside[mask], held[mask], error, markerfacecolor=fill, label=label, **look)
            if min(values) > 0:
                axes.set_xscale("log")
            if curves and name in curves:
                label, curve = curves[name]
                x = np.linspace(min(values), max(values), 200)
                axes.plot(x, [100 * curve(value) for value in x], ":", color="0.2", label=label)
            axes.axhline(25, color="0.3", linewidth=1, zorder=0)
            axes.set_ylabel("condition holds, %")
            axes.set_xlabel(name)
            axes.set_ylim(-4, 104)
        _legend_above(figure, _handles(grid[:, 0]), columns=2)
    return figure


def margins_and_gaps(reports: Mapping[str, EqualityReport]) -> Figure:
    """Margins of all verdicts, and relative gaps of those that fail: the share of matrices up to each value.

    :param reports: label -> report over a batch of matrices.
    """
    with style():
        figure, panels = plt.subplots(2, 1, figsize=(WIDTH, 5.6), sharey=True)
        for k, (label, found) in enumerate(reports.items()):
            look = {"color": COLORS[k], "linestyle": LINES[k % len(LINES)], "label": label}
            panels[0].ecdf(found.margin, **look)
            panels[1].ecdf(100 * found.relative_gap[~found.holds], **look)
        panels[0].set_xlabel("margin, all verdicts")
        panels[1].set_xlabel(r"gap where the bound is not tight, % of $\kappa/2$")
        for axes in panels:
            axes.set_xscale("log")
            axes.set_ylabel("share of matrices")
        _legend_above(figure, _handles(panels), columns=len(reports))
    return figure


def speed_ratios(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """How many times longer each rival takes than the kernel, size by size, one panel a kind of matrix, log scale.

    :param rows: ``N``, ``kind`` and ``ratio`` (rival -> how many times longer), as ``benchmarks/kernel.py`` records
        them, of one number of threads.
    """
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    places = {n: place for place, n in enumerate(sorted({row["N"] for row in rows}))}
    with style():
        figure, grid = plt.subplots(
            len(kinds), 1, figsize=(WIDTH, 2.1 * len(kinds) + 1.1), sharex=True, sharey=True, squeeze=False
        )
        for axes, kind in zip(grid[:, 0], kinds, strict=True):
            of_kind = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["N"])
            for k, rival in enumerate(dict.fromkeys(name for row in of_kind for name in row["ratio"])):
                points = [(places[row["N"]], row["ratio"][rival]) for row in of_kind if rival in row["ratio"]]
                look = {"color": COLORS[k], "marker": MARKERS[k], "linestyle": LINES[k % len(LINES)], "label": rival}
                axes.plot(*zip(*points, strict=True), **look)
            axes.axhline(1, color="0.2", linewidth=1.2)
            axes.set_yscale("log")
            axes.set_title(kind, loc="left")
            axes.set_ylabel("times longer")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks(range(len(places)), [str(n) for n in places])
        axes.set_xlabel("number of tokens N")
        _legend_above(figure, _handles(grid[:, 0]), columns=2)
    return figure


def ceiling_share(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The kernel's minima with addition a second, as a share of the most that a core does, size by size.

    :param rows: ``N``, ``kind`` and ``share_of_ceiling`` in [0, 1], as for :func:`speed_ratios`.
    """
    places = {n: place for place, n in enumerate(sorted({row["N"] for row in rows}))}
    with style():
        figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
        for k, kind in enumerate(dict.fromkeys(row["kind"] for row in rows)):
            of_kind = sorted((places[row["N"]], 100 * row["share_of_ceiling"]) for row in rows if row["kind"] == kind)
            # an open marker on top leaves the one below to be seen where two curves coincide
            fill = "white" if k == 1 else COLORS[k]
            axes.plot(
                *zip(*of_kind, strict=True), color=COLORS[k], marker=MARKERS[k], linestyle=LINES[k % len(LINES)],
                markerfacecolor=fill, label=kind,
            )  # fmt: skip
        axes.set_ylim(0, 104)
        axes.set_ylabel("share of the ceiling, %")
        axes.set_xticks(range(len(places)), [str(n) for n in places])
        axes.set_xlabel("number of tokens N")
        _legend_above(figure, axes.get_legend_handles_labels()[0], columns=3)
    return figure


def training_curves(panels: Mapping[str, Mapping[str, Any]]) -> Figure:
    """The validation metric after every epoch, one line a seed, one panel a configuration; a ring marks the epoch kept.

    :param panels: title -> what :func:`dobnb.ft_transformer.evaluate` returned.
    """
    with style():
        figure, grid = plt.subplots(len(panels), 1, figsize=(WIDTH, 2.1 * len(panels) + 0.6), squeeze=False)
        for axes, (title, record) in zip(grid[:, 0], panels.items(), strict=True):
            for k, run in enumerate(record["runs"]):
                values, best = run["history"]["val"], run["best_epoch"]
                label = f"seed {run['settings']['seed']}"
                axes.plot(range(1, len(values) + 1), values, color=COLORS[k], linestyle=LINES[k], label=label)
                axes.plot(best, values[best - 1], "o", color=COLORS[k], markerfacecolor="white", markersize=8)
            axes.set_title(title, loc="left")
            axes.set_ylabel(f"validation {run['metric']}")
        axes.set_xlabel("epoch")
        _legend_above(figure, _handles(grid[:, 0]), columns=3)
    return figure


def trained_and_untrained(panels: Mapping[str, Mapping[str, Any]], tokens: str = "features") -> Figure:
    """Share of rows that satisfy the condition against the median kappa, a point a model and layer.

    Grey: untrained models. Colour: trained ones. Within a panel the layers have different markers.

    :param panels: title -> what :func:`dobnb.ft_transformer.evaluate` returned.
    :param tokens: ``features`` or ``all``.
    """
    with style():
        figure, grid = plt.subplots(
            len(panels), 1, figsize=(WIDTH, 2.6 * len(panels) + 0.9), sharex=True, sharey=True, squeeze=False
        )
        for axes, (title, record) in zip(grid[:, 0], panels.items(), strict=True):
            trained = [
                {
                    "n": run["attention"]["n"],
                    "held": run["attention"][tokens]["held"],
                    "kappa": [quantiles[1] for quantiles in run["attention"][tokens]["kappa"]],
                }
                for run in record["runs"]
            ]
            untrained = [{"n": one["n"], **one[tokens]} for one in record["untrained"]]
            for layer in range(len(trained[0]["held"])):
                looks = ((untrained, "0.6", 4, "untrained"), (trained, COLORS[1], 8, "trained"))
                for models, color, size, label in looks:
                    axes.plot(
                        [model["kappa"][layer] for model in models],
                        [100 * model["held"][layer] / model["n"] for model in models],
                        MARKERS[layer], color=color, markersize=size, markeredgecolor="0.25", markeredgewidth=0.5,
                        label=f"layer {layer + 1}, {label}",
                    )  # fmt: skip
            axes.set_xscale("log")
            axes.set_ylim(-4, 104)
            axes.set_title(title, loc="left")
            axes.set_ylabel("condition holds, %")
        axes.set_xlabel(r"median $\kappa$")
        _legend_above(figure, _handles(grid[:, 0]), columns=2)
    return figure


def beside_null(panels: Mapping[str, tuple[Measurement, Mapping[str, Any]]]) -> Figure:
    """Share of inputs that satisfy the condition, and the median kappa, by depth: trained beside untrained weights.

    On content tokens. Line and band of the untrained: the mean and the range over draws.

    :param panels: title -> a measurement of trained weights, and what :func:`dobnb.untrained.measure_untrained`
        returned for the same architecture.
    """
    with style():
        figure, grid = plt.subplots(2 * len(panels), 1, figsize=(WIDTH, 3.9 * len(panels) + 0.7), squeeze=False)
        for k, (title, (trained, null)) in enumerate(panels.items()):
            share, kappa = grid[2 * k : 2 * k + 2, 0]
            layers = np.arange(1, trained.layers + 1)
            ours = np.divide(trained.per_input["content"], trained.n)
            theirs = np.array([draw["content"]["held"] for draw in null["untrained"]]) / null["n"]
            kappas = np.array([draw["content"]["kappa"]["median"] for draw in null["untrained"]])
            curves = (
                (share, 100 * ours, 100 * theirs),
                (kappa, np.array(trained.per_input["content_kappa"]["median"]), kappas),
            )
            for axes, solid, draws in curves:
                axes.plot(layers, solid, color=COLORS[0], marker="o", label="trained")
                look = {"color": COLORS[1], "marker": "s", "linestyle": "--"}
                axes.plot(layers, draws.mean(0), label="untrained, mean over draws", **look)
                axes.fill_between(layers, draws.min(0), draws.max(0), color=COLORS[1], alpha=0.2, linewidth=0)
            share.axhline(25, color="0.3", linewidth=1, linestyle=":", label="one quarter")
            share.set_title(title, loc="left")
            share.set_ylabel("condition holds, %")
            share.set_ylim(-4, 104)
            share.set_xticklabels([])
            kappa.set_ylabel(r"median $\kappa$")
            kappa.set_yscale("log")
            kappa.set_ylim(None, 1.3)
            for axes in (share, kappa):
                axes.xaxis.get_major_locator().set_params(integer=True)
        kappa.set_xlabel("layer")
        _legend_above(figure, _handles(grid[:, 0]))
    return figure


def self_wins(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """How often a token attends to itself at least as strongly as another token attends to it, layer by layer.

    :param panels: title -> label -> one value a layer, in [0, 1].
    """
    with style():
        figure, grid = plt.subplots(
            len(panels), 1, figsize=(WIDTH, 2.2 * len(panels) + 0.7), sharey=True, squeeze=False
        )
        for axes, (title, curves) in zip(grid[:, 0], panels.items(), strict=True):
            for k, (label, values) in enumerate(curves.items()):
                look = {"color": COLORS[k], "marker": MARKERS[k], "linestyle": LINES[k % len(LINES)], "label": label}
                axes.plot(np.arange(1, len(values) + 1), 100 * np.asarray(values), **look)
            axes.axhline(50, color="0.3", linewidth=1, linestyle=":", label="one half")
            axes.set_title(title, loc="left")
            axes.set_ylabel("ordered pairs, %")
            axes.set_ylim(-4, 104)
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("layer")
        _legend_above(figure, _handles(grid[:, 0]), columns=3)
    return figure


def special_mass(panels: Mapping[str, Any]) -> Figure:
    """How much of a content token's row lies on special tokens, layer by layer: a point a head, a line for their mean.

    :param panels: title -> the mass, a tensor of shape (L, n, H), in [0, 1].
    """
    with style():
        figure, grid = plt.subplots(
            len(panels), 1, figsize=(WIDTH, 2.3 * len(panels) + 0.7), sharey=True, squeeze=False
        )
        for axes, (title, mass) in zip(grid[:, 0], panels.items(), strict=True):
            heads = 100 * mass.mean(1).numpy()
            layers = np.arange(1, len(heads) + 1)
            axes.plot(np.repeat(layers, heads.shape[1]), heads.ravel(), "x", color="0.4", label="a head")
            axes.plot(layers, heads.mean(1), color=COLORS[0], marker="o", label="mean over heads")
            axes.set_title(title, loc="left")
            axes.set_ylabel("of a row, %")
            axes.set_ylim(-4, 104)
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("layer")
        _legend_above(figure, _handles(grid[:, 0]), columns=2)
    return figure


def through_training(run: Mapping[str, Any], tokens: str = "features") -> Figure:
    """Validation metric, share of rows that satisfy the condition, and median kappa against epoch, from checkpoints.

    :param run: one of the ``runs`` of an evaluation.
    :param tokens: ``features`` or ``all``.
    """
    steps = run["through_training"]
    epochs = [step["epoch"] for step in steps]
    with style():
        figure, panels = plt.subplots(3, 1, figsize=(WIDTH, 6.4), sharex=True)
        panels[0].plot(epochs[1:], [step["validation"] for step in steps[1:]], color="0.2", marker="o")
        panels[0].set_ylabel(f"validation {run['metric']}")
        for layer in range(len(steps[0][tokens]["held"])):
            look = {"color": COLORS[layer], "marker": MARKERS[layer], "linestyle": LINES[layer % len(LINES)]}
            panels[1].plot(epochs, [100 * step[tokens]["held"][layer] / step["n"] for step in steps], **look)
            panels[2].plot(epochs, [step[tokens]["kappa"][layer] for step in steps], label=f"layer {layer + 1}", **look)
        panels[1].set_ylabel("condition holds, %")
        panels[1].set_ylim(-4, 104)
        panels[2].set_ylabel(r"median $\kappa$")
        panels[2].set_yscale("log")
        panels[2].set_xscale("symlog", linthresh=1, base=2)
        panels[2].set_xticks(epochs, [str(epoch) for epoch in epochs])
        panels[2].minorticks_off()
        panels[2].set_xlim(-0.2, 1.2 * epochs[-1])
        panels[2].set_xlabel("epoch (0: untrained)")
        _legend_above(figure, _handles(panels), columns=3)
    return figure


def objectives_by_layer(record: Mapping[str, Any]) -> Figure:
    """Share, kappa and margin by layer of models trained for two objectives: bold the mean over seeds, thin each seed;
    the grey band holds every untrained model, its dotted line is their mean.

    :param record: what :func:`dobnb.small_vit.evaluate` returned.
    """
    panels_of = (
        ("patches", "condition holds, %", "content", "held"),
        ("all tokens", "condition holds, %", "all", "held"),
        ("patches", r"median $\kappa$", "content", "kappa"),
        ("patches", "median margin", "content", "margin"),
    )

    def values(models: Sequence[Mapping[str, Any]], tokens: str, what: str) -> np.ndarray:
        """Shape (models, layers)."""
        if what == "held":
            return np.array([np.multiply(100 / model["n"], model[tokens]["held"]) for model in models])
        return np.array([[quantiles[1] for quantiles in model[tokens][what]] for model in models])

    objectives = list(dict.fromkeys(run["settings"]["objective"] for run in record["runs"]))
    with style():
        figure, panels = plt.subplots(4, 1, figsize=(WIDTH, 9.4), sharex=True)
        for axes, (title, label, tokens, what) in zip(panels, panels_of, strict=True):
            null = values(record["untrained"], tokens, what)
            layers = np.arange(1, null.shape[1] + 1)
            axes.fill_between(layers, null.min(0), null.max(0), color="0.88", linewidth=0)
            axes.plot(layers, null.mean(0), ":", color="0.35", label="untrained")
            for k, objective in enumerate(objectives):
                trained = [
                    run["through_training"][-1] for run in record["runs"] if run["settings"]["objective"] == objective
                ]
                found, look = values(trained, tokens, what), {"color": COLORS[k], "linestyle": LINES[k]}
                axes.plot(layers, found.T, **look, linewidth=0.8, alpha=0.6)
                axes.plot(layers, found.mean(0), **look, linewidth=2.6, marker=MARKERS[k], label=objective)
            axes.set_title(title, loc="left")
            axes.set_ylabel(label)
            if what == "held":
                axes.set_ylim(-4, 104)
        panels[2].set_ylim(0, 1.02)
        panels[3].set_yscale("log")
        panels[3].set_xlabel("layer")
        panels[3].xaxis.get_major_locator().set_params(integer=True)
        _legend_above(figure, _handles(panels), columns=3)
    return figure


def layers_through_training(panels: Mapping[str, Sequence[Mapping[str, Any]]], what: str = "held") -> Figure:
    """A number for every layer and epoch as a heat map, one panel a set of runs, whose mean it is.

    :param panels: title -> runs of an evaluation of :func:`dobnb.small_vit.evaluate`, all with the same epochs.
    :param what: ``held``, the share of images that satisfy the condition on patches, in per cent; ``kappa``, the median
        kappa on patches, also in hundredths.
    """
    with style():
        figure, grid = plt.subplots(len(panels), 1, figsize=(WIDTH, 2.7 * len(panels)), squeeze=False)
        for axes, (title, runs) in zip(grid[:, 0], panels.items(), strict=True):
            steps = [run["through_training"] for run in runs]
            values = np.mean([
                [
                    np.multiply(100 / step["n"], step["content"]["held"]) if what == "held"
                    else [100 * quantiles[1] for quantiles in step["content"]["kappa"]]
                    for step in one
                ]
                for one in steps
            ], 0).T  # fmt: skip
            reached = np.mean([[step["test"] for step in one] for one in steps], 0)
            axes.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto")
            for (layer, epoch), value in np.ndenumerate(values):
                color = "black" if value > 50 else "white"
                axes.text(epoch, layer, f"{value:.0f}", ha="center", va="center", color=color, fontsize=9)
            epochs = [step["epoch"] for step in steps[0]]
            names = [f"{epoch}\n{value:.2f}" for epoch, value in zip(epochs, reached, strict=True)]
            axes.set_xticks(range(len(epochs)), names)
            axes.set_yticks(range(len(values)), range(1, len(values) + 1))
            axes.grid(False)
            axes.set_ylabel("layer")
            axes.set_title(title, loc="left")
            axes.set_xlabel(f"epoch; below it, test {runs[0]['metric']}")
    return figure


def pair_members(panels: Mapping[str, np.ndarray]) -> Figure:
    """How often each place of the image is in the maximising pair, a row a set of models, a map a layer.

    :param panels: title -> counts, shape (layers, side, side); each map is divided by its largest count.
    """
    layers = len(next(iter(panels.values())))
    with style():
        figure, grid = plt.subplots(len(panels), layers, figsize=(WIDTH, 1.25 * len(panels) + 0.2), squeeze=False)
        for row, (title, counts) in zip(grid, panels.items(), strict=True):
            for layer, (axes, places) in enumerate(zip(row, counts, strict=True), 1):
                axes.imshow(places / places.max(), cmap="cividis", vmin=0, vmax=1)
                axes.set_xticks([])
                axes.set_yticks([])
                axes.grid(False)
                axes.set_xlabel(f"layer {layer}", fontsize=8)
            row[0].set_title(title, loc="left")
    return figure


def named_attention(A: Any, names: Sequence[str], title: str) -> Figure:
    """One attention matrix as a heat map with the names of its tokens.

    :param A: row-stochastic, shape (N, N).
    :param names: N names.
    """
    array = as_stochastic(A, tolerance=1e-4).numpy()
    with style():
        figure, axes = plt.subplots(figsize=(WIDTH, WIDTH))
        image = axes.imshow(array, cmap="cividis", vmin=0)
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
        axes.grid(False)
        axes.set_title(title, loc="left")
        axes.set_xlabel("token attended to")
        figure.colorbar(image, ax=axes, shrink=0.7)
    return figure
