"""Any usual image file becomes upright RGB pixels of a bounded number; anything else is a sentence."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from treadle.errors import BadRequest
from treadle.vision.decode import decode, fitting

MANY = 10**7
RED, BLUE = (220, 20, 20), (20, 20, 220)


def halves(width: int = 32, height: int = 16) -> Any:
    """Red on the left, blue on the right."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2], pixels[:, width // 2 :] = RED, BLUE
    return Image.fromarray(pixels)


def file_of(image: Any, kind: str, **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def colours(image: Any) -> tuple[Any, Any]:
    """Of the left and of the right, far from the edge between them."""
    width, height = image.size
    return image.getpixel((width // 8, height // 2)), image.getpixel((width - 1 - width // 8, height // 2))


def near(a: Any, b: Any, by: int = 40) -> bool:
    return all(abs(x - y) <= by for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_every_usual_format_is_read(kind: str) -> None:
    image = decode(file_of(halves(), kind), MANY, param="x")
    assert image.mode == "RGB" and image.size == (32, 16)
    left, right = colours(image)
    assert near(left, RED) and near(right, BLUE)


def test_cmyk_is_read_as_the_colours_it_means() -> None:
    left, right = colours(decode(file_of(halves().convert("CMYK"), "JPEG", quality=95), MANY, param="x"))
    assert near(left, RED) and near(right, BLUE)


@pytest.mark.parametrize("mode", ["P", "1", "L", "LA", "RGBA", "I;16"])
def test_other_kinds_of_pixels_become_rgb(mode: str) -> None:
    image = halves().convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    made = decode(file_of(image, "PNG"), MANY, param="x")
    assert made.mode == "RGB" and made.size == (32, 16)
    if mode in ("L", "LA", "I;16"):
        assert near(colours(made)[0], halves().convert("L").convert("RGB").getpixel((4, 8)), by=3)


def test_transparent_parts_are_white() -> None:
    image = halves().convert("RGBA")
    image.putalpha(Image.new("L", image.size, 0))
    assert colours(decode(file_of(image, "PNG"), MANY, param="x")) == ((255,) * 3,) * 2


@pytest.mark.parametrize(
    ("orientation", "size", "swapped"), [(1, (32, 16), False), (3, (32, 16), True), (6, (16, 32), None)]
)
def test_a_photo_stands_upright_as_its_camera_says(orientation: int, size: Any, swapped: bool | None) -> None:
    image = halves()
    exif = image.getexif()
    exif[0x0112] = orientation
    made = decode(file_of(image, "JPEG", exif=exif, quality=95), MANY, param="x")
    assert made.size == size
    left, right = colours(made)
    if swapped is None:
        assert near(made.getpixel((8, 2)), RED) and near(made.getpixel((8, 29)), BLUE)
    else:
        assert near(left, BLUE if swapped else RED) and near(right, RED if swapped else BLUE)


def test_of_an_animation_the_first_frame_is_read() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
    for kind in ("GIF", "WEBP"):
        data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert near(decode(data, MANY, param="x").getpixel((4, 4)), RED)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_large_photo_is_scaled_down(kind: str) -> None:
    image = decode(file_of(halves(1200, 600), kind), 20_000, param="x")
    assert image.width * image.height <= 20_000 and image.size == (200, 100)
    left, right = colours(image)
    assert near(left, RED) and near(right, BLUE)


@pytest.mark.parametrize("size", [(1, 1), (20000, 20), (20, 20000), (3, 1)])
def test_odd_shapes_are_read(size: tuple[int, int]) -> None:
    image = decode(file_of(Image.new("RGB", size, RED), "PNG"), 100_000, param="x")
    assert image.width * image.height <= 100_000
    assert near(image.getpixel((0, 0)), RED)


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its few bytes of data unpack to."""

    def piece(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + piece(b"IHDR", head) + piece(b"IDAT", zlib.compress(b"")) + piece(b"IEND", b"")


def test_a_bomb_is_refused_by_its_header() -> None:
    with pytest.raises(BadRequest, match="60000 x 60000 pixels") as caught:
        decode(bomb(60000, 60000), MANY, param="messages[0]")
    assert caught.value.param == "messages[0]"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_file_that_is_cut_off_is_refused(kind: str) -> None:
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8))
    data = file_of(noise, kind)
    with pytest.raises(BadRequest, match="cannot be read"):
        decode(data[: len(data) // 2], MANY, param="x")


@pytest.mark.parametrize(
    "data", [b"", b"GIF89a", b"<svg xmlns='x'/>", b"%!PS-Adobe-3.0 EPSF-3.0", b"\x89PNG\r\n\x1a\n"]
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest, match="cannot be read"):
        decode(data, MANY, param="x")


@given(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]), st.data())
def test_a_damaged_file_is_pixels_or_a_sentence(kind: str, data: st.DataObject) -> None:
    whole = bytearray(file_of(halves(), kind))
    for _ in range(data.draw(st.integers(1, 8))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        image = decode(bytes(whole), 5_000, param="x")
    except BadRequest:
        return
    assert image.mode == "RGB" and image.width * image.height <= 5_000


@given(st.integers(1, 50000), st.integers(1, 50000), st.integers(1, 10**7))
def test_the_fitting_size_keeps_the_shape_within_the_bound(width: int, height: int, most: int) -> None:
    w, h = fitting(width, height, most)
    assert 1 <= w <= width and 1 <= h <= height
    assert w * h <= most or min(w, h) == 1
