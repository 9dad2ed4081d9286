"""Images as a vision transformer reads them: photographs that need no download, or a folder of one's own.

Pixels are RGB, scaled to [0, 1], then normalised with ImageNet's mean and standard deviation, as DINOv2 was trained.
Images are read when a batch asks for them, so memory does not grow with their number.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from dobnb import provenance
from dobnb.errors import DobnbError

MEAN = (0.485, 0.456, 0.406)
"""Of ImageNet's training images, for red, green and blue in [0, 1]."""
DEVIATION = (0.229, 0.224, 0.225)


class InputError(DobnbError, ValueError):
    """An image, a folder or a number of inputs cannot be used."""


@dataclass(frozen=True)
class Inputs:
    """Images of one size, numbered from 0, each the same whatever the batch it is read in."""

    name: str
    """What they are, for people; never a path."""
    digest: str
    """sha256 of the pixels or files and of every setting that shapes what the model sees."""
    size: int
    """Side of each image in pixels."""
    n: int
    _image: Callable[[int], np.ndarray] = field(repr=False, compare=False)

    def __len__(self) -> int:
        return self.n

    def batch(self, start: int, stop: int) -> dict[str, Tensor]:
        """Images start ... stop - 1 as keyword arguments of the model.

        :param start: at least 0 and below `stop`.
        :param stop: at most ``len(self)``.
        :return: ``{"pixel_values": float32, shape (stop - start, 3, size, size)}``, normalised.
        :raises InputError: start and stop out of range, or an image that cannot be read or has changed.
        """
        if not 0 <= start < stop <= self.n:
            raise InputError(
                f"batch {start} ... {stop} is not within 0 ... {self.n}; pass 0 <= start < stop <= {self.n}"
            )
        pixels = torch.from_numpy(np.stack([self._image(i) for i in range(start, stop)]))
        return {"pixel_values": (pixels.permute(0, 3, 1, 2).float() / 255 - _column(MEAN)) / _column(DEVIATION)}


def to_image(pixel_values: Tensor) -> np.ndarray:
    """Undo the normalisation, to show what the model saw.

    :param pixel_values: shape (..., 3, H, W), as :meth:`Inputs.batch` returns it.
    :return: uint8, shape (..., H, W, 3), values beyond [0, 255] cut.
    :raises InputError: the third dimension from the end is not 3.
    """
    if pixel_values.ndim < 3 or pixel_values.shape[-3] != 3:
        raise InputError(f"pixel values have shape {tuple(pixel_values.shape)}; pass (..., 3, H, W)")
    pixels = pixel_values.detach().cpu().double() * _column(DEVIATION) + _column(MEAN)
    return (pixels * 255).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).numpy()


def _column(values: tuple[float, ...]) -> Tensor:
    """Shape (3, 1, 1), to meet (..., 3, H, W)."""
    return torch.tensor(values).view(3, 1, 1)


# Photographs --------------------------------------------------------------------------------------------------------


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

_PACKAGES = {"skimage": "scikit-image", "sklearn": "scikit-learn"}


