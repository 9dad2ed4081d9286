"""How often a model's attention satisfies the equality condition, layer by layer.

Three tests, as in the paper (book: ch-dinov2). *Per input*: the mean over heads of one input's attention, on content
tokens and on all tokens. *Heads*: every head of every input, on content tokens. *Averaged*: the mean over heads and
inputs, one matrix a layer, on content tokens. Restriction comes last, and renormalises the rows.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from dobnb import provenance
from dobnb.capture import stream_attention
from dobnb.dobrushin import doeblin_bound
from dobnb.equality import NEAR_TIE, EqualityReport, check_equality
from dobnb.errors import DobnbError
from dobnb.files import write_text
from dobnb.inputs import Inputs
from dobnb.kernel import mean_of_heads
from dobnb.models import MODELS, load_model, weights_identity
from dobnb.stochastic import restrict
from dobnb.tokens import content_mask, image_token_roles

SCHEMA = 1
QUANTILES = {"q05": 0.05, "median": 0.5, "q95": 0.95}


class MeasurementError(DobnbError):
    """A measurement cannot be made, read or combined as asked."""


@dataclass(frozen=True)
class Measurement:
    """Tallies by layer: every list has one entry a layer, the first layer first. It is what the JSON file holds."""

    provenance: dict[str, Any]
    """Model and its weights, inputs and their digest, settings, versions, machine, commit, start, seconds."""
    layers: int
    n: list[int]
    """Inputs measured."""
    per_input: dict[str, Any]
    """``content`` and ``all``: inputs that satisfy the condition. For each of the two, ``_kappa`` and ``_margin``:
    quantiles over inputs; ``_failing_gaps``: relative gaps of the failures, one list a layer."""
    heads: dict[str, list[int]]
    """``content``: heads times inputs that satisfy the condition, of ``tested``. Empty if heads were not measured."""
    averaged: dict[str, list]
    """``content``: the verdict on content tokens, with ``kappa``, ``doeblin`` and ``margin`` of the same matrix.
    ``all``: the verdict on all tokens."""
    near_ties: list[int]
    """Verdicts of the layer, of all kinds, whose margin is below :data:`dobnb.equality.NEAR_TIE`."""

    def save(self, path: str | Path) -> None:
        """Write the measurement as JSON, readable without this package; the file is whole or absent."""
        text = json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2, allow_nan=False)
        text = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text)  # a list of numbers on one line
        write_text(path, text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Measurement:
        """Read what :meth:`save` wrote.

        :raises MeasurementError: no such file, not JSON, another schema, a field that is missing or unknown, or
            lists that do not have one entry a layer.
        """
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise MeasurementError(f"{path.name} does not exist; `dobnb measure` writes one") from None
        except (OSError, ValueError) as error:
            raise MeasurementError(f"{path.name} is not a readable JSON file: {error}") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise MeasurementError(f"{path.name} is not a measurement of schema {SCHEMA}; measure again to write one")
        names = {field.name for field in fields(cls)}
        if names != set(data) - {"schema"}:
            wrong = ", ".join(sorted(names ^ (set(data) - {"schema"})))
            raise MeasurementError(f"{path.name} has missing or unknown fields: {wrong}; measure again to write them")
        if not _is_whole(data):
            raise MeasurementError(f"{path.name} is damaged: its lists do not have one entry a layer; measure again")
        return cls(**{name: data[name] for name in names})


def _is_whole(data: dict[str, Any]) -> bool:
    """Whether a file's fields have the kinds and lengths that :class:`Measurement` documents."""
    layers = data["layers"]
    if not isinstance(layers, int) or layers < 1:
        return False

    def by_layer(values: Any, kind: type) -> bool:
        return isinstance(values, list) and len(values) == layers and all(isinstance(value, kind) for value in values)

    per_input, heads, averaged, born = (data[name] for name in ("per_input", "heads", "averaged", "provenance"))
    parts = (per_input, heads, averaged, born)
    if not all(isinstance(part, dict) for part in parts):
        return False
    named = [born.get("model"), born.get("inputs")]
    if not all(isinstance(part, dict) and isinstance(part.get("name"), str) for part in named):
        return False
    counts = [data["n"], data["near_ties"], per_input.get("content"), per_input.get("all"), *heads.values()]
    return (
        all(by_layer(count, int) for count in counts)
        and min(data["n"]) > 0
        and set(heads) in (set(), {"content", "tested"})
        and by_layer(averaged.get("content"), bool)
    )


