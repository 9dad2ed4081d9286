"""A small vision transformer trained on handwritten digits, with labels or by reconstructing hidden patches.

One architecture, timm's ``VisionTransformer``, and one training: the same images, the same number of updates, the same
optimiser, and for a seed the same first weights, order and distortions of the images. What the two objectives ask for
is the only difference (book: ch-supervised-vision).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional

from dobnb import provenance
from dobnb.capture import stream_attention
from dobnb.equality import NEAR_TIE, check_equality
from dobnb.files import short
from dobnb.inputs import from_tensors
from dobnb.kernel import mean_of_heads
from dobnb.measurement import measure
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

Objective = Literal["labels", "masked"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
METRIC = {"labels": "accuracy", "masked": "R2"}
"""By objective, on the test images: the share of digits named rightly; of the hidden pixels' variance about each
pixel's mean over the training images, the part that is reconstructed."""

SIDE, PATCH = 8, 2
"""Pixels. An image is 16 patches; with cls, 17 tokens."""
PATCHES = (SIDE // PATCH) ** 2
WIDTH, DEPTH, HEADS, MLP_RATIO = 48, 6, 4, 2.0
POSITION = 0.3
"""Standard deviation of the first position embeddings. timm's 0.02 is drowned by the patches at this width: training
then takes many epochs to tell one place from another."""
HIDDEN = 6
"""Patches hidden of the 16, in reconstruction."""
PAINT = -3.0
"""A hidden patch's pixels, in standard deviations: below every pixel there is, so it looks like no other patch."""

EPOCHS = 60
BATCH_SIZE = 32
LEARNING_RATE = 2e-3
"""At its highest, after :data:`WARM_UP` epochs; it rises linearly from 0 and falls to 0 as a cosine."""
WARM_UP = 5
WEIGHT_DECAY = 0.05
DEGREES, STRETCH, SHIFT = 10.0, 0.1, 0.5
"""Most that an image is turned, scaled by (as a share) and moved (in pixels) before every update."""

TEST_IMAGES = 500
UNTRAINED_SEED = 10_000
"""Of the first untrained model."""
PACKAGES = ("dobnb", "numpy", "safetensors", "scikit-learn", "timm", "torch")

TOKENS = ("content", "all")


class Digits(NamedTuple):
    """Images, float32, shape (n, 1, 8, 8), standardised by the training images' mean and deviation; their digits."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    digest: str
    """sha256 of the four."""


@cache
def digits() -> Digits:
    """scikit-learn's 1797 handwritten digits: 1297 to train on, 500 to test, drawn once, each digit in proportion."""
    found = load_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1)
    labels = torch.from_numpy(found.target)
    rows = np.arange(len(labels))
    train, test = train_test_split(rows, test_size=TEST_IMAGES, random_state=0, stratify=found.target)
    images = (images - images[train].mean()) / images[train].std()
    parts = (images[train], labels[train], images[test], labels[test])
    return Digits(*parts, provenance.digest(*(part.numpy().tobytes() for part in parts)))


def build(objective: Objective, seed: int) -> VisionTransformer:
    """The untrained model, its weights drawn with `seed`; the global generator stays as it was.

    For a seed both objectives have the same weights but for the last layer, which is zero: ten numbers out of the cls
    token, or the four pixels of a patch out of its token.

    :raises TrainingError: another objective.
    """
    if objective not in OBJECTIVES:
        raise TrainingError(f"objective is {objective!r}; pass labels or masked")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = VisionTransformer(
            img_size=SIDE, patch_size=PATCH, in_chans=1, num_classes=0, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS,
            mlp_ratio=MLP_RATIO, weight_init="jax",
        )  # fmt: skip
        torch.nn.init.normal_(model.pos_embed, std=POSITION)
        model.reset_classifier(10 if objective == "labels" else PATCH**2)
        torch.nn.init.zeros_(model.head.weight)
        torch.nn.init.zeros_(model.head.bias)
    return model


def distort(images: Tensor) -> Tensor:
    """Images turned, scaled and moved a little, each by its own random amount (:data:`DEGREES`).

    :param images: standardised, shape (B, 1, 8, 8).
    """
    angle = (2 * torch.rand(len(images)) - 1) * math.radians(DEGREES)
    scale = 1 + (2 * torch.rand(len(images)) - 1) * STRETCH
    move = (2 * torch.rand(len(images), 2) - 1) * SHIFT * 2 / SIDE
    cos, sin = angle.cos() / scale, angle.sin() / scale
    rows = (torch.stack([cos, -sin, move[:, 0]], 1), torch.stack([sin, cos, move[:, 1]], 1))
    grid = functional.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    paper = digits().train.min()  # what comes in from outside is blank
    return functional.grid_sample(images - paper, grid, align_corners=False) + paper


