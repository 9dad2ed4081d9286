"""Counts as tables and pages print them, after the manner of the paper."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime


def percent(held: int, tested: int) -> str:
    """A share as the paper prints it: one decimal, two where one would round a failure away, none where all hold."""
    if held == tested:
        return "100%"
    share = 100 * held / tested
    return f"{share:.2f}%" if round(share, 1) == 100 else f"{share:.1f}%"


def score(value: float) -> str:
    """A leave-one-out score as the tables print it."""
    return f"{value:.3g}"


def failing_layers(failing: Mapping[int, int]) -> str:
    """Failing inputs by layer as the paper's Table 4 has them.

    >>> failing_layers({1: 7, 2: 0, 12: 512})
    'layer 1: 7; layer 12: 512'
    """
    return "; ".join(f"layer {layer}: {count}" for layer, count in failing.items() if count) or "none"


def day(when: str) -> str:
    """A moment's day as people write it.

    >>> day("2026-12-01T00:46:39Z")
    '1 December 2026'
    """
    moment = datetime.fromisoformat(when)
    return f"{moment.day} {moment:%B %Y}"