def _values(reports: list[EqualityReport], what: str) -> Tensor:
    """One field of a layer's reports, end to end, in the order of the inputs."""
    return torch.cat([getattr(report, what).flatten() for report in reports]).cpu()


def _held(layers: list[list[EqualityReport]]) -> list[int]:
    return [int(_values(reports, "holds").sum()) for reports in layers]


def _summary(kind: str, layers: list[list[EqualityReport]]) -> dict[str, Any]:
    """What is kept, beside the count, of the per-input reports on content or on all tokens."""

    def quantiles(what: str) -> dict[str, list[float]]:
        values = [_values(reports, what) for reports in layers]
        return {name: [float(layer.quantile(q)) for layer in values] for name, q in QUANTILES.items()}

    gaps = [_values(reports, "relative_gap")[~_values(reports, "holds")].sort().values.tolist() for reports in layers]
    return {
        kind: _held(layers),
        f"{kind}_kappa": quantiles("kappa"),
        f"{kind}_margin": quantiles("margin"),
        f"{kind}_failing_gaps": gaps,
    }


def measure(
    model: str | torch.nn.Module,
    inputs: Inputs,
    *,
    heads: bool = True,
    batch_size: int = 16,
    device: str = "cpu",
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:
    """How often the equality condition (book: thm-equality) holds in a model's attention, as in the paper's Table 1.

    :param model: a name of :data:`dobnb.models.MODELS`, or a loaded transformers vision model in eval mode, float32.
    :param inputs: see :mod:`dobnb.inputs`; all of one size.
    :param heads: measure every head too.
    :param batch_size: inputs a forward pass; it changes no verdict but near-ties.
    :param device: a torch device; a named model is loaded there, a loaded one is moved there and stays.
    :param revision: of a named hub model's weights.
    :param progress: called as ``progress(done, n)`` after every batch.
    :raises MeasurementError: no inputs, or a batch size below 1.
    :raises ModelError: a name that is not known, or weights that cannot be had.
    :raises CaptureError: the model's attention cannot be streamed.
    :raises MatrixError: the model's attention is not row-stochastic.
    """
    if len(inputs) == 0:
        raise MeasurementError("there are no inputs; pass at least one")
    if batch_size < 1:
        raise MeasurementError(f"batch_size is {batch_size}; it must be at least 1")
    started, clock = provenance.now(), time.monotonic()
    if isinstance(model, str):
        module = load_model(model, device=device, revision=revision)
        about = {"name": model, "title": MODELS[model].title} | weights_identity(model, module)
    else:
        module = model.to(device)
        about = {"name": type(model).__name__, "title": type(model).__name__}

    roles = image_token_roles(module.config, inputs.size)
    content = content_mask(roles).to(device)
    layers, tokens = int(module.config.num_hidden_layers), len(roles)
    on_content: list[list[EqualityReport]] = [[] for _ in range(layers)]
    on_all: list[list[EqualityReport]] = [[] for _ in range(layers)]
    on_heads: list[list[EqualityReport]] = [[] for _ in range(layers)]
    totals = torch.zeros(layers, tokens, tokens, dtype=torch.float64, device=device)

    def sink(layer: int, weights: Tensor) -> None:
        # Heads are summed in float64, on the CPU without a float64 copy of every head.
        on_cpu = weights.device.type == "cpu"
        averaged = torch.from_numpy(mean_of_heads(weights.contiguous().numpy())) if on_cpu else weights.double().mean(1)
        for matrix in averaged:  # one by one, in order: the sum does not depend on the batch size
            totals[layer] += matrix
        on_all[layer].append(check_equality(averaged))
        on_content[layer].append(check_equality(averaged, tokens=content))
        if heads:
            for one in [weights] if on_cpu else weights:  # an input at a time keeps memory small
                on_heads[layer].append(check_equality(one, tokens=content))

    for start in range(0, len(inputs), batch_size):
        stop = min(start + batch_size, len(inputs))
        batch = {name: value.to(device) for name, value in inputs.batch(start, stop).items()}
        stream_attention(module, batch, sink)
        if progress is not None:
            progress(stop, len(inputs))

    whole = totals / len(inputs)
    subchain = restrict(whole, content)
    whole_report, subchain_report = check_equality(whole), check_equality(subchain)
    near_ties = []
    for layer in range(layers):
        margins = [_values(reports[layer], "margin") for reports in (on_content, on_all, on_heads) if reports[layer]]
        margins += [whole_report.margin[layer : layer + 1].cpu(), subchain_report.margin[layer : layer + 1].cpu()]
        near_ties.append(int((torch.cat(margins) < NEAR_TIE).sum()))
    about |= {
        "layers": layers,
        "heads": int(module.config.num_attention_heads),
        "tokens": tokens,
        "content_tokens": int(content.sum()),
    }
    return Measurement(
        provenance={
            "model": about,
            "inputs": {"name": inputs.name, "digest": inputs.digest, "n": len(inputs)},
            "settings": {
                "alpha": 0.5,
                "batch_size": batch_size,
                "device": device,
                "dtype": str(module.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
            },
            "versions": provenance.versions(),
            "machine": provenance.machine(),
            "commit": provenance.git_commit(Path(__file__).parent),
            "started": started,
            "seconds": round(time.monotonic() - clock, 1),
        },
        layers=layers,
        n=[len(inputs)] * layers,
        per_input=_summary("content", on_content) | _summary("all", on_all),
        heads={"content": _held(on_heads), "tested": [len(_values(r, "holds")) for r in on_heads]} if heads else {},
        averaged={
            "content": subchain_report.holds.tolist(),
            "all": whole_report.holds.tolist(),
            "kappa": subchain_report.kappa.tolist(),
            "doeblin": doeblin_bound(subchain).tolist(),
            "margin": subchain_report.margin.tolist(),
        },
        near_ties=near_ties,
    )


def percent(held: int, tested: int) -> str:
    """A share as the paper prints it: one decimal, two where one would round a failure away."""
    share = 100 * held / tested
    return f"{share:.2f}%" if held < tested and round(share, 1) == 100 else f"{share:.1f}%"


def table(measurements: Sequence[Measurement]) -> pd.DataFrame:
    """The paper's Table 1 for our measurements: one row a system, printable text.

    Per input: input-layer pairs that satisfy the condition. Heads: of all heads. Averaged: layers that satisfy it.
    """
    rows = []
    for found in measurements:
        pairs, heads = sum(found.n), found.heads
        held = sum(found.per_input["content"])
        rows.append({
            "system": found.provenance["model"]["name"],
            "inputs": found.provenance["inputs"]["name"],
            "n": found.n[0],
            "per input, content": f"{held}/{pairs} ({percent(held, pairs)})",
            "per input, all tokens": percent(sum(found.per_input["all"]), pairs),
            "heads, content": percent(sum(heads["content"]), sum(heads["tested"])) if heads else "not measured",
            "averaged, exact layers": f"{sum(found.averaged['content'])}/{found.layers}",
        })
    return pd.DataFrame(rows).set_index(["system", "inputs"])


def by_layer(found: Measurement) -> pd.DataFrame:
    """The counts of every layer with the median kappa and margin beside them, rounded for reading.

    Columns: inputs that hold on content and on all tokens, heads that hold, the averaged verdict, and the medians over
    inputs on content tokens.
    """
    columns = {"content": found.per_input["content"], "all tokens": found.per_input["all"]}
    if found.heads:
        counts = zip(found.heads["content"], found.heads["tested"], strict=True)
        columns["heads"] = [f"{held}/{tested}" for held, tested in counts]
    columns |= {
        "averaged": ["exact" if verdict else "fails" for verdict in found.averaged["content"]],
        "median kappa": [f"{value:.3f}" for value in found.per_input["content_kappa"]["median"]],
        "median margin": [f"{value:.0e}" for value in found.per_input["content_margin"]["median"]],
        "near ties": found.near_ties,
    }
    return pd.DataFrame(columns, index=pd.RangeIndex(1, found.layers + 1, name="layer"))