def patches(images: Tensor) -> Tensor:
    """The pixels of every patch, row by row.

    :param images: shape (B, 1, 8, 8).
    :return: shape (B, 16, 4).
    """
    return functional.unfold(images, PATCH, stride=PATCH).mT


def draw_hidden(n: int, generator: torch.Generator | None = None) -> Tensor:
    """Which :data:`HIDDEN` patches of each of `n` images are hidden, bool, shape (n, 16)."""
    chosen = torch.rand(n, PATCHES, generator=generator).argsort(1)[:, :HIDDEN]
    return torch.zeros(n, PATCHES, dtype=torch.bool).scatter_(1, chosen, True)


def hide(images: Tensor, hidden: Tensor) -> Tensor:
    """Images with their hidden patches painted over with :data:`PAINT`.

    :param images: shape (B, 1, 8, 8).
    :param hidden: bool, shape (B, 16).
    """
    side = SIDE // PATCH
    pixels = hidden.view(-1, 1, side, side).repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
    return images.masked_fill(pixels, PAINT)


def reconstruct(model: VisionTransformer, images: Tensor, hidden: Tensor) -> Tensor:
    """What the model makes of each patch, given the patches that are not hidden; shape (B, 16, 4)."""
    return model.head(model.forward_features(hide(images, hidden))[:, model.num_prefix_tokens :])


def loss(model: VisionTransformer, objective: Objective, images: Tensor, labels: Tensor, hidden: Tensor) -> Tensor:
    """Labels: the cross entropy of the digits. Masked: the mean squared error over the pixels of hidden patches.

    :param images: shape (B, 1, 8, 8).
    :param labels: int64, shape (B,); not looked at in reconstruction.
    :param hidden: bool, shape (B, 16); not looked at with labels.
    """
    if objective == "labels":
        return functional.cross_entropy(model(images), labels)
    return (reconstruct(model, images, hidden) - patches(images))[hidden].square().mean()


def score(model: VisionTransformer, objective: Objective, data: Digits | None = None) -> float:
    """The objective's :data:`METRIC` on the test images; every model is asked for the same hidden patches.

    :param model: in evaluation mode.
    """
    data = digits() if data is None else data
    with torch.no_grad():
        if objective == "labels":
            return (model(data.test).argmax(1) == data.test_labels).double().mean().item()
        hidden, truth = draw_hidden(len(data.test), torch.Generator().manual_seed(0)), patches(data.test)
        missed = (reconstruct(model, data.test, hidden) - truth)[hidden].square().sum()
        spread = (patches(data.train).mean(0) - truth)[hidden].square().sum()
    return (1 - missed / spread).item()


# Training -----------------------------------------------------------------------------------------------------------


