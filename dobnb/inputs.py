"""Inputs as a model reads them: photographs and prose that need no download, a folder or a file of one's own, datasets
by name, or tensors.

Pixels are RGB in [0, 1], normalised as the model's card says. Text is cut into blocks of word pieces. Images are read
when a batch asks for them, so memory does not grow with their number.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import json
import math
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dobnb import models, provenance, weights
from dobnb.errors import DobnbError
from dobnb.models import Preprocessing

IMAGENET = Preprocessing()
"""Of DINOv2 and DeiT: the centre 224 px of an image whose shorter side is 256 px, ImageNet's mean and deviation."""


class InputError(DobnbError, ValueError):
    """An image, a text, a folder or a number of inputs cannot be used."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of one size, numbered from 0, each the same whatever the batch it is read in."""

    name: str
    """What they are, for people; never a path."""
    digest: str
    """sha256 of the pixels, files or tokens and of every setting that shapes what the model sees."""
    n: int
    _batch: Callable[[int, int], Mapping[str, Tensor] | Tensor] = field(repr=False, compare=False)
    size: int | None = None
    """Side of each image in pixels; None where they are no images."""
    left_out: tuple[tuple[str, str], ...] = ()
    """What lay among them and could not be used: its name, and why."""

    def __len__(self) -> int:
        return self.n

    def batch(self, start: int, stop: int) -> Mapping[str, Tensor] | Tensor:
        """Inputs start ... stop - 1 as the model takes them: keyword arguments, or its one positional argument.

        Images: float32, shape (stop - start, 3, size, size), normalised, under ``pixel_values`` for models of
        transformers. Text: ``input_ids`` and ``attention_mask``, int64, shape (stop - start, tokens).

        :param start: at least 0 and below `stop`.
        :param stop: at most ``len(self)``.
        :raises InputError: start and stop out of range, or an image that cannot be read or has changed.
        """
        if not 0 <= start < stop <= self.n:
            raise InputError(
                f"batch {start} ... {stop} is not within 0 ... {self.n}; pass 0 <= start < stop <= {self.n}"
            )
        return self._batch(start, stop)


def read_inputs(
    source: str,
    model: str,
    n: int | None = None,
    *,
    size: int | None = None,
    length: int | None = None,
    revision: str | None = None,
    untrained: bool = False,
) -> Inputs:
    """What `source` names, as the model of that name reads it.

    :param source: ``embedded``, ``imagenette``, ``wikitext-2``, ``random``, a folder of images or a text file. One of
        the user's own that has such a name is written ``./embedded``.
    :param model: as for :func:`dobnb.models.load_model`.
    :param n: how many; None takes all of a folder, file or dataset, and 32 of what is embedded.
    :param size: side of images in pixels; None is the model's own.
    :param length: word pieces a block of text; None is the paper's 126.
    :param revision: of the model's repository, where its preprocessing or tokenizer comes from.
    :param untrained: whether the model is one without its weights: of those in :data:`dobnb.models.MODELS` the card's
        preprocessing is taken then, and no repository is asked.
    :raises InputError: nothing of that name, or it is not what the model reads; and as the functions below.
    :raises ModelError: see :func:`dobnb.models.preprocessing`.
    """
    card = models.MODELS.get(model) if untrained else None
    how = card.preprocessing if card else models.preprocessing(model, revision)
    if source not in ("embedded", "imagenette", "wikitext-2", "random") and not Path(source).exists():
        raise InputError(
            f"there is no folder or file {source}; pass one, or embedded, imagenette (images), wikitext-2 or random "
            "(text)"
        )
    if how is None:
        if size is not None:
            raise InputError(f"{model} reads text, which has no size in pixels; pass a length")
        if source == "imagenette":
            raise InputError(f"{model} reads text; pass a text file, embedded or wikitext-2")
        length = models.CONTENT_TOKENS if length is None else length
        if source == "random":
            return random_words(model, 32 if n is None else n, length)
        try:
            tokenizer = models.load_tokenizer(model, revision)
        except models.ModelError as error:
            if card is None:
                raise
            raise InputError(f"{error}; or take random word pieces as inputs, which need no tokenizer") from error
        if source == "embedded":
            return docstrings(tokenizer, 32 if n is None else n, length)
        if source == "wikitext-2":
            return wikitext(tokenizer, n, length)
        return text_file(source, tokenizer, n, length)
    if length is not None:
        raise InputError(f"{model} reads images, which have no length in words; pass a size")
    if source in ("wikitext-2", "random"):
        raise InputError(f"{model} reads images; pass a folder of them, embedded or imagenette")
    if source == "embedded":
        return photographs(32 if n is None else n, size or how.size, preprocessing=how)
    if source == "imagenette":
        return imagenette(n, size or how.size, preprocessing=how)
    return image_folder(source, n, size or how.size, preprocessing=how)


