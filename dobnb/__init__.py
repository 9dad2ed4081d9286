"""dobnb: when is the Dobrushin bound on attention rollout tight? The package behind the book."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Where each public name lives. They load on first use, so that rendering the book imports no torch.
_HOME = {
    "MODELS": "models",
    "EqualityReport": "equality",
    "ExactReport": "exact",
    "Measurement": "measurement",
    "check_equality": "equality",
    "depth_bounds": "depth",
    "dobrushin_coefficient": "dobrushin",
    "doeblin_bound": "dobrushin",
    "exact_equality": "exact",
    "leave_one_out": "dobrushin",
    "load_model": "models",
    "measure": "measurement",
    "random_stochastic": "random_matrices",
    "restrict": "stochastic",
    "rollout": "stochastic",
    "rollout_factor": "stochastic",
    "stream_attention": "capture",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"dobnb.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dobnb' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
