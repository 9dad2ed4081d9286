"""Images as the model sees them. Expected pixels come from numpy and Pillow calls written out here."""

import base64
import csv
import importlib.metadata
import importlib.resources
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dobnb import inputs
from dobnb.inputs import PHOTOGRAPHS, InputError, image_folder, photographs, to_image

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


def test_the_name_is_never_a_path(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert image_folder(".", size=28).name == "3 images of pictures, 28 px"


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
