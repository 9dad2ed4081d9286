"""Images as the model sees them. Expected pixels come from numpy and Pillow calls written out here."""

import base64
import csv
import functools
import hashlib
import http.server
import importlib.metadata
import importlib.resources
import inspect
import io
import sys
import tarfile
import threading
from pathlib import Path

import datasets
import numpy as np
import pytest
import scipy
import sklearn
import torch
from hub_models import PROCESSORS
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import RobertaProcessing, TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import BitImageProcessorPil, PreTrainedTokenizerFast, ViTImageProcessorPil

from dobnb import inputs
from dobnb.inputs import (
    PHOTOGRAPHS,
    InputError,
    docstrings,
    from_tensors,
    image_folder,
    imagenette,
    photographs,
    read_inputs,
    text_file,
    to_image,
    wikitext,
    word_pieces,
)
from dobnb.models import MODELS, Preprocessing, load_tokenizer

MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def normalised(pixels):
    """(H, W, 3) uint8 as the model takes it."""
    return ((pixels / 255 - MEAN) / DEVIATION).transpose(2, 0, 1)


def noise(height, width, seed=0, channels=3):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three images, stored in another order than that of their names."""
    (tmp_path / "pictures").mkdir()
    for name in ("c", "a", "b"):
        Image.fromarray(noise(32, 40, seed=ord(name))).save(tmp_path / "pictures" / f"{name}.png")
    return tmp_path / "pictures"


def only(folder, size=28):
    return image_folder(folder, size=size).batch(0, 1)["pixel_values"][0].numpy()


def left_out(folder):
    """What is left out of `folder`, and why; one image that can be used is put beside it."""
    Image.fromarray(noise(32, 32)).save(folder / "spare.png")
    images = image_folder(folder, size=28)
    assert len(images) == 1
    return dict(images.left_out)


# Photographs


def test_photographs_are_what_a_model_takes():
    seven = photographs(7)
    pixels = seven.batch(0, 7)["pixel_values"]
    assert len(seven) == 7
    assert pixels.shape == (7, 3, 224, 224) and pixels.dtype == torch.float32
    shown = to_image(pixels)
    assert shown.shape == (7, 224, 224, 3) and shown.dtype == np.uint8
    for image, values in zip(shown, pixels.numpy(), strict=True):
        assert np.abs(normalised(image) - values).max() < 1e-5
        assert len(np.unique(image.reshape(-1, 3), axis=0)) > 1000  # a picture in colour
        assert (image[..., 0] != image[..., 2]).any()


def test_a_photograph_depends_on_seed_and_index_alone():
    whole = photographs(13).batch(0, 13)["pixel_values"]
    more = photographs(40)
    for start, stop in ((0, 1), (1, 6), (6, 13)):
        assert torch.equal(more.batch(start, stop)["pixel_values"], whole[start:stop])
    assert not torch.equal(photographs(13, seed=1).batch(0, 13)["pixel_values"], whole)


def test_crops_of_one_photograph_differ():
    cycle = len(PHOTOGRAPHS)
    pixels = photographs(20 * cycle).batch(0, 20 * cycle)["pixel_values"]
    for first in range(cycle):
        crops = pixels[first::cycle]
        assert len({crop.numpy().tobytes() for crop in crops}) == 20


def test_a_crop_of_the_full_height_is_a_square_of_the_photograph():
    """At 300 px Chelsea, 300 px high, is cut and not resized, so each crop is found in the file."""
    source = np.asarray(Image.open(importlib.resources.files("skimage") / "data" / "chelsea.png"))
    assert source.shape == (300, 451, 3)
    crop = to_image(photographs(2, size=300).batch(1, 2)["pixel_values"])[0]
    assert any(np.array_equal(source[:, left : left + 300], crop) for left in range(152))


def test_photographs_may_be_enlarged():
    assert photographs(2, size=518).batch(0, 2)["pixel_values"].shape == (2, 3, 518, 518)


def test_every_photograph_ships_inside_its_wheel():
    """It is in the wheel's list of files, under the sha256 that dobnb pins, so nothing is downloaded for it."""
    for photograph in PHOTOGRAPHS:
        distribution = {"skimage": "scikit-image", "sklearn": "scikit-learn"}[photograph.package]
        rows = {
            row[0]: row[1]
            for row in csv.reader(importlib.metadata.distribution(distribution).read_text("RECORD").splitlines())
        }
        encoded = base64.urlsafe_b64encode(bytes.fromhex(photograph.sha256)).rstrip(b"=").decode()
        assert rows[f"{photograph.package}/{photograph.path}"] == f"sha256={encoded}"


