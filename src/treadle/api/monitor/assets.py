"""The files of the monitor page: read once, compressed when first asked for, named by what is in them."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from pathlib import Path

PAGE = "index.html"
BASE = b"{{base}}"  # in the page: the folder of its files
FOLDER = "monitor"
# Chart.js, as the Python package of Chartkick ships it. It is read as a file; nothing of the package is imported.
CHARTS = "chart.js"
CHARTS_PACKAGE = "chartkick"
CHARTS_FILE = "chartkick/django/static/chartkick/Chart.bundle.js"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file and its media type."""

    plain: bytes
    type: str

    @staticmethod
    def of(name: str, body: bytes) -> Asset:
        return Asset(body, TYPES[Path(name).suffix])

    def packed(self) -> bytes:
        """The file as gzip. The first call takes up to a tenth of a second."""
        return _packed(self.plain)


@cache
def _packed(body: bytes) -> bytes:
    return gzip.compress(body, mtime=0)


@dataclass(frozen=True, slots=True)
class Site:
    """The page and its files. `version` changes with any of them, and is part of their addresses."""

    version: str
    page: Asset
    files: Mapping[str, Asset]


@cache
def site() -> Site:
    """Everything, read on the first call. Raises PackageNotFoundError, OSError where the installation is damaged."""
    sources = {item.name: item.read_bytes() for item in _static().iterdir() if Path(item.name).suffix in TYPES}
    sources[CHARTS] = Path(str(metadata.distribution(CHARTS_PACKAGE).locate_file(CHARTS_FILE))).read_bytes()
    version = hashlib.sha256(b"".join(sources[name] for name in sorted(sources))).hexdigest()[:12]
    page = sources.pop(PAGE).replace(BASE, f"{FOLDER}/{version}".encode())
    return Site(version, Asset.of(PAGE, page), {name: Asset.of(name, body) for name, body in sources.items()})


def _static() -> resources.abc.Traversable:
    return resources.files("treadle.api.monitor") / "static"
