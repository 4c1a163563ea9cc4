"""`treadle bench serve`: load on a server that speaks OpenAI's protocol, this one or another."""

from __future__ import annotations

import asyncio
import json
import secrets
from datetime import UTC, datetime
from typing import Annotated

import typer

from treadle.errors import TreadleError

bench = typer.Typer(help="Measure a server.", no_args_is_help=True)


@bench.callback()
def root() -> None:
    """Measure a server."""


@bench.command()
def serve(
    url: Annotated[str, typer.Option(help="The server's address, with or without /v1.")] = "http://127.0.0.1:8080",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Which model to ask.", show_default="the first one listed")
    ] = None,
    workload: Annotated[str, typer.Option(help="chat, agent or shared-prefix.")] = "chat",
    requests: Annotated[int, typer.Option(min=1, help="How many requests in all.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="How many conversations at a time.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a reply.")] = 64,
    prompt_words: Annotated[
        int, typer.Option(min=1, help="Words of a question, a shared system message or a tool result.")
    ] = 200,
    seed: Annotated[
        int | None, typer.Option(help="The same seed asks the same.", show_default="random, so nothing is cached yet")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="TREADLE_API_KEY", help="Sent as bearer token.", show_default="none")
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Longest silence of the server in seconds.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of a table.")] = False,
) -> None:
    """Time to first token, time between tokens and throughput under load; exit code 1 when requests failed.

    treadle bench serve --workload agent --requests 60 --concurrency 4

    treadle bench serve --url http://127.0.0.1:9000 --workload shared-prefix --prompt-words 2000 --json
    """
    from treadle.bench.serve_load import Target, measure
    from treadle.bench.serve_report import sentence, summary, table
    from treadle.bench.serve_workloads import conversations

    seed = secrets.randbelow(2**31) if seed is None else seed
    asked = conversations(workload, requests, prompt_words, seed)
    target = Target(url, model, api_key, max_tokens, timeout_s)
    name, samples, seconds = asyncio.run(measure(target, asked, concurrency))
    result = summary(samples, seconds)
    if as_json:
        given = {"workload": workload, "concurrency": concurrency, "max_tokens": max_tokens}
        about = {"url": target.base, "model": name, **given, "prompt_words": prompt_words, "seed": seed}
        print(json.dumps({"bench": "serve", "date": datetime.now(UTC).date().isoformat(), **about, **result}))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        console.print(table(f"{workload} on {name}, {concurrency} at a time (seed {seed})", result))
        console.print(sentence(result), soft_wrap=True)
        for error, count in result["errors"].items():
            console.print(f"{count} x {error}", soft_wrap=True, markup=False)
    if result["failed"]:
        raise TreadleError(f"{result['failed']} of {result['requests']} requests failed.")