def test_another_file_under_a_photographs_name_is_refused(monkeypatch, tmp_path):
    (tmp_path / "data").mkdir()
    Image.fromarray(noise(300, 300)).save(tmp_path / "data" / "chelsea.png")
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(inputs.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(InputError, match=r"chelsea.png of scikit-image has sha256 .* constraints.txt"):
        inputs._photograph.__wrapped__(PHOTOGRAPHS[1])
    monkeypatch.setattr(inputs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install scikit-image"):
        inputs._photograph.__wrapped__(PHOTOGRAPHS[1])


def test_the_digest_of_photographs_follows_what_they_are():
    assert photographs(3).digest == photographs(3).digest
    others = {photographs(4).digest, photographs(3, size=112).digest, photographs(3, seed=1).digest}
    assert len(others | {photographs(3).digest}) == 4
    assert photographs(3).name == "3 crops of 6 photographs, 224 px, seed 0"


# Folders


def test_images_come_sorted_by_name(folder):
    pixels = image_folder(folder, size=28).batch(0, 3)["pixel_values"].numpy()
    for values, name in zip(pixels, "abc", strict=True):
        expected = normalised(noise(32, 40, seed=ord(name))[2:30, 6:34])  # 28 of 32 rows, 28 of 40 columns
        assert np.abs(values - expected).max() < 1e-6


def test_a_folder_is_read_the_same_in_any_batches(folder):
    images = image_folder(folder, size=28)
    whole = images.batch(0, 3)["pixel_values"]
    assert torch.equal(torch.cat([images.batch(i, i + 1)["pixel_values"] for i in range(3)]), whole)
    assert torch.equal(image_folder(folder, n=2, size=28).batch(0, 2)["pixel_values"], whole[:2])


def test_imagenet_is_cut_and_not_resized(test_data):
    """What the brute-force reference did: centre crop 224 of 256, ImageNet's mean and deviation."""
    images = image_folder(test_data / "imagenet_512")
    assert len(images) == 512
    files = sorted((test_data / "imagenet_512").glob("*.jpg"), key=lambda file: file.name)
    for i in (0, 255, 511):
        expected = normalised(np.asarray(Image.open(files[i]).convert("RGB"))[16:240, 16:240])
        assert np.abs(images.batch(i, i + 1)["pixel_values"][0].numpy() - expected).max() < 1e-6


@pytest.mark.parametrize("shape", [(64, 80), (80, 64), (16, 20), (28, 28)])
def test_other_sizes_are_resized_on_their_shorter_side(tmp_path, shape):
    pixels = noise(*shape)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    height, width = (32 * side // min(shape) for side in shape)
    resized = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))
    top, left = (height - 28) // 2, (width - 28) // 2
    expected = normalised(resized[top : top + 28, left : left + 28])
    assert np.abs(only(tmp_path) - expected).max() < 1e-6


def test_exif_orientation_is_honoured(tmp_path):
    pixels = noise(32, 32)
    exif = Image.Exif()
    exif[0x0112] = 6  # show it turned a quarter clockwise
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    expected = normalised(np.rot90(pixels, -1)[2:30, 2:30])
    assert np.abs(only(tmp_path) - expected).max() < 1e-6


def test_greyscale_palette_and_cmyk_become_rgb(tmp_path):
    grey = noise(32, 32, channels=1)[..., 0]
    three = normalised(np.repeat(grey[..., None], 3, -1)[2:30, 2:30])
    Image.fromarray(grey).save(tmp_path / "a.png")
    assert np.abs(only(tmp_path) - three).max() < 1e-6
    Image.fromarray(grey).convert("P").save(tmp_path / "a.png")
    assert np.abs(only(tmp_path) - three).max() < 1e-6
    Image.new("CMYK", (32, 32), (0, 255, 255, 0)).save(tmp_path / "a.tif")  # magenta and yellow ink: red
    (tmp_path / "a.png").unlink()
    assert to_image(torch.from_numpy(only(tmp_path))).reshape(-1, 3).tolist() == [[255, 0, 0]] * 28 * 28


def test_an_alpha_channel_is_dropped_where_nothing_shines_through(tmp_path):
    pixels = noise(32, 32)
    opaque = np.dstack([pixels, np.full((32, 32), 255, np.uint8)])
    Image.fromarray(opaque).save(tmp_path / "a.png")
    assert np.abs(only(tmp_path) - normalised(pixels[2:30, 2:30])).max() < 1e-6
    opaque[5, 5, 3] = 254
    Image.fromarray(opaque).save(tmp_path / "a.png")
    assert left_out(tmp_path) == {"a.png": "has transparent pixels, behind which anything may lie"}


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bit_grey_is_scaled(tmp_path, suffix):
    """Values 0 ... 65535 become 0 ... 255, to the nearest."""
    grey = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32) * 64 + 40
    Image.fromarray(grey).save(tmp_path / f"deep.{suffix}")
    expected = np.rint(grey * (255 / 65535)).astype(np.uint8)
    assert expected.min() == 0 and expected.max() == 255
    three = normalised(np.repeat(expected[..., None], 3, -1)[2:30, 2:30])
    assert np.abs(only(tmp_path) - three).max() < 1e-6


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_values_of_unknown_range_are_left_out(tmp_path, dtype):
    Image.fromarray(noise(32, 32, channels=1)[..., 0].astype(dtype)).save(tmp_path / "deep.tif")
    assert left_out(tmp_path) == {"deep.tif": "has 32-bit or floating-point values, whose range is not known"}


