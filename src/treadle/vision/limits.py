"""What a server reads of images, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_pixels`: larger images are scaled down before anything else. `allow_web`: http(s) URLs are fetched."""

    max_pixels: int = 8_000_000
    allow_web: bool = False
