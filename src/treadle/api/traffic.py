"""Counts HTTP answers by route and status, and clients that leave before their answer ends. Pure ASGI, outermost."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle.metrics.recorder import Recorder

OTHER = "other"  # what no route took: never a label made of what strangers ask for


class Traffic:
    """The ASGI application `app`, with `recorder` told of what it answers. It changes and delays nothing."""

    def __init__(self, app: ASGIApp, recorder: Recorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ended = left = False

        async def heard() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.disconnect" and not ended and not left:
                left = True
                self._recorder.disconnected()
            return message

        async def told(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                self._recorder.answered(route_of(scope), message["status"])
            elif message["type"] == "http.response.body":
                ended = ended or not message.get("more_body", False)
            await send(message)

        await self._app(scope, heard, told)


def route_of(scope: Scope) -> str:
    """The pattern of the route that took the request, as `/v1/models/{id}`."""
    route: Any = scope.get("route")
    return OTHER if route is None else str(route.path)
