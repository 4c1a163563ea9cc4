"""From the URL that a client names an image by to its bytes. Files of this machine are never read."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from urllib.parse import unquote_to_bytes

from treadle.errors import BadRequest
from treadle.vision.fetch import fetch

DATA = re.compile(r"\s*data:", re.IGNORECASE)
WEB = re.compile(r"\s*https?://", re.IGNORECASE)
SPACE = re.compile(rb"[\s\x00]+")
URL_SAFE = bytes.maketrans(b"-_", b"+/")


def image_bytes(url: str, *, allow_web: bool, param: str) -> bytes:
    """The bytes behind a `data:` URI, or behind an http(s) address where these are allowed.

    Raises BadRequest naming `param`: another kind of address, one that is not allowed or not to be had, bad base64.
    """
    if DATA.match(url):
        return _embedded(url, param)
    if WEB.match(url):
        if allow_web:
            return fetch(url.strip(), param=param)
        raise BadRequest(
            "Images are not fetched from the web here (the server needs --allow-image-urls); send a data: URI.",
            param=param,
        )
    raise BadRequest(
        "An image must be a data: URI (data:image/png;base64,...) or an http(s) URL; files are not read.", param=param
    )


def _embedded(url: str, param: str) -> bytes:
    """RFC 2397, with what clients make of it: line breaks, URL-safe letters, percent signs, no padding."""
    head, comma, body = url.partition(",")
    if not comma:
        raise BadRequest("The data: URI has no comma, so it holds no data.", param=param)
    data = unquote_to_bytes(body)
    if not head.rstrip().lower().endswith(";base64"):
        return data
    data = SPACE.sub(b"", data).translate(URL_SAFE).rstrip(b"=")
    try:
        return b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except binascii.Error as fault:
        raise BadRequest(f"The data: URI is not base64 ({fault}).", param=param) from fault