def from_tensors(data: Tensor | Mapping[str, Tensor], name: str) -> Inputs:
    """One's own tensors, which the model is called with as they are. They must not be changed afterwards.

    :param data: the first dimension of every tensor counts the inputs: ``model(data)``, or ``model(**data)``.
    :param name: what a result calls them.
    :raises InputError: no tensor, no input, or first dimensions that differ.
    """
    named = data if isinstance(data, Mapping) else {"": data}
    if not named or not all(isinstance(value, Tensor) and value.ndim for value in named.values()):
        raise InputError(f"{name}: pass a tensor, or a mapping of tensors, whose first dimension counts the inputs")
    counts = {key: len(value) for key, value in named.items()}
    n = next(iter(counts.values()))
    if n < 1 or set(counts.values()) != {n}:
        raise InputError(f"{name}: the first dimensions are {counts}; pass the same number of inputs, at least one")
    settings = [[key, str(value.dtype), list(value.shape)] for key, value in named.items()]
    content = (value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for value in named.values())
    digest = provenance.digest(json.dumps({"kind": "from_tensors", "tensors": settings}).encode(), *content)

    def batch(start: int, stop: int) -> Mapping[str, Tensor] | Tensor:
        if isinstance(data, Tensor):
            return data[start:stop]
        return {key: value[start:stop] for key, value in data.items()}

    return Inputs(name, digest, n, batch)


# Images -------------------------------------------------------------------------------------------------------------


def to_image(pixel_values: Tensor, preprocessing: Preprocessing = IMAGENET) -> np.ndarray:
    """Undo the normalisation, to show what the model saw.

    :param pixel_values: shape (..., 3, H, W), as :meth:`Inputs.batch` returns it.
    :param preprocessing: of the model.
    :return: uint8, shape (..., H, W, 3), values beyond [0, 255] cut.
    :raises InputError: the third dimension from the end is not 3.
    """
    if pixel_values.ndim < 3 or pixel_values.shape[-3] != 3:
        raise InputError(f"pixel values have shape {tuple(pixel_values.shape)}; pass (..., 3, H, W)")
    mean, deviation = _column(preprocessing.mean), _column(preprocessing.deviation)
    pixels = pixel_values.detach().cpu().double() * deviation + mean
    return (pixels * 255).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).numpy()


def _column(values: tuple[float, ...]) -> Tensor:
    """Shape (3, 1, 1), to meet (..., 3, H, W)."""
    return torch.tensor(values).view(3, 1, 1)


def _images(
    name: str, settings: Mapping[str, object], content: Iterable[bytes], n: int, size: int, how: Preprocessing,
    image: Callable[[int], np.ndarray], left_out: tuple[tuple[str, str], ...] = (),
) -> Inputs:
    """Inputs out of a function that gives the pixels of image i, uint8, shape (size, size, 3)."""  # fmt: skip
    everything = {**settings, "size": size, "preprocessing": asdict(how)}
    digest = provenance.digest(json.dumps(everything).encode(), *content)

    def batch(start: int, stop: int) -> Mapping[str, Tensor] | Tensor:
        pixels = torch.from_numpy(np.stack([image(i) for i in range(start, stop)]))
        values = (pixels.permute(0, 3, 1, 2).float() / 255 - _column(how.mean)) / _column(how.deviation)
        return values if how.argument is None else {how.argument: values}

    return Inputs(name, digest, n, batch, size, left_out)


