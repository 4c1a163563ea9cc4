"""Who may ask: host names, web origins, keys and rates, checked in this order before any route sees a request.

Pure ASGI. It looks at headers only, and of an answer it touches nothing but the headers: streams pass unbuffered.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle.api.auth import Keys
from treadle.api.errors import response_to
from treadle.api.security_hosts import Hosts, Origins, is_loopback
from treadle.api.security_limits import RateLimit
from treadle.config import Config
from treadle.errors import Forbidden, NotAuthorised, RateLimited, TreadleError

OPEN_PATHS = ("/health", "/")
OPEN_FOLDER = "/monitor/"  # the files of the page at "/", which hold no data
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
PREFLIGHT_S = 600  # how long a browser may remember a preflight's answer
EXPOSED = "x-request-id, retry-after"


def exposed_without_key(config: Config) -> str | None:
    """The warning for a server that the network can use and that asks for no key."""
    if config.api_keys or is_loopback(config.host):
        return None
    return (
        f"Listening on {config.host} without an API key: everyone who reaches this address can use the model. "
        "Set --api-key or TREADLE_API_KEYS, or listen on 127.0.0.1."
    )


class Security:
    """The ASGI application `app` behind the checks that `config` asks for."""

    def __init__(self, app: ASGIApp, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._hosts = Hosts(config.host, config.allowed_hosts)
        self._origins = Origins(config.allowed_origins)
        self._keys = Keys(config.api_keys)
        rate = config.rate_limit_per_minute
        self._rate = None if rate is None else RateLimit(rate, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:  # no route speaks anything else
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin, host = headers.get("origin"), headers.get("host", "")
        shared = origin is not None and self._origins.accept(origin, host)
        if origin is not None and shared:
            send = self._readable_by(origin, send)
        answer: Response | None
        try:
            self._check_names(scope["method"], origin, host, shared)
            if preflight(scope["method"], headers):
                answer = preflight_response(headers)
            else:
                self._check_client(scope)
                answer = None
        except TreadleError as error:
            answer = refusal(Request(scope), error)
        await (self._app if answer is None else answer)(scope, receive, send)

    def _check_names(self, method: str, origin: str | None, host: str, shared: bool) -> None:
        """Raises Refused for a foreign host name, and for a foreign page that would change something or asks to.

        A page may send some requests without a preflight; that it could not read the answer is not enough.
        """
        if not self._hosts.accept(host):
            raise Forbidden(
                f"The host name {host[:100]!r} is not allowed; see --allowed-host.",
                param="host",
                code="host_not_allowed",
            )
        if origin is not None and not shared and (method not in SAFE_METHODS or method == "OPTIONS"):
            raise Forbidden(
                f"The origin {origin[:100]!r} is not allowed; see --allowed-origin.",
                param="origin",
                code="origin_not_allowed",
            )

    def _check_client(self, scope: Scope) -> None:
        """Raises NotAuthorised, RateLimited. The address is the connection's own, whatever headers say."""
        path = scope["path"]
        if (path in OPEN_PATHS or path.startswith(OPEN_FOLDER)) and scope["method"] in SAFE_METHODS:
            return
        owner = self._keys.owner(scope["headers"]) if self._keys else None
        unknown = bool(self._keys) and owner is None
        if self._rate is not None and (unknown or scope["method"] not in SAFE_METHODS):
            self._check_rate(self._rate, owner or f"address {(scope['client'] or ('',))[0]}")
        if unknown:
            raise NotAuthorised("A valid API key is needed: `Authorization: Bearer KEY` or `x-api-key: KEY`.")

    def _check_rate(self, rate: RateLimit, name: str) -> None:
        wait = rate.take(name)
        if wait:
            error = RateLimited(f"Rate limit reached. Please try again in {wait} s.")
            error.retry_after_s = wait
            raise error

    def _readable_by(self, origin: str, send: Send) -> Send:
        """`send`, with the headers that let the page read the answer."""

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["access-control-allow-origin"] = "*" if self._origins.any else origin
                headers["access-control-expose-headers"] = EXPOSED
                headers.add_vary_header("origin")
            await send(message)

        return marked


def preflight(method: str, headers: Headers) -> bool:
    """Whether a browser asks if it may ask."""
    return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def preflight_response(headers: Headers) -> Response:
    """Yes, with every header that the page wants to send. Answered before the key, which no preflight carries."""
    allowed = {
        "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
        "access-control-allow-headers": headers.get("access-control-request-headers", ""),
        "access-control-max-age": str(PREFLIGHT_S),
    }
    if headers.get("access-control-request-private-network") == "true":
        allowed["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=allowed)


def refusal(request: Request, error: TreadleError) -> Response:
    response = response_to(request, error)
    if isinstance(error, NotAuthorised):
        response.headers["www-authenticate"] = "Bearer"
    return response
