"""The one look of every figure of the book. It imports no torch.

Figures are narrow enough for a phone, opaque white so that dark pages read, and tell their series apart by marker, line
style or hatch as well as by a colour-blind palette.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.figure import Figure

WIDTH = 4.8
"""Width of every figure, in inches: at 11 points the lettering stays readable when a phone shrinks it to 340 px."""

COLORS = sns.color_palette("colorblind").as_hex()
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", "-.", ":")
HATCHES = ("///", "...", "xxx", "\\\\\\")


@contextmanager
def style() -> Iterator[None]:
    """The one style of the book; figures made inside are closed on leaving, so pyplot holds no state."""
    before = set(plt.get_fignums())
    settings = {
        "figure.facecolor": "white",
        "figure.dpi": 160,
        "figure.constrained_layout.use": True,
        "axes.facecolor": "white",
        "axes.edgecolor": "0.3",
        "axes.titlesize": 11,
        "axes.labelsize": 11,
        "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine draws the same letters
        "font.size": 11,
        "grid.color": "0.88",
        "hatch.linewidth": 0.8,
        "legend.fontsize": 10,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 6,
        "xtick.labelsize": 10,
        "ytick.labelsize": 10,
    }
    try:
        with plt.rc_context():
            sns.set_theme(style="whitegrid", palette="colorblind", rc=settings)
            yield
    finally:
        for number in set(plt.get_fignums()) - before:
            plt.close(number)


def legend_above(figure: Figure, handles: Sequence[Any], columns: int = 1) -> None:
    """One legend for the whole figure, above its panels, where it can cover no data."""
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, handletextpad=0.6, columnspacing=1.4)
