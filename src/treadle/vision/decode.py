"""From the bytes of an image file to pixels: any of the usual formats, never larger than asked. Needs Pillow.

Runs on a thread of the prompt's, never on the engine's. Only the listed decoders of Pillow are tried, whatever the
bytes say they are; sizes are read from the header before anything is unpacked.
"""

from __future__ import annotations

import math
from io import BytesIO
from typing import Any

from PIL import Image, ImageOps
from PIL import WebPImagePlugin as WebPImagePlugin  # `Image.open` does not load it by itself

from treadle.errors import BadRequest

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_PIXELS = 64 * 2**20  # of a file: 256 MB while it is unpacked
TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")
SMOOTH = ("RGB", "RGBA", "L", "LA", "CMYK", "YCbCr")  # modes that can be scaled as they are
SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N", "I")

Image.MAX_IMAGE_PIXELS = None  # Pillow only warns; `MOST_PIXELS` refuses


def decode(data: bytes, max_pixels: int, *, param: str) -> Any:
    """An RGB `PIL.Image` of at most `max_pixels` pixels: the first frame, upright, transparent parts white.

    Raises BadRequest naming `param` for what is no image, is cut off, or is too large to be unpacked.
    """
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise BadRequest(
                f"The image has {width} x {height} pixels; at most {MOST_PIXELS // 10**6} million are read.",
                param=param,
            )
        if image.format in ("JPEG", "MPO"):  # MPO: what some phones write as .jpg
            image.draft(None, fitting(width, height, max_pixels))
        return _plain(image, max_pixels)
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        OverflowError,
        MemoryError,
        Image.DecompressionBombError,
    ) as fault:
        reason = " ".join(str(fault).split())[:200].rstrip(".") or type(fault).__name__
        raise BadRequest(
            f"The image cannot be read ({reason}); PNG, JPEG, WebP, GIF and BMP files can.", param=param
        ) from fault


def _plain(image: Any, max_pixels: int) -> Any:
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode in SMOOTH:
        image = _scaled(image, max_pixels)  # before copies are made of it
    if image.mode in SIXTEEN_BITS:
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if image.mode in TRANSPARENT or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return _scaled(image.convert("RGB"), max_pixels)


def _scaled(image: Any, max_pixels: int) -> Any:
    width, height = image.size
    size = fitting(width, height, max_pixels)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def fitting(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The size of the same shape with at most about `max_pixels`, each side at least 1."""
    scale = min(1.0, math.sqrt(max_pixels / (width * height)))
    return max(1, int(width * scale)), max(1, int(height * scale))
