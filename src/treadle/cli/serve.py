"""`treadle serve`: the options of the HTTP server, one for each field of `Config`."""

from __future__ import annotations

import gc
import os

from treadle import runtime
from treadle.cli import options
from treadle.cli.listener import listen
from treadle.cli.logs import log_to_stderr
from treadle.config import DEFAULTS, Config


def serve(
    model: options.Model = DEFAULTS["model"],
    models_file: options.ModelsFile = DEFAULTS["models_file"],
    model_idle_s: options.ModelIdle = DEFAULTS["model_idle_s"],
    model_wait_s: options.ModelWait = DEFAULTS["model_wait_s"],
    host: options.Host = DEFAULTS["host"],
    port: options.Port = DEFAULTS["port"],
    context_length: options.ContextLength = DEFAULTS["context_length"],
    max_rows: options.MaxRows = DEFAULTS["max_rows"],
    max_waiting: options.MaxWaiting = DEFAULTS["max_waiting"],
    on_busy: options.OnBusy = DEFAULTS["on_busy"],
    prefill_chunk: options.PrefillChunk = DEFAULTS["prefill_chunk"],
    prefill_share: options.PrefillShare = DEFAULTS["prefill_share"],
    prefill_stall_s: options.PrefillStall = DEFAULTS["prefill_stall_s"],
    request_timeout_s: options.RequestTimeout = DEFAULTS["request_timeout_s"],
    drain_s: options.Drain = DEFAULTS["drain_s"],
    keepalive_s: options.KeepAlive = DEFAULTS["keepalive_s"],
    memory_limit_gb: options.MemoryLimit = DEFAULTS["memory_limit_gb"],
    kv_bits: options.KvBits = DEFAULTS["kv_bits"],
    kv_group_size: options.KvGroupSize = DEFAULTS["kv_group_size"],
    kv_recent: options.KvRecent = DEFAULTS["kv_recent"],
    cache_gb: options.CacheGb = DEFAULTS["cache_gb"],
    cache_idle_s: options.CacheIdle = DEFAULTS["cache_idle_s"],
    cache_quantization: options.CacheQuantization = DEFAULTS["cache_quantization"],
    cache_group_size: options.CacheGroupSize = DEFAULTS["cache_group_size"],
    cache_min_tokens: options.CacheMinTokens = DEFAULTS["cache_min_tokens"],
    cache_dir: options.CacheDir = DEFAULTS["cache_dir"],
    cache_disk_gb: options.CacheDisk = DEFAULTS["cache_disk_gb"],
    checkpoint_every: options.CheckpointEvery = DEFAULTS["checkpoint_every"],
    speculation: options.Speculation = DEFAULTS["speculation"],
    draft_model: options.DraftModel = DEFAULTS["draft_model"],
    specprefill_model: options.SpecprefillModel = DEFAULTS["specprefill_model"],
    specprefill: options.Specprefill = DEFAULTS["specprefill"],
    specprefill_threshold: options.SpecprefillThreshold = DEFAULTS["specprefill_threshold"],
    specprefill_keep_pct: options.SpecprefillKeep = DEFAULTS["specprefill_keep_pct"],
    compile: options.Compile = DEFAULTS["compile"],
    allow_image_urls: options.AllowImageUrls = DEFAULTS["allow_image_urls"],
    image_max_mp: options.ImageMaxMp = DEFAULTS["image_max_mp"],
    image_cache_mb: options.ImageCacheMb = DEFAULTS["image_cache_mb"],
    max_body_mb: options.MaxBody = DEFAULTS["max_body_mb"],
    api_keys: options.ApiKeys = DEFAULTS["api_keys"],
    allowed_origins: options.AllowedOrigins = DEFAULTS["allowed_origins"],
    allowed_hosts: options.AllowedHosts = DEFAULTS["allowed_hosts"],
    rate_limit_per_minute: options.RateLimit = DEFAULTS["rate_limit_per_minute"],
    log_format: options.LogFormat = DEFAULTS["log_format"],
    log_prompts: options.LogPrompts = DEFAULTS["log_prompts"],
) -> None:
    """Serve models over HTTP with the protocols of OpenAI and Anthropic.

    treadle serve

    treadle serve gemma3-270m --port 9000 --max-rows 4
    """
    _serve(Config.of(**options.settings(locals(), os.environ)))


def _serve(config: Config) -> None:
    with listen(config.host, config.port) as listener:
        logs = log_to_stderr(config.log_format)
        runtime.prepare_ahead()  # before anything imports MLX
        gc.disable()  # imports make hardly any rubbish, and looking for it takes a tenth of their time
        from treadle.cli.server import run

        gc.freeze()
        gc.enable()
        run(config, listener, logs)