@dataclass(frozen=True)
class Photograph:
    """A photograph that an installed package brings along."""

    title: str
    package: str
    """Import name of the package."""
    path: str
    """Inside the package."""
    sha256: str
    licence: str
    """Licence and author, as the package states them."""


PHOTOGRAPHS = (
    Photograph("Astronaut Eileen Collins", "skimage", "data/astronaut.png",
               "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5", "public domain, NASA"),
    Photograph("Chelsea the cat", "skimage", "data/chelsea.png",
               "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb", "CC0, Stefan van der Walt"),
    Photograph("Coffee cup", "skimage", "data/coffee.png",
               "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7", "CC0, Rachel Michetti"),
    Photograph("Rocket launch", "skimage", "data/rocket.jpg",
               "c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c", "public domain, SpaceX"),
    Photograph("Temple in China", "sklearn", "datasets/images/china.jpg",
               "8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29", "CC BY 2.0, danielbuechele"),
    Photograph("Flower", "sklearn", "datasets/images/flower.jpg",
               "a77f6ec41e353afdf8bdff2ea981b2955535d8d83294f8cfa49cf4e423dd5638", "CC BY 2.0, vultilion"),
)  # fmt: skip
"""The colour photographs of everyday scenes inside the wheels of scikit-image and scikit-learn. Left out: textures,
drawings, microscopy, fundus and sky images, and the stereo pair, whose licence the package does not state."""

_PACKAGES = {"skimage": "scikit-image", "sklearn": "scikit-learn", "scipy": "scipy"}


def photographs(n: int, size: int = 224, seed: int = 0, *, preprocessing: Preprocessing = IMAGENET) -> Inputs:
    """Seeded random crops of the photographs in `PHOTOGRAPHS`, without a download.

    Crop i is of photograph i modulo 6: a random square with a side between `size` and the photograph's shorter side,
    which is the side where `size` is larger, resized to `size` (bicubic, antialiased). It depends on seed and i alone.
    Crops of one photograph overlap, so they are far from independent images.

    :param n: how many, at least 1.
    :param size: side in pixels.
    :param seed: of the crops.
    :param preprocessing: of the model; its normalisation is used.
    :raises InputError: n or size below 1, or a photograph that is not installed or is another file than expected.
    """
    _check_counts(n, size)
    sources = [_photograph(photograph) for photograph in PHOTOGRAPHS]

    def crop(i: int) -> np.ndarray:
        source = sources[i % len(sources)]
        # Python promises that random() gives the same numbers in every version; its other methods it does not.
        draw = random.Random(f"{seed} {i}")
        width, height = source.size
        shorter = min(width, height)
        smallest = min(size, shorter)
        side = smallest + int(draw.random() * (shorter - smallest + 1))
        left = int(draw.random() * (width - side + 1))
        top = int(draw.random() * (height - side + 1))
        square = source.crop((left, top, left + side, top + side))
        return np.asarray(square.resize((size, size), Image.Resampling.BICUBIC))

    settings = {"kind": "photographs", "n": n, "seed": seed}
    content = (np.asarray(source).tobytes() for source in sources)
    name = f"{n} crops of {len(sources)} photographs, {size} px, seed {seed}"
    return _images(name, settings, content, n, size, preprocessing, crop)


@cache
def _photograph(photograph: Photograph) -> Image.Image:
    """The decoded photograph, RGB."""
    path = _installed(photograph.package, photograph.title) / photograph.path
    content = _read(path)
    if (found := hashlib.sha256(content).hexdigest()) != photograph.sha256:
        raise InputError(
            f"{path.name} of {_PACKAGES[photograph.package]} has sha256 {found}, expected {photograph.sha256}; "
            "install the version that constraints.txt names"
        )
    return _decode(content)


