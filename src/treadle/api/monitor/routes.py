"""The monitor page at `/` and its files. Neither needs a key: they hold no data, which the page asks `/v1` for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from treadle import __version__
from treadle.api.errors import json_response
from treadle.api.monitor.assets import FOLDER, Asset, site
from treadle.errors import NotFound

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
GUARDS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
FOR_GOOD = "public, max-age=31536000, immutable"  # an address never gets another content
HINTS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/cache", "/v1/stats", "/health", "/docs")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """A damaged installation is told at the start, not by an empty page."""
    await asyncio.to_thread(site)
    yield


router = APIRouter(lifespan=lifespan)


@router.head("/", include_in_schema=False)  # some clients ask for it before anything else
@router.get("/")
async def root(request: Request) -> Response:
    """The page for browsers, a hint for everyone else."""
    if "text/html" in request.headers.get("accept", ""):
        return await asset_response(request, site().page, "no-cache", "accept, accept-encoding")
    hint = {"name": "treadle", "version": __version__, "api": "/v1", "routes": HINTS}
    return json_response(hint, headers={"vary": "accept"})


@router.get(f"/{FOLDER}/{{version}}/{{name}}", include_in_schema=False)
async def file(request: Request, version: str, name: str) -> Response:
    """One file of the page."""
    asset = site().files.get(name) if version == site().version else None
    if asset is None:
        raise NotFound(f"The page has no file {name[:100]!r} in version {version[:100]!r}.", code="unknown_url")
    return await asset_response(request, asset, FOR_GOOD, "accept-encoding")


async def asset_response(request: Request, asset: Asset, keep: str, vary: str) -> Response:
    """The asset, compressed for whoever takes that."""
    headers = {**GUARDS, "cache-control": keep, "vary": vary, "content-type": asset.type}
    if not takes_gzip(request.headers.get("accept-encoding", "")):
        return Response(asset.plain, headers=headers)
    packed = await asyncio.to_thread(asset.packed)
    return Response(packed, headers={**headers, "content-encoding": "gzip"})


def takes_gzip(accepted: str) -> bool:
    """Whether an `Accept-Encoding` header allows gzip by name, with a weight above 0."""
    for part in accepted.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
