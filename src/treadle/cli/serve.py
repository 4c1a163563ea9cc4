"""`treadle serve`: the options of the HTTP server, one for each field of `Config`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from treadle import runtime
from treadle.cli import options
from treadle.cli.listener import listen
from treadle.cli.options import DEFAULTS
from treadle.config import Config


def serve(
    model: options.Model = DEFAULTS["model"],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.")] = DEFAULTS[
        "host"
    ],
    port: Annotated[int, typer.Option("--port", "-p", help="Port to listen on.")] = DEFAULTS["port"],
    context_length: options.ContextLength = DEFAULTS["context_length"],
    max_rows: Annotated[int, typer.Option(help="Most requests that are answered at once.")] = DEFAULTS["max_rows"],
    max_waiting: Annotated[int, typer.Option(help="Most requests that wait; more get 429.")] = DEFAULTS["max_waiting"],
    on_busy: Annotated[
        str, typer.Option(help="What a request meets while others run: batch, queue or preempt.")
    ] = DEFAULTS["on_busy"],
    prefill_chunk: Annotated[int, typer.Option(help="Most prompt tokens in one step.")] = DEFAULTS["prefill_chunk"],
    prefill_share: Annotated[
        float, typer.Option(help="Share of the time for new prompts while replies stream.")
    ] = DEFAULTS["prefill_share"],
    prefill_stall_s: Annotated[
        float, typer.Option(help="Longest pause in seconds that a new prompt puts into running replies.")
    ] = DEFAULTS["prefill_stall_s"],
    request_timeout_s: Annotated[
        float | None, typer.Option(help="Most seconds for one request.", show_default="none")
    ] = DEFAULTS["request_timeout_s"],
    drain_s: Annotated[float, typer.Option(help="Seconds that running requests get to finish at shutdown.")] = DEFAULTS[
        "drain_s"
    ],
    keepalive_s: Annotated[
        float, typer.Option(help="Longest silence of a stream in seconds before a comment is sent.")
    ] = DEFAULTS["keepalive_s"],
    memory_limit_gb: options.MemoryLimit = DEFAULTS["memory_limit_gb"],
    cache_gb: options.CacheGb = DEFAULTS["cache_gb"],
    cache_idle_s: options.CacheIdle = DEFAULTS["cache_idle_s"],
    cache_quantization: options.CacheQuantization = DEFAULTS["cache_quantization"],
    cache_group_size: options.CacheGroupSize = DEFAULTS["cache_group_size"],
    cache_min_tokens: options.CacheMinTokens = DEFAULTS["cache_min_tokens"],
    cache_dir: options.CacheDir = DEFAULTS["cache_dir"],
    cache_disk_gb: options.CacheDisk = DEFAULTS["cache_disk_gb"],
    checkpoint_every: options.CheckpointEvery = DEFAULTS["checkpoint_every"],
    max_body_mb: Annotated[float, typer.Option(help="Largest request body in MB.")] = DEFAULTS["max_body_mb"],
    api_keys: options.ApiKeys = DEFAULTS["api_keys"],
    allowed_origins: options.AllowedOrigins = DEFAULTS["allowed_origins"],
    allowed_hosts: options.AllowedHosts = DEFAULTS["allowed_hosts"],
    rate_limit_per_minute: Annotated[
        int | None, typer.Option(help="Most requests per minute for each key or address.", show_default="none")
    ] = DEFAULTS["rate_limit_per_minute"],
) -> None:
    """Serve a model over HTTP with OpenAI's protocol.

    treadle serve

    treadle serve gemma3-270m --port 9000 --max-rows 4
    """
    config = Config.of(**options.settings(locals(), os.environ))
    with listen(config.host, config.port) as listener:
        runtime.prepare()  # before anything imports MLX
        from treadle.cli.server import run

        run(config, listener)