def _installed(package: str, what: str) -> Path:
    """Folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        distribution = _PACKAGES[package]
        raise InputError(f"{what} is in {distribution}, which is not installed; run pip install {distribution}")
    return Path(spec.submodule_search_locations[0])


SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
"""What counts as an image in a folder, upper or lower case."""
MAX_BYTES = 1 << 30
"""Of an image file. The limit on its pixels is Pillow's, ``PIL.Image.MAX_IMAGE_PIXELS``, 89 million unless changed."""


def image_folder(
    path: str | Path, n: int | None = None, size: int = 224, *, preprocessing: Preprocessing = IMAGENET
) -> Inputs:
    """The images of a folder, sorted by file name.

    By default each is resized so that its shorter side is 256/224 of `size` (bicubic, antialiased), then the centre is
    cut out. An image whose shorter side has that length already is not resized. Images are turned as their EXIF data
    say; greyscale and CMYK become RGB, 16-bit grey values are scaled to 8 bits; of an animation, or of several pages,
    the first is taken.

    Every file is decoded once before anything runs, so that a damaged one is no news for hour three. Those that cannot
    be used are left out and named, with the reason, in :attr:`Inputs.left_out`: files that are no image or are damaged;
    transparent pixels; 32-bit or floating-point values, whose range is not known; fewer than a quarter of `size` pixels
    on the shorter side; more pixels or bytes than the limits.

    :param path: the folder; subfolders and files without one of `SUFFIXES` are left alone.
    :param n: how many, the first n by name that can be used; None takes all.
    :param size: side in pixels.
    :param preprocessing: of the model.
    :raises InputError: no folder, no image that can be used, fewer than n, or n or size below 1.
        From ``batch``: a file that has changed since.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; pass a folder of images")
    # absolute, since a worker of a cluster may stand in another folder
    there = (file.absolute() for file in folder.iterdir())
    files = sorted((file for file in there if file.suffix.lower() in SUFFIXES and file.is_file()), key=lambda f: f.name)
    if not files:
        raise InputError(f"{folder} holds no image; images end in {', '.join(SUFFIXES)}")
    _check_counts(len(files) if n is None else n, size)
    used: list[tuple[Path, str]] = []
    left_out: list[tuple[str, str]] = []
    for file in files:
        if len(used) == n:
            break
        try:
            content = _read(file)
            _check_shape(_decode(content), size, preprocessing)
        except InputError as error:
            left_out.append((file.name, str(error).removeprefix(f"{file.name} ")))
        else:
            used.append((file, hashlib.sha256(content).hexdigest()))
    if not used or (n is not None and len(used) < n):
        why = f"; {len(left_out)} cannot be used, the first: {left_out[0][0]} {left_out[0][1]}" if left_out else ""
        raise InputError(f"{folder} holds {len(used)} usable images, {n or 1} were asked for{why}; ask for fewer")

    def load(i: int) -> np.ndarray:
        file, digest = used[i]
        content = _read(file)
        if hashlib.sha256(content).hexdigest() != digest:
            raise InputError(f"{file.name} has changed since the folder was read; start again")
        return np.asarray(_square(_decode(content), size, preprocessing))

    digests = (digest.encode() for _, digest in used)
    name = f"{len(used)} images of {folder.resolve().name}, {size} px"
    return _images(name, {"kind": "image_folder"}, digests, len(used), size, preprocessing, load, tuple(left_out))


def imagenette(n: int | None = None, size: int = 224, *, preprocessing: Preprocessing = IMAGENET) -> Inputs:
    """Photographs of the validation part of Imagenette, ten classes of ImageNet, through torchvision.

    torchvision downloads the version of 320 px (340 MB) into :func:`dobnb.weights.home` once, and checks its md5.

    :param n: how many of the 3925, evenly spaced, since they are sorted by class; None takes all.
    :raises InputError: n or size below 1 or too large, or the data cannot be had.
    """
    from torchvision.datasets import Imagenette  # seconds to import, for this alone

    folder = weights.home() / "imagenette"
    try:
        data = Imagenette(folder, split="val", size="320px", download=True)
    except Exception as error:  # torchvision raises the transport's, the archive's and the system's errors as they are
        raise InputError(
            f"torchvision cannot get Imagenette: {type(error).__name__} ({_line(error)}); connect to a network, "
            "and where a part of it lies in the cache, delete that"
        ) from error
    count = len(data) if n is None else n
    _check_counts(count, size)
    if count > len(data):
        raise InputError(f"Imagenette's validation part has {len(data)} images, {count} were asked for; ask for fewer")

    def photograph(i: int) -> Image.Image:
        return data[i * len(data) // count][0]

    pixels = (np.asarray(photograph(i)).tobytes() for i in range(count))
    return _images(
        f"{count} images of Imagenette, {size} px", {"kind": "imagenette"}, pixels, count, size, preprocessing,
        lambda i: np.asarray(_square(photograph(i), size, preprocessing)),
    )  # fmt: skip


def _resized(width: int, height: int, size: int, how: Preprocessing) -> tuple[int, int]:
    """Width and height that an image is resized to before its centre is cut out."""
    if how.crop is None:
        return size, size
    target, shorter = math.floor(size / how.crop + 1e-6), min(width, height)
    return target * width // shorter, target * height // shorter


def _check_shape(image: Image.Image, size: int, how: Preprocessing) -> None:
    width, height = image.size
    if min(width, height) < size / 4:
        raise InputError(f"has {width} x {height} px, too few to make {size}")
    if math.prod(_resized(width, height, size, how)) > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise InputError(f"has {width} x {height} px, too long a strip to be resized")


def _square(image: Image.Image, size: int, how: Preprocessing) -> Image.Image:
    """`size` px square: the centre of the image, or all of it, as the preprocessing says."""
    target = _resized(*image.size, size, how)
    if target != image.size:
        image = image.resize(target, Image.Resampling[how.interpolation.upper()])
    left, top = (target[0] - size) // 2, (target[1] - size) // 2
    return image.crop((left, top, left + size, top + size))


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path.name} has {path.stat().st_size >> 20} MB, more than {MAX_BYTES >> 20}")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path.name}: {error.strerror or error}; put the file back") from error


def _decode(content: bytes) -> Image.Image:
    """Decode an image file to RGB, turned as its EXIF data say.

    :raises InputError: it cannot be used. The message is what is wrong, to stand behind the file's name.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")  # oddities of metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content)) as opened:
                image = ImageOps.exif_transpose(opened)
                image.load()
            if image.mode.startswith("I;16"):
                return Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8)).convert("RGB")
            if image.has_transparency_data:
                image = image.convert("RGBA")
                if image.getchannel("A").getextrema()[0] < 255:
                    raise InputError("has transparent pixels, behind which anything may lie")
            if image.mode not in ("I", "F"):
                return image.convert("RGB")
    except InputError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise InputError(f"is too large ({error})") from error
    except UnidentifiedImageError as error:
        raise InputError("is of no known format") from error
    except Exception as error:  # Pillow lets its decoders' errors through, of every kind, where a file is damaged
        raise InputError(f"is no readable image ({_line(error)})") from error
    raise InputError("has 32-bit or floating-point values, whose range is not known")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no message"