def train(
    objective: Objective,
    seed: int,
    folder: str | Path,
    *,
    epochs: int = EPOCHS,
    report: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Train one model for a fixed number of updates, or take up the training that `folder` holds.

    After every epoch all of the run's state is written to one file, whole or not at all: a run that is killed and
    started again ends with the same weights, bit for bit, as one left alone, on the same machine with the same versions
    and the same number of threads. The folder then holds ``record.json`` and ``epoch_*.safetensors``, the weights
    before training, after epochs 1, 2, 4, 8 and so on, and after the last. Nothing is chosen by the test images.

    :param objective: ``labels`` or ``masked``.
    :param seed: of weights, order of the images, their distortions and the hidden patches.
    :param epochs: the learning rate's course depends on it too.
    :param report: called with a line of progress after every epoch.
    :return: what ``record.json`` holds: settings, the test metric, the history by epoch, provenance.
    :raises TrainingError: another run in the folder, a damaged checkpoint, a loss that is not finite, or arguments out
        of range.
    :raises OSError: the folder cannot be written.
    """
    if objective not in OBJECTIVES:
        raise TrainingError(f"objective is {objective!r}; pass labels or masked")
    if epochs < 1:
        raise TrainingError(f"epochs is {epochs}; it must be at least 1")
    check_seed(seed)
    settings = {
        "objective": objective,
        "seed": seed,
        "epochs": epochs,
        "updates": epochs * -(-len(digits().train) // BATCH_SIZE),
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "warm_up": WARM_UP,
        "weight_decay": WEIGHT_DECAY,
        "distortion": {"degrees": DEGREES, "stretch": STRETCH, "shift": SHIFT},
        "hidden": HIDDEN,
        "model": {"width": WIDTH, "depth": DEPTH, "heads": HEADS, "patch": PATCH, "mlp_ratio": MLP_RATIO},
        "data_digest": digits().digest,
    }
    folder = Path(folder)
    with alone_in(folder):
        return _train(settings, folder, report)


def _train(settings: Mapping[str, Any], folder: Path, report: Callable[[str], None] | None) -> dict[str, Any]:
    """:func:`train` with the folder to itself."""
    finished, checkpoint = folder / "record.json", folder / "checkpoint.safetensors"
    if finished.exists():
        record = read_record(finished)
        check_same(settings, record["settings"], folder)
        checkpoint.unlink(missing_ok=True)  # a process may have been killed before its last step
        return record
    objective, epochs, metric = settings["objective"], settings["epochs"], METRIC[settings["objective"]]
    model = build(objective, settings["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=WEIGHT_DECAY, fused=True)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings["seed"])
        about: dict[str, Any] = {
            "settings": settings,
            "history": {"loss": [], "seconds": []},
            "started": provenance.now(),
            "threads": torch.get_num_threads(),
        }
        if checkpoint.exists():
            tensors, about = load_tensors(checkpoint)
            check_same(settings, about["settings"], folder)
            restore(tensors, model, optimizer)
        else:
            save_tensors(folder / snapshot(0), model.state_dict(), {"settings": settings, "epoch": 0})
        history = about["history"]
        for epoch in range(len(history["loss"]) + 1, epochs + 1):
            clock = time.monotonic()
            history["loss"].append(_epoch(model, optimizer, settings, epoch))
            history["seconds"].append(round(time.monotonic() - clock, 2))
            if epoch & (epoch - 1) == 0 or epoch == epochs:
                save_tensors(folder / snapshot(epoch), model.state_dict(), {"settings": settings, "epoch": epoch})
            save_tensors(checkpoint, state(model, optimizer), about)
            if report is not None:
                left = round((epochs - epoch) * float(np.mean(history["seconds"][-5:])))
                loss_now, seconds = history["loss"][-1], history["seconds"][-1]
                report(f"epoch {epoch:3d} of {epochs}  loss {loss_now:.4f}  {seconds:.1f} s  {left} s left")

    reached = score(model.eval(), objective)
    check_finite(reached, f"the test {metric} is {reached}")
    found = {
        "metric": metric,
        "test": short(reached),
        "images": {"train": len(digits().train), "test": len(digits().test)},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    return finish(folder, about, found, snapshot(epochs), PACKAGES)


def _epoch(
    model: VisionTransformer, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], epoch: int
) -> float:
    """One pass over the training images in random order; the mean loss over the batches.

    Both objectives draw the same random numbers, the hidden patches too, so that a seed gives both the same course.
    """
    data, losses = digits(), []
    model.train()
    batches = torch.randperm(len(data.train)).split(BATCH_SIZE)
    for step, rows in enumerate(batches, start=1):
        update = (epoch - 1) * len(batches) + step
        rise = min(1.0, update / (WARM_UP * len(batches)))
        fall = (1 + math.cos(math.pi * update / settings["updates"])) / 2
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(rise, fall)
        images, hidden = distort(data.train[rows]), draw_hidden(len(rows))
        value = loss(model, settings["objective"], images, data.train_labels[rows], hidden)
        check_finite(value.item(), f"the loss is {value.item()} in epoch {epoch}, step {step}")
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return sum(losses) / len(losses)


def load_trained(path: str | Path) -> VisionTransformer:
    """The model whose weights :func:`train` wrote, in evaluation mode.

    :param path: an ``epoch_*.safetensors``.
    :raises TrainingError: no such file, or not ours.
    """
    tensors, about = load_tensors(Path(path))
    if "objective" not in about.get("settings", {}):
        raise TrainingError(f"{Path(path).name} holds no vision transformer; pass a file of `dobnb train vit`")
    model = build(about["settings"]["objective"], 0)
    model.load_state_dict(tensors)
    return model.eval()


# Evaluation ---------------------------------------------------------------------------------------------------------


def measure_images(model: VisionTransformer, images: Tensor) -> dict[str, Any]:
    """How often the equality condition (book: thm-equality) holds in the model's attention, and what pairs decide it.

    :param model: in evaluation mode.
    :param images: whole, nothing hidden, standardised, shape (n, 1, 8, 8).
    :return: for JSON. ``content``, the patches, and ``all`` tokens, each with lists by layer: ``held``, images that
        satisfy the condition; ``kappa`` and ``margin``, quantiles over images (5%, median, 95%); ``failing_gap``, the
        median relative gap of the images that do not, None where all do; ``near_ties``; ``averaged``, the verdict on
        the matrix averaged over images. ``heads``: heads times images that satisfy it on patches, of ``heads_tested``.
        ``members``: in how many images each of the 16 patches, row by row, is in the first maximising pair on patches.
        ``cls_pairs``: of the images, those whose first maximising pair on all tokens has cls in it; ``cls_failing``:
        of those, the ones that fail. ``mass``: of a patch's attention, averaged over patches and images, what goes to
        itself and to cls.
    """
    named = from_tensors(images, "digits")
    found = measure(model, named, depth=False, batch_size=len(images), block_size=len(images))
    tallies = found.tallies
    assert tallies is not None  # it was measured here
    brief: dict[str, Any] = {"n": len(images)}
    for tokens in TOKENS:
        per_input = {name: tallies.by_input[f"{tokens}_{name}"] for name in ("holds", "kappa", "margin", "gap")}
        gaps = [gap[~holds] for gap, holds in zip(per_input["gap"].T, per_input["holds"].T, strict=True)]
        brief[tokens] = {
            "held": found.per_input[tokens],
            **{
                name: [[short(value) for value in row] for row in np.quantile(per_input[name], [0.05, 0.5, 0.95], 0).T]
                for name in ("kappa", "margin")
            },
            "failing_gap": [short(np.median(gap)) if len(gap) else None for gap in gaps],
            "near_ties": (per_input["margin"] < NEAR_TIE).sum(0).tolist(),
            "averaged": found.averaged[tokens],
        }
    brief |= {"heads": found.heads["content"], "heads_tested": found.heads["tested"][0]}
    brief |= {"members": [], "cls_pairs": [], "cls_failing": [], "mass": {"itself": [], "cls": []}}
    patches_alone = torch.arange(PATCHES + model.num_prefix_tokens) >= model.num_prefix_tokens

    def sink(layer: int, weights: Tensor) -> None:
        mean = torch.from_numpy(mean_of_heads(weights.contiguous().numpy()))
        pair = check_equality(mean, tokens=patches_alone).pair
        brief["members"].append(torch.bincount(pair.flatten(), minlength=PATCHES).tolist())
        report = check_equality(mean)
        with_cls = (report.pair == 0).any(-1)
        brief["cls_pairs"].append(int(with_cls.sum()))
        brief["cls_failing"].append(int((with_cls & ~report.holds).sum()))
        brief["mass"]["itself"].append(short(mean.diagonal(dim1=-2, dim2=-1)[:, 1:].mean()))
        brief["mass"]["cls"].append(short(mean[:, 1:, 0].mean()))

    stream_attention(model, images, sink)
    return brief


def evaluate(
    folder: str | Path,
    seeds: Sequence[int],
    objectives: Sequence[Objective] = OBJECTIVES,
    untrained: int = 20,
    report: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """What the runs in a folder learnt and what became of their attention, through training, beside untrained models.

    All are measured on the 500 test images, through training (the last step is the trained model), and once trained
    also with patches hidden as in reconstruction, ``some_hidden``. The null is the same architecture with random
    weights, seeded from `UNTRAINED_SEED` on; the objectives share it, for an untrained model knows nothing of them.

    :param folder: with one folder ``OBJECTIVE/seed_...`` a run.
    :param untrained: how many models the null has.
    :param report: called with a line of progress after every run.
    :return: for JSON; its ``digest`` is the sha256 of the rest.
    :raises TrainingError: a run that is not finished; runs that differ in more than the seed and the objective.
    """
    started, clock = provenance.now(), time.monotonic()
    runs = []
    for objective in objectives:
        for seed in seeds:
            one = Path(folder) / objective / f"seed_{seed}"
            record, through = read_record(one / "record.json"), []
            for path in sorted(one.glob("epoch_*.safetensors")):
                model = load_trained(path)
                step = {"epoch": load_tensors(path)[1]["epoch"], "test": short(score(model, objective))}
                through.append(step | measure_images(model, digits().test))
            hidden = draw_hidden(len(digits().test), torch.Generator().manual_seed(0))
            in_part = measure_images(model, hide(digits().test, hidden))  # the last file is the trained model's
            runs.append(record | {"through_training": through, "some_hidden": in_part})
            if report is not None:
                report(f"measured: {objective}, seed {seed}")
    if not runs:
        raise TrainingError("there are no runs; pass an objective and the seeds of finished runs")

    def shared(record: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in record["settings"].items() if key not in ("seed", "objective")}

    for record in runs:
        check_same(shared(runs[0]), shared(record), Path(folder))
    null = [
        {"seed": seed} | measure_images(build("labels", seed).eval(), digits().test)
        for seed in range(UNTRAINED_SEED, UNTRAINED_SEED + untrained)
    ]
    return with_digest({
        "schema": SCHEMA,
        "provenance": {
            "settings": shared(runs[0]),
            "versions": provenance.versions(PACKAGES),
            "machine": provenance.machine(),
            "commit": provenance.git_commit(Path(__file__).parent),
            "started": started,
            "seconds": round(time.monotonic() - clock, 1),
        },
        "runs": runs,
        "untrained": null,
    })


def against_null(record: Mapping[str, Any]) -> pd.DataFrame:
    """Both objectives beside untrained models, layer by layer, printable text.

    :param record: what :func:`evaluate` returned.
    :return: one row a token set and layer, and one for all layers; a column an objective, and one for the untrained:
        the share of images that satisfy the condition in per cent, mean and standard deviation over models, and in
        brackets the medians of kappa and margin.
    """
    models: dict[str, list[Mapping[str, Any]]] = {}
    for run in record["runs"]:
        models.setdefault(run["settings"]["objective"], []).append(run["through_training"][-1])
    models["untrained"] = record["untrained"]
    rows = []
    for tokens in TOKENS:
        layers = len(record["untrained"][0][tokens]["held"])
        for layer in (*range(layers), None):
            row = {"tokens": tokens, "layer": "all" if layer is None else str(layer + 1)}
            for name, ones in models.items():
                shares = np.array([np.multiply(100 / one["n"], one[tokens]["held"]) for one in ones])
                of_model = shares.mean(1) if layer is None else shares[:, layer]
                spread = f" \N{PLUS-MINUS SIGN} {of_model.std(ddof=1):.0f}" if len(ones) > 1 else ""
                row[name] = f"{of_model.mean():.0f}{spread}"
                if layer is not None:
                    kappa, margin = (
                        np.median([one[tokens][what][layer][1] for one in ones]) for what in ("kappa", "margin")
                    )
                    row[name] += f" ({kappa:.2f}, {margin:.0e})"
            rows.append(row)
    return pd.DataFrame(rows).set_index(["tokens", "layer"])


def who_attends(record: Mapping[str, Any]) -> pd.DataFrame:
    """What the verdicts hang on, layer by layer, for each objective and the untrained, means over models.

    :param record: what :func:`evaluate` returned.
    :return: what a patch gives to itself and to cls, as multiples of the 1/17 of uniform attention; in what per cent of
        the images cls is in the maximising pair on all tokens, and of the failing images in what per cent; the median
        gap of the images that fail on patches, in per cent of kappa/2.
    """
    models: dict[str, list[Mapping[str, Any]]] = {}
    for run in record["runs"]:
        models.setdefault(run["settings"]["objective"], []).append(run["through_training"][-1])
    models["untrained"] = record["untrained"]
    rows = []
    for name, ones in models.items():
        for layer in range(len(ones[0]["cls_pairs"])):
            n = sum(one["n"] for one in ones)
            failing = n - sum(one["all"]["held"][layer] for one in ones)
            cls_failing = sum(one["cls_failing"][layer] for one in ones)
            gaps = [one["content"]["failing_gap"][layer] for one in ones]
            gaps = [gap for gap in gaps if gap is not None]
            rows.append({
                "models": name,
                "layer": layer + 1,
                **{
                    f"to {to}, x 1/17": f"{(PATCHES + 1) * np.mean([one['mass'][to][layer] for one in ones]):.2f}"
                    for to in ("itself", "cls")
                },
                "cls in pair, %": f"{100 * sum(one['cls_pairs'][layer] for one in ones) / n:.0f}",
                "of failing, %": f"{100 * cls_failing / failing:.0f}" if failing else "none fail",
                "gap, % of kappa/2": f"{100 * np.mean(gaps):.1f}" if gaps else "none fail",
            })
    return pd.DataFrame(rows).set_index(["models", "layer"])
