"""`treadle top`: what a server does, in the terminal, once a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.errors import NotAuthorised, Unreachable

if TYPE_CHECKING:
    from httpx2 import Client

REFRESH_S = 1.0
SHOWN_S = 60.0  # of the history, after the first snapshot
ANSWER_S = 10.0


def top(
    url: Annotated[str, typer.Option(help="The server's address, with or without /v1.")] = "http://127.0.0.1:8080",
    api_key: Annotated[
        str | None, typer.Option(envvar="TREADLE_API_KEY", help="Sent as bearer token.", show_default="none")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end.")] = False,
) -> None:
    """Watch a Treadle server: speeds, memory, cache and live requests. Ctrl-C ends it.

    treadle top

    treadle top --url http://box.lan:8080 --once
    """
    from httpx2 import Client
    from rich.console import Console

    from treadle.cli.top_frame import frame

    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    with Client(headers=headers, timeout=ANSWER_S, trust_env=False) as client:
        address = f"{url.rstrip('/').removesuffix('/v1')}/v1/stats"
        first = fetch(client, address)
        if once:
            Console(highlight=False).print(frame(first))
        else:
            watch(client, address, first)


def watch(client: Client, address: str, stats: dict[str, Any]) -> None:
    """Draw until interrupted. A server that is away is said to be, and asked again."""
    from rich.console import Group
    from rich.live import Live

    from treadle.cli.top_frame import frame

    with Live(frame(stats), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(REFRESH_S)
            try:
                stats = fetch(client, address, max(stats["now"] - SHOWN_S, 0.0))
            except Unreachable as error:
                live.update(Group(error.message, frame(stats)), refresh=True)
            else:
                live.update(frame(stats), refresh=True)


def fetch(client: Client, address: str, since: float = 0.0) -> dict[str, Any]:
    """The snapshot. Raises Unreachable, NotAuthorised."""
    from httpx2 import HTTPError

    try:
        answer = client.get(address, params={"since": since})
    except HTTPError as error:
        raise Unreachable(f"{address} does not answer ({type(error).__name__}: {error}).") from error
    if answer.status_code == NotAuthorised.status:
        raise NotAuthorised("The server wants an API key: --api-key or TREADLE_API_KEY.")
    if not answer.is_success:
        raise Unreachable(f"{address} answers HTTP {answer.status_code}; is it a Treadle server?")
    stats: dict[str, Any] = answer.json()
    return stats