def _check_counts(n: int, size: int) -> None:
    if n < 1:
        raise InputError(f"n is {n}; at least one input is needed")
    if size < 1:
        raise InputError(f"size is {size}; it is a side in pixels, at least 1")


# Text ---------------------------------------------------------------------------------------------------------------


def text_file(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, n: int | None = None, length: int = models.CONTENT_TOKENS
) -> Inputs:
    """A text cut into blocks of `length` word pieces, each between the model's special tokens.

    The text is its lines, stripped and joined by single spaces; empty lines are skipped. Blocks follow each other
    without gap or overlap, whatever sentences they cut; what is left at the end is dropped. A special token that is
    spelt out in the text counts as ordinary text.

    :param path: a text file, UTF-8.
    :param tokenizer: see :func:`dobnb.models.load_tokenizer`.
    :param n: how many blocks, the first n; None takes all.
    :param length: content tokens a block.
    :raises InputError: no such file, no text in it, or not UTF-8; too short for n blocks; n or length below 1, or more
        tokens than the model reads.
    """
    path = Path(path)

    def lines() -> Iterator[str]:
        try:
            with open(path, encoding="utf-8") as file:
                yield from file
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"cannot read {path.name} as text: {reason}; pass a text file in UTF-8") from error

    return _blocks(path.name, lines(), tokenizer, n, length)