@pytest.mark.parametrize("suffix", ["png", "jpg"])
@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_a_damaged_file_is_left_out_and_named(tmp_path, suffix, damage):
    file = tmp_path / f"damaged.{suffix}"
    Image.fromarray(noise(32, 32)).save(file)
    content = file.read_bytes()
    file.write_bytes({"cut": content[: len(content) // 2], "text": b"not an image", "empty": b""}[damage])
    (reason,) = left_out(tmp_path).values()
    assert reason.startswith("is no readable image" if damage == "cut" else "is of no known format")
    assert "\n" not in reason


@pytest.mark.parametrize("kind", ["gif", "png", "webp", "tif"])
def test_of_an_animation_the_first_frame_is_taken(tmp_path, kind):
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if kind == "webp" else {}
    frames[0].save(tmp_path / f"moving.{kind}", save_all=True, append_images=frames[1:], **options)
    with Image.open(tmp_path / f"moving.{kind}") as opened:
        assert opened.n_frames == 2
    assert to_image(torch.from_numpy(only(tmp_path))).reshape(-1, 3).tolist() == [[255, 0, 0]] * 28 * 28


def test_an_enormous_image_is_left_out_before_it_is_decoded(tmp_path, monkeypatch):
    Image.fromarray(noise(40, 40)).save(tmp_path / "large.png")
    Image.fromarray(noise(60, 60)).save(tmp_path / "larger.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1500)  # Pillow warns beyond it, and raises beyond twice that
    found = left_out(tmp_path)
    assert set(found) == {"large.png", "larger.png"}
    assert all(reason.startswith("is too large (Image size (") for reason in found.values())


def test_a_file_of_too_many_bytes_is_left_out_unread(tmp_path, monkeypatch):
    with open(tmp_path / "huge.tif", "wb") as file:
        file.truncate(inputs.MAX_BYTES + 1)  # a hole, which takes no room
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) if path.name != "huge.tif" else pytest.fail("read"))
    assert left_out(tmp_path) == {"huge.tif": "has 1024 MB, more than 1024"}


def test_a_strip_whose_resized_form_is_enormous_is_left_out(tmp_path, monkeypatch):
    Image.fromarray(noise(7, 2000)).save(tmp_path / "strip.png")  # 32 x 9142 px once it is resized
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100_000)
    assert left_out(tmp_path) == {"strip.png": "has 2000 x 7 px, too long a strip to be resized"}


def test_what_is_left_out_is_replaced_by_the_next(folder):
    """Three usable images are asked for; the first of four files is none."""
    (folder / "A.jpg").write_bytes(b"not an image")
    images = image_folder(folder, n=3, size=28)
    assert images.left_out == (("A.jpg", "is of no known format"),) and len(images) == 3
    (folder / "A.jpg").unlink()
    assert image_folder(folder, n=3, size=28).digest == images.digest
    assert image_folder(folder, n=3, size=28).left_out == ()


def test_too_few_usable_images_are_refused_with_the_first_reason(folder):
    (folder / "A.jpg").write_bytes(b"not an image")
    with pytest.raises(InputError, match=r"3 usable images, 4 were asked for; 1 .*first: A\.jpg is of no known format"):
        image_folder(folder, n=4, size=28)


def test_a_file_that_changes_or_goes_after_the_digest_was_taken_is_refused(folder):
    images = image_folder(folder, size=28)
    Image.fromarray(noise(32, 40, seed=9)).save(folder / "b.png")
    images.batch(0, 1)
    with pytest.raises(InputError, match=r"b\.png has changed"):
        images.batch(1, 2)
    (folder / "c.png").unlink()
    with pytest.raises(InputError, match=r"cannot read c\.png"):
        images.batch(2, 3)


def test_an_image_too_small_to_be_enlarged_is_left_out(tmp_path):
    Image.fromarray(noise(55, 300)).save(tmp_path / "strip.png")
    Image.fromarray(noise(56, 300)).save(tmp_path / "wider.png")
    assert image_folder(tmp_path).left_out == (("strip.png", "has 300 x 55 px, too few to make 224"),)
    assert image_folder(tmp_path, size=220).left_out == ()


def test_other_files_and_subfolders_are_left_alone(folder):
    before = image_folder(folder, size=28)
    (folder / "notes.txt").write_text("hello")
    (folder / "deeper.png").mkdir()
    assert image_folder(folder, size=28) == before


def test_the_digest_of_a_folder_follows_its_files_and_not_its_place(folder, tmp_path):
    digest = image_folder(folder, size=28).digest
    folder.rename(tmp_path / "elsewhere")
    moved = image_folder(tmp_path / "elsewhere", size=28)
    assert moved.digest == digest
    assert moved.name == "3 images of elsewhere, 28 px"
    assert (
        len(
            {
                digest,
                image_folder(tmp_path / "elsewhere", n=2, size=28).digest,
                image_folder(tmp_path / "elsewhere", size=14).digest,
            }
        )
        == 3
    )
    Image.fromarray(noise(32, 40, seed=9)).save(tmp_path / "elsewhere" / "b.png")
    assert image_folder(tmp_path / "elsewhere", size=28).digest != digest


def test_a_relative_folder_is_read_from_wherever_a_worker_stands(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    inputs = image_folder(folder.name, 1, 56)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert inputs.batch(0, 1)["pixel_values"].shape == (1, 3, 56, 56)


def test_the_name_is_never_a_path(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert image_folder(".", size=28).name == "3 images of pictures, 28 px"


def test_a_cmyk_jpeg_has_its_colours(tmp_path):
    """Adobe's programs store them inverted, as Pillow does when it writes one."""
    Image.new("CMYK", (32, 32), (0, 255, 255, 0)).save(tmp_path / "a.jpg", quality=100)
    red = to_image(torch.from_numpy(only(tmp_path))).reshape(-1, 3).astype(int)
    assert np.abs(red - [255, 0, 0]).max() <= 4


# Preprocessing


@pytest.mark.parametrize("shape", [(60, 80), (300, 280), (224, 224)])
@pytest.mark.parametrize("name", ["vit-base", "deit-base", "dinov2-base"])
def test_pixels_are_what_transformers_makes_of_the_image(tmp_path, name, shape):
    """Its own processor on Pillow, set up as the model's repository has it."""
    Image.fromarray(noise(*shape)).save(tmp_path / "a.png")
    kind = ViTImageProcessorPil if name == "vit-base" else BitImageProcessorPil
    processor = kind(**{key: value for key, value in PROCESSORS[name].items() if not key.endswith("_type")})
    expected = processor(Image.open(tmp_path / "a.png"), return_tensors="pt")["pixel_values"]
    how = MODELS[name].preprocessing
    found = image_folder(tmp_path, size=how.size, preprocessing=how)
    assert torch.allclose(found.batch(0, 1)["pixel_values"], expected, atol=1e-5)


@pytest.mark.parametrize("mode", ["center", "squash"])
def test_pixels_are_what_timm_makes_of_the_image(tmp_path, mode):
    from timm.data import create_transform

    Image.fromarray(noise(90, 100)).save(tmp_path / "a.png")
    crop = 0.8 if mode == "center" else 1.0  # of 80 x 88 px; where half a pixel is left over, it rounds, we cut off
    transform = create_transform(64, interpolation="bicubic", mean=(0.5,) * 3, std=(0.25,) * 3, crop_pct=crop,
                                 crop_mode=mode)  # fmt: skip
    how = Preprocessing(64, crop if mode == "center" else None, "bicubic", (0.5,) * 3, (0.25,) * 3, argument=None)
    found = image_folder(tmp_path, size=64, preprocessing=how).batch(0, 1)
    assert torch.allclose(found[0], transform(Image.open(tmp_path / "a.png")), atol=1e-5)


def test_the_normalisation_is_undone_and_is_in_the_digest(folder):
    half = Preprocessing(mean=(0.5,) * 3, deviation=(0.5,) * 3)
    ours, theirs = image_folder(folder, size=28), image_folder(folder, size=28, preprocessing=half)
    assert ours.digest != theirs.digest
    pixels = to_image(theirs.batch(0, 3)["pixel_values"], half)
    assert np.array_equal(pixels, to_image(ours.batch(0, 3)["pixel_values"]))
    assert photographs(2).digest != photographs(2, preprocessing=half).digest


# Imagenette


@pytest.fixture
def imagenette_archive(tmp_path, monkeypatch):
    """The layout of the real archive, twelve images of two classes, on a server where torchvision looks for it."""
    from torchvision.datasets import Imagenette

    (tmp_path / "served").mkdir()
    archive = tmp_path / "served" / "imagenette2-320.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        for part in ("train", "val"):
            for number, label in enumerate(("n01440764", "n02102040")):
                for i in range(6):
                    file = io.BytesIO()
                    Image.fromarray(noise(32, 40, seed=10 * number + i)).save(file, "png")  # a PNG keeps its pixels
                    member = tarfile.TarInfo(f"imagenette2-320/{part}/{label}/{i}.JPEG")
                    member.size = file.tell()
                    file.seek(0)
                    tar.addfile(member, file)
    md5 = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    monkeypatch.setenv("DOBNB_HOME", str(tmp_path / "home"))
    for proxy in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(proxy, "127.0.0.1")
    handler = functools.partial(QuietHandler, directory=archive.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        archives = {"320px": (f"http://127.0.0.1:{server.server_port}/{archive.name}", md5)}
        monkeypatch.setattr(Imagenette, "_ARCHIVES", archives)
        yield archives
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def test_imagenette_is_spread_over_its_classes(imagenette_archive):
    found = imagenette(4, 28)
    assert found.name == "4 images of Imagenette, 28 px" and len(found) == 4
    for i, seed in enumerate((0, 3, 10, 13)):  # images 0, 3, 6 and 9 of twelve
        expected = normalised(noise(32, 40, seed=seed)[2:30, 6:34])
        assert np.abs(found.batch(i, i + 1)["pixel_values"][0].numpy() - expected).max() < 1e-6
    assert imagenette(4, 28) == found
    assert len({imagenette(n, size).digest for n, size in ((4, 28), (12, 28), (4, 14))}) == 3
    assert read_inputs("imagenette", "dinov2-small-saliency", 4, size=28) == found
    with pytest.raises(InputError, match="has 12 images, 13 were asked for"):
        imagenette(13)


def test_imagenette_that_cannot_be_had(imagenette_archive):
    address, md5 = imagenette_archive["320px"]
    for wrong in ((address, "0" * 32), (address.replace("imagenette2", "elsewhere"), md5)):
        imagenette_archive["320px"] = wrong
        with pytest.raises(InputError, match=r"torchvision cannot get Imagenette: (RuntimeError|HTTPError)") as caught:
            imagenette(2)
        assert "\n" not in str(caught.value)
    imagenette_archive["320px"] = (address, md5)
    assert len(imagenette(2)) == 2


# Text


@pytest.fixture(scope="module")
def wordpiece():
    return load_tokenizer("minilm-l6")


@pytest.fixture(scope="module")
def byte_pairs():
    """A tokenizer like RoBERTa's, which tells a word by the space before it, trained on this file."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    special = ["<s>", "<pad>", "</s>"]
    trainer = BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=ByteLevel.alphabet(),
                         show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="<s>", sep_token="</s>", pad_token="<pad>", model_max_length=512
    )


TEXT = """
 = A heading =

The Dobrushin coefficient bounds a chain's contraction.  It is at most 1;
[SEP] and </s> are spelt out here, and so is <s>.

A last line, with an uncommonword.
"""


@pytest.fixture
def text(tmp_path):
    (tmp_path / "words.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "words.txt"


@pytest.mark.parametrize("kind", ["wordpiece", "byte_pairs"])
def test_blocks_are_the_whole_text_cut_up(kind, text, request):
    """The lines joined by spaces and tokenized in one go, its special tokens read as text."""
    tokenizer = request.getfixturevalue(kind)
    joined = " ".join(line.strip() for line in TEXT.splitlines() if line.strip())
    whole = tokenizer(joined, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    start, stop = tokenizer.cls_token_id, tokenizer.sep_token_id
    assert start not in whole and stop not in whole
    blocks = text_file(text, tokenizer, length=7)
    assert len(blocks) == len(whole) // 7 and blocks.size is None
    assert blocks.name == f"{len(blocks)} x 7 word pieces of words.txt"
    batch = blocks.batch(0, len(blocks))
    expected = [[start, *whole[7 * i : 7 * i + 7], stop] for i in range(len(blocks))]
    assert batch["input_ids"].tolist() == expected and batch["input_ids"].dtype == torch.int64
    assert batch["attention_mask"].tolist() == [[1] * 9] * len(blocks)
    assert blocks.batch(1, 3)["input_ids"].tolist() == expected[1:3]


def test_the_digest_of_a_text_follows_its_blocks_and_not_its_file(text, wordpiece, byte_pairs):
    digest = text_file(text, wordpiece, 3, 7).digest
    others = {
        text_file(text, wordpiece, 2, 7).digest,
        text_file(text, wordpiece, 3, 6).digest,
        text_file(text, byte_pairs, 3, 7).digest,
    }
    assert len(others | {digest}) == 4
    moved = text.rename(text.with_name("elsewhere.txt"))
    moved.write_text(moved.read_text() + "more, which is not reached")
    assert text_file(moved, wordpiece, 3, 7).digest == digest


def test_no_more_of_a_file_is_read_than_it_takes(tmp_path, wordpiece):
    (tmp_path / "long.txt").write_bytes(b"a word\n" * 10_000 + b"\xff\n")
    assert len(text_file(tmp_path / "long.txt", wordpiece, 20, 10)) == 20
    with pytest.raises(InputError, match=r"cannot read long\.txt as text: 'utf-8' codec .* pass a text file in UTF-8"):
        text_file(tmp_path / "long.txt", wordpiece, None, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(n=500), r"words\.txt makes 0 blocks of 126 word pieces, 500 were asked for"),
        (dict(n=None), "makes 0 blocks of 126 word pieces, 1 were asked for"),
        (dict(n=0), "n is 0 and length is 126"),
        (dict(length=0), "n is None and length is 0"),
        (dict(length=511), "511 word pieces and 2 special tokens are 513, more than the 512 .* at most 510"),
    ],
)
def test_texts_that_do_not_do(text, wordpiece, arguments, message):
    with pytest.raises(InputError, match=message):
        text_file(text, wordpiece, **arguments)


def test_a_text_that_is_none(tmp_path, wordpiece):
    with pytest.raises(InputError, match=r"cannot read nothing\.txt as text: No such file"):
        text_file(tmp_path / "nothing.txt", wordpiece)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(InputError, match="makes 0 blocks"):
        text_file(tmp_path / "empty.txt", wordpiece)


@pytest.mark.parametrize("kind", ["wordpiece", "byte_pairs"])
def test_word_pieces_read_as_the_text(kind, request):
    """Put together, they are the text; each begins a word exactly if it brings its space."""
    tokenizer = request.getfixturevalue(kind)
    said = "unbelievable tokenizers read this"
    pieces = word_pieces(tokenizer, tokenizer(said, add_special_tokens=False)["input_ids"])
    assert len(pieces) > 4 and "".join(pieces).strip() == said


def test_a_tokenizer_that_puts_nothing_around_or_only_one_side(text, byte_pairs):
    for special, around in (("<s> $A", ([0], [])), ("$A", ([], []))):
        tokenizer = Tokenizer.from_str(byte_pairs.backend_tokenizer.to_str())
        tokenizer.post_processor = TemplateProcessing(special, special_tokens=[("<s>", 0)])
        changed = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        ids = text_file(text, changed, 2, 5).batch(0, 2)["input_ids"]
        assert ids.shape == (2, 5 + len(around[0]))
        assert inputs._around(changed) == around


def test_docstrings_are_prose_and_the_same_every_time(wordpiece):
    found = docstrings(wordpiece, 40)
    assert len(found) == 40 and found.batch(0, 40)["input_ids"].shape == (40, 128)
    assert docstrings(wordpiece, 40) == found
    assert found.name == f"40 x 126 word pieces of docstrings of scikit-learn {sklearn.__version__} and scipy " + (
        scipy.__version__
    )
    words = wordpiece.decode(found.batch(0, 40)["input_ids"][:, 1:-1].flatten()).split()
    assert sum(word.isalpha() for word in words) > 0.75 * len(words)
    blocks = {tuple(ids) for ids in found.batch(0, 40)["input_ids"].tolist()}
    assert len(blocks) == 40


def test_docstrings_of_a_package_that_is_not_there(monkeypatch, wordpiece):
    monkeypatch.setattr(inputs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="run pip install scikit-learn"):
        docstrings(wordpiece, 1)


def test_wikitext_comes_through_datasets(monkeypatch, wordpiece, tmp_path):
    asked = []

    def load_dataset(*arguments, **options):
        inspect.signature(real).bind(*arguments, **options)
        asked.append((*arguments, options))
        return datasets.Dataset.from_dict({"text": TEXT.splitlines(keepends=True)})

    real = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = read_inputs("wikitext-2", "minilm-l6", 3, length=7)
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", {"split": "validation"})]
    assert found.name == "3 x 7 word pieces of WikiText-2, validation"
    (tmp_path / "same.txt").write_text(TEXT)
    assert found.digest == text_file(tmp_path / "same.txt", wordpiece, 3, 7).digest

    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **o: (_ for _ in ()).throw(ConnectionError("no\nnet")))
    with pytest.raises(InputError, match=r"datasets cannot get WikiText-2: ConnectionError \(no net\)") as caught:
        wikitext(wordpiece)
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="run pip install datasets"):
        wikitext(wordpiece)


# Tensors


def test_ones_own_tensors_come_back_in_slices():
    table = torch.arange(12.0).reshape(4, 3)
    assert torch.equal(from_tensors(table, "mine").batch(1, 3), table[1:3])
    both = from_tensors({"a": table, "b": table[:, 0] > 2}, "mine")
    batch = both.batch(2, 4)
    assert len(both) == 4 and set(batch) == {"a", "b"}
    assert torch.equal(batch["a"], table[2:]) and batch["b"].tolist() == [True, True]


def test_the_digest_of_tensors_follows_every_byte():
    table = torch.zeros(4, 3)
    changed = table.clone()
    changed[3, 2] = 1e-30
    several = [table, changed, table.double(), table.reshape(4, 3, 1), table[:3], table.bfloat16()]
    several += [{"x": table}, {"y": table}]
    digests = [from_tensors(data, "name").digest for data in several]
    assert len(set(digests)) == len(several)
    assert from_tensors(table.T.contiguous().T, "another").digest == digests[0]


@pytest.mark.parametrize(
    "data", [{}, [1, 2], torch.tensor(1.0), torch.zeros(0, 3), {"a": torch.zeros(2), "b": torch.zeros(3)}, {"a": 1}]
)
def test_tensors_that_are_none_or_do_not_match(data):
    with pytest.raises(InputError, match="mine: "):
        from_tensors(data, "mine")


# By name


def test_inputs_by_name_are_what_the_functions_give(folder, text, wordpiece):
    name = "dinov2-small-saliency"
    assert read_inputs("embedded", name) == photographs(32)
    assert read_inputs("embedded", name, 3, size=28) == photographs(3, 28)
    assert read_inputs(str(folder), name, 2, size=28) == image_folder(folder, 2, 28)
    assert read_inputs("embedded", "minilm-l6", 4) == docstrings(wordpiece, 4, 126)
    assert read_inputs(str(text), "minilm-l6", length=5) == text_file(text, wordpiece, None, 5)


def test_a_folder_that_is_called_as_a_dataset_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("embedded").mkdir()
    Image.fromarray(noise(32, 32)).save("embedded/a.png")
    assert len(read_inputs("./embedded", "dinov2-small-saliency", size=28)) == 1
    assert len(read_inputs("embedded", "dinov2-small-saliency", size=28)) == 32


@pytest.mark.parametrize(
    ("source", "model", "options", "message"),
    [
        ("nowhere", "minilm-l6", {}, "there is no folder or file nowhere; pass one, or embedded, imagenette"),
        ("imagenette", "minilm-l6", {}, "minilm-l6 reads text; pass a text file"),
        ("wikitext-2", "dinov2-small-saliency", {}, "reads images; pass a folder of them"),
        ("embedded", "minilm-l6", {"size": 224}, "reads text, which has no size in pixels"),
        ("embedded", "dinov2-small-saliency", {"length": 30}, "reads images, which have no length in words"),
        ("embedded", "dinov2-small-saliency", {"n": 0}, "n is 0"),
        ("embedded", "minilm-l6", {"n": 0}, "n is 0"),
    ],
)
def test_inputs_by_name_that_do_not_do(source, model, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        read_inputs(source, model, **options)


# Refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: photographs(0), "n is 0"),
        (lambda folder: photographs(3, size=0), "size is 0"),
        (lambda folder: image_folder(folder / "nowhere"), "is not a folder"),
        (lambda folder: image_folder(folder / "a.png"), "is not a folder"),
        (lambda folder: image_folder(folder.parent), "holds no image"),
        (lambda folder: image_folder(folder, n=4, size=28), "holds 3 usable images, 4 were asked for"),
        (lambda folder: image_folder(folder, n=0), "n is 0"),
        (lambda folder: photographs(3).batch(0, 4), "batch 0 ... 4 is not within 0 ... 3"),
        (lambda folder: photographs(3).batch(2, 2), "batch 2 ... 2"),
        (lambda folder: photographs(3).batch(-1, 2), "batch -1 ... 2"),
        (lambda folder: to_image(torch.zeros(2, 4, 5)), "pixel values have shape"),
    ],
)
def test_bad_calls_are_refused(folder, call, message):
    with pytest.raises(InputError, match=message):
        call(folder)