def photographs(n: int, size: int = 224, seed: int = 0) -> Inputs:
    """Seeded random crops of the photographs in `PHOTOGRAPHS`, without a download.

    Crop i is of photograph i modulo 6: a random square with a side between `size` and the photograph's shorter side,
    which is the side where `size` is larger, resized to `size` (bicubic, antialiased). It depends on seed and i alone.
    Crops of one photograph overlap, so they are far from independent images.

    :param n: how many, at least 1.
    :param size: side in pixels.
    :param seed: of the crops.
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

    settings = json.dumps({"kind": "photographs", "n": n, "size": size, "seed": seed})
    digest = provenance.digest(settings.encode(), *(np.asarray(source).tobytes() for source in sources))
    return Inputs(f"{n} crops of {len(sources)} photographs, {size} px, seed {seed}", digest, size, n, crop)


@cache
def _photograph(photograph: Photograph) -> Image.Image:
    """The decoded photograph, RGB."""
    distribution = _PACKAGES[photograph.package]
    spec = importlib.util.find_spec(photograph.package)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"{photograph.title} is in {distribution}, which is not installed; run pip install {distribution}"
        )
    path = Path(spec.submodule_search_locations[0]) / photograph.path
    content = _read(path)
    if (found := hashlib.sha256(content).hexdigest()) != photograph.sha256:
        raise InputError(
            f"{path.name} of {distribution} has sha256 {found}, expected {photograph.sha256}; "
            "install the version that constraints.txt names"
        )
    return _decode(content, path.name)


# Folders ------------------------------------------------------------------------------------------------------------

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
"""What counts as an image in a folder, upper or lower case."""


def image_folder(path: str | Path, n: int | None = None, size: int = 224) -> Inputs:
    """The images of a folder, sorted by file name.

    Each is resized so that its shorter side is 256/224 of `size` (bicubic, antialiased), then the centre is cut out. An
    image whose shorter side has that length already is not resized. Images are turned as their EXIF data say; greyscale
    and CMYK become RGB.

    :param path: the folder; subfolders and files without one of `SUFFIXES` are left alone.
    :param n: how many, the first n by name; None takes all.
    :param size: side in pixels.
    :raises InputError: no folder, no image, fewer than n, or n or size below 1; a file that is no image, is damaged,
        has transparent pixels or 16-bit or floating-point grey values, or has fewer than a quarter of `size` pixels
        on its shorter side.
        From ``batch``: a file that has changed since.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; pass a folder of images")
    files = sorted(
        (file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file()), key=lambda f: f.name
    )
    if not files:
        raise InputError(f"{folder} holds no image; images end in {', '.join(SUFFIXES)}")
    count = len(files) if n is None else n
    _check_counts(count, size)
    if count > len(files):
        raise InputError(f"{folder} holds {len(files)} images, {count} were asked for; ask for fewer")
    files = files[:count]
    digests = []
    for file in files:  # each is decoded once before anything runs: a damaged file is no news for hour three
        content = _read(file)
        width, height = _decode(content, file.name).size
        if min(width, height) < size / 4:
            raise InputError(f"{file.name} has {width} x {height} px, too few to make {size}; take it out")
        digests.append(hashlib.sha256(content).hexdigest())

    def load(i: int) -> np.ndarray:
        content = _read(files[i])
        if hashlib.sha256(content).hexdigest() != digests[i]:
            raise InputError(f"{files[i].name} has changed since the folder was read; start again")
        return np.asarray(_centre(_decode(content, files[i].name), size))

    settings = json.dumps({"kind": "image_folder", "size": size})
    digest = provenance.digest(settings.encode(), *(one.encode() for one in digests))
    return Inputs(f"{count} images of {folder.resolve().name}, {size} px", digest, size, count, load)


def _centre(image: Image.Image, size: int) -> Image.Image:
    """The centre of `image`, `size` px square, after its shorter side was brought to 256/224 of that."""
    target = round(size * 256 / 224)
    width, height = image.size
    shorter = min(width, height)
    if shorter != target:
        width, height = (target * width // shorter, target * height // shorter)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


# Files --------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path.name}: {error.strerror or error}; put the file back") from error


def _decode(content: bytes, name: str) -> Image.Image:
    """Decode an image file to RGB, turned as its EXIF data say."""
    try:
        with Image.open(io.BytesIO(content)) as opened:
            image = ImageOps.exif_transpose(opened)
            image.load()
    # Pillow raises SyntaxError for damaged PNG chunks, ValueError for impossible headers, OSError for most else.
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        reason = "of no known format" if isinstance(error, UnidentifiedImageError) else error
        raise InputError(f"{name} is no readable image ({reason}); replace it or take it out") from error
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        raise InputError(f"{name} has 16-bit or floating-point grey values; save it with 8 bits a channel")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema()[0] < 255:
            raise InputError(
                f"{name} has transparent pixels, behind which anything may lie; save it without transparency"
            )
    return image.convert("RGB")


def _check_counts(n: int, size: int) -> None:
    if n < 1:
        raise InputError(f"n is {n}; at least one input is needed")
    if size < 1:
        raise InputError(f"size is {size}; it is a side in pixels, at least 1")