PROSE = ("sklearn", "scipy")
"""The packages whose docstrings :func:`docstrings` reads, in this order."""


def docstrings(
    tokenizer: PreTrainedTokenizerBase, n: int | None = None, length: int = models.CONTENT_TOKENS
) -> Inputs:
    """Prose of the docstrings of scikit-learn and SciPy, without a download, in blocks as :func:`text_file` has them.

    Paragraphs of at least 25 words without mark-up are taken, each once, in the order of the files' names. They differ
    between versions of the packages; the digest says which they were.

    :raises InputError: as :func:`text_file`, or a package that is not installed.
    """
    paragraphs = chain.from_iterable(_prose(_installed(package, "the prose")) for package in PROSE)
    versions = " and ".join(f"{_PACKAGES[package]} {metadata.version(_PACKAGES[package])}" for package in PROSE)
    return _blocks(f"docstrings of {versions}", paragraphs, tokenizer, n, length)


def _prose(package: Path) -> Iterator[str]:
    """Paragraphs of prose among the docstrings of a package's sources, which are parsed and not run."""
    seen = set()
    sources = sorted(package.rglob("*.py"), key=lambda file: file.relative_to(package).parts)
    for source in sources:
        if {"tests", "externals", "_lib"} & set(source.relative_to(package).parts):
            continue
        for node in ast.walk(ast.parse(source.read_bytes())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                words = paragraph.split()
                text = " ".join(words)
                plain = text[:1].isupper() and text.endswith(".") and not re.search(r"[=<>{}\[\]_|*`:\\#@]|--", text)
                if len(words) >= 25 and plain and text not in seen:
                    seen.add(text)
                    yield text


def wikitext(
    tokenizer: PreTrainedTokenizerBase, n: int | None = None, length: int = models.CONTENT_TOKENS
) -> Inputs:
    """The validation part of WikiText-2 (raw), in blocks as :func:`text_file` has them, through ``datasets``.

    :raises InputError: ``datasets`` is not installed or cannot get the text; and as :func:`text_file`.
    """
    try:
        import datasets  # an extra
    except ModuleNotFoundError as error:
        raise InputError("WikiText-2 comes through datasets, which is not there; run pip install datasets") from error
    try:
        data = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="validation")
    except Exception as error:  # of the hub's client, its transport, the reader and the system
        raise InputError(
            f"datasets cannot get WikiText-2: {type(error).__name__} ({_line(error)}); "
            "check the network, or pass a text file"
        ) from error
    return _blocks("WikiText-2, validation", data["text"], tokenizer, n, length)


def random_words(model: str, n: int, length: int = models.CONTENT_TOKENS, seed: int = 0) -> Inputs:
    """Blocks of word pieces drawn uniformly from a model's vocabulary, between its special tokens; no tokenizer needed.

    They are no text: no word is common and hardly one comes twice. The first 1000 ids are left out, among which BERT
    has special and unused ones, and the last, which is RoBERTa's mask. Row i depends on seed and i alone.

    :param model: a language model of :data:`dobnb.models.MODELS`, whose card says which tokens are special.
    :raises InputError: another model; n or length below 1, or more tokens than the model reads.
    """
    card = models.MODELS.get(model)
    if card is None or card.special_ids is None or card.limit is None:
        known = ", ".join(name for name, one in models.MODELS.items() if one.special_ids)
        raise InputError(f"the vocabulary of {model} is not known here; pass a text, or one of {known}")
    _check_lengths(n, length, 2, card.limit)
    vocabulary = models.config_of(card).vocab_size
    rows = []
    for i in range(n):
        # Python promises that random() gives the same numbers in every version; its other methods it does not.
        draw = random.Random(f"{seed} {i}")
        rows.append([1000 + int(draw.random() * (vocabulary - 1001)) for _ in range(length)])
    start, stop = ([one] for one in card.special_ids)
    return _text(f"{n} x {length} random word pieces, seed {seed}", torch.tensor(rows, dtype=torch.int32), start, stop)


def _check_lengths(n: int | None, length: int, special: int, limit: int) -> None:
    if length < 1 or (n is not None and n < 1):
        raise InputError(f"n is {n} and length is {length}; both are at least 1")
    if length + special > limit:
        raise InputError(
            f"{length} word pieces and {special} special tokens are {length + special}, more than the {limit} that the "
            f"model reads; pass a length of at most {limit - special}"
        )


def word_pieces(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> list[str]:
    """The pieces of a text as they read, one an id; a space before the first piece of a word.

    :param tokenizer: one that marks what continues a word with ``##``, or byte by byte what begins one.
    """
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    if "##s" in tokenizer.get_vocab():
        return [piece[2:] if piece.startswith("##") else f" {piece}" for piece in pieces]
    return [tokenizer.convert_tokens_to_string([piece]) for piece in pieces]


def _blocks(
    what: str, lines: Iterable[str], tokenizer: PreTrainedTokenizerBase, n: int | None, length: int
) -> Inputs:
    """Cut lines into blocks of `length` tokens; no more lines are read than it takes."""
    start, stop = _around(tokenizer)
    _check_lengths(n, length, len(start) + len(stop), tokenizer.model_max_length)
    pieces: list[np.ndarray] = []
    have = 0
    for line in lines:
        if n is not None and have >= n * length:
            break
        if words := line.strip():
            # Tokenizers that tell a word by the space before it are given that space, but at the very start.
            ids = tokenizer(
                f" {words}" if pieces else words,
                add_special_tokens=False,
                split_special_tokens=True,
                padding=False,
                truncation=False,
                verbose=False,
            )["input_ids"]
            pieces.append(np.array(ids, dtype=np.int32))
            have += len(ids)
    count = have // length if n is None else n
    if have < max(count, 1) * length:
        raise InputError(
            f"{what} makes {have // length} blocks of {length} word pieces, {max(count, 1)} were asked for; "
            "ask for fewer, or shorter ones"
        )
    blocks = torch.from_numpy(np.concatenate(pieces)[: count * length].reshape(count, length))
    return _text(f"{count} x {length} word pieces of {what}", blocks, start, stop)


def _text(name: str, blocks: Tensor, start: list[int], stop: list[int]) -> Inputs:
    """Inputs out of the ids of blocks, int32, shape (n, length), with special tokens before and after each."""
    n, length = blocks.shape
    settings = {"kind": "text", "length": length, "start": start, "stop": stop}
    digest = provenance.digest(json.dumps(settings).encode(), blocks.numpy().astype("<i4").tobytes())

    def batch(first: int, last: int) -> Mapping[str, Tensor]:
        some = blocks[first:last].long()
        special = [torch.tensor(ids, dtype=torch.int64).expand(len(some), -1) for ids in (start, stop)]
        ids = torch.cat([special[0], some, special[1]], 1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return Inputs(name, digest, n, batch)


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text."""
    bare = tokenizer("a", add_special_tokens=False, padding=False, truncation=False)["input_ids"]
    whole = tokenizer("a", padding=False, truncation=False)["input_ids"]
    for first in range(len(whole) - len(bare) + 1):
        if whole[first : first + len(bare)] == bare:
            return whole[:first], whole[first + len(bare) :]
    raise InputError("the tokenizer does not put its special tokens around a text; build the inputs with from_tensors")
