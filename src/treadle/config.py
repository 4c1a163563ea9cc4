"""The one frozen configuration. Field defaults are the CLI defaults; a bad value names its key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from treadle.errors import ConfigError

CACHE_BITS = ("off", "8", "4")
KV_BITS = re.compile(r"auto|(16|8|4)(/(16|8|4))?")
BUSY_MODES = ("batch", "queue", "preempt")
LOG_FORMATS = ("text", "json")
SPECULATION = ("auto", "lookup", "draft", "off")
COMPILE = ("auto", "on", "off")
CHOICES = {
    "on_busy": BUSY_MODES,
    "cache_quantization": CACHE_BITS,
    "speculation": SPECULATION,
    "compile": COMPILE,
    "log_format": LOG_FORMATS,
}
ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+")
HOST = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f.]*:[0-9A-Fa-f:.]+\]?")


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one server process. Sizes in tokens, times in seconds, memory in bytes unless named."""

    model: str = "smollm2"
    models_file: str | None = None  # names further models; None: the user's models.toml, if there is one
    model_idle_s: float | None = None  # a model that nobody used for so long is unloaded
    model_wait_s: float = 60.0  # how long a model that has to go may keep the next one waiting
    host: str = "127.0.0.1"
    port: int = 8080
    context_length: int | None = None  # None: what the model was trained for
    max_rows: int = 16  # sequences that decode together
    max_waiting: int = 256  # requests in the queue before 429
    on_busy: str = "batch"  # batch | queue | preempt
    prefill_chunk: int | None = None  # most prompt tokens in one step; None: what suits the device
    prefill_share: float = 0.5  # share of the time for prefill while streams decode
    prefill_stall_s: float = 0.25  # longest pause one chunk may put into running streams
    request_timeout_s: float | None = None
    drain_s: float = 10.0  # how long a shutdown lets running requests finish
    keepalive_s: float = 5.0  # a comment at least this often while a stream is silent
    memory_limit_gb: float | None = None  # None: from the device, leaving room for the system
    kv_bits: str | int = "auto"  # auto | 16 | 8 | 4 | keys/values like 8/4: rows of running sequences; 16 is exact
    kv_group_size: int = 64  # values that share a scale in packed rows
    kv_recent: int = 64  # newest tokens whose rows are read exactly
    cache_gb: float | None = None  # None: a fifth of the working set, 256 MB to 8 GB; 0 turns the prefix cache off
    cache_idle_s: float = 1800.0  # a cached prefix that nobody used for so long is dropped
    cache_quantization: str = "off"  # off | 8 | 4 bits for prefixes that are not in use
    cache_group_size: int = 64
    cache_min_tokens: int = 256  # shorter pieces are neither quantised nor written to disk
    cache_dir: str | None = None  # a folder for the disk tier; None: none
    cache_disk_gb: float = 10.0
    checkpoint_every: int = 2048  # tokens between checkpoints of recurrent and windowed layers in a long prefill
    speculation: str = "auto"  # auto (lookup and a draft model) | lookup | draft | off
    draft_model: str = "auto"  # a smaller model of the same vocabulary; auto: one that is here already; none
    specprefill_model: str | None = None  # a smaller model of the same vocabulary that says what of a prompt matters
    specprefill: bool = True  # leave a part of long prompts out without being asked to; False: only where asked
    specprefill_threshold: int = 8192  # tokens without cached rows beyond which that is done
    specprefill_keep_pct: float = 0.3  # share of these tokens that is computed
    compile: str = "auto"  # auto (where faster) | on | off: steps of few tokens in few operations, compiled as a whole
    allow_image_urls: bool = False  # fetch images from http(s) addresses of the internet
    image_max_mp: float = 8.0  # megapixels; larger images are scaled down before the model's own processor sees them
    image_cache_mb: float = 256.0  # encoded images that are remembered on the device
    max_body_mb: float = 32.0
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: everyone who reaches the address may ask
    allowed_origins: tuple[str, ...] = ()  # web pages besides those of this machine; "*" is all
    allowed_hosts: tuple[str, ...] = ()  # names that clients may call the server by besides loopback's; "*" is all
    rate_limit_per_minute: int | None = None  # requests for each key, or for each address where there is no key
    log_format: str = "text"  # text | json: how the log on stderr is written
    log_prompts: bool = False  # write the text of prompts into the log

    def __post_init__(self) -> None:
        positive = (
            "kv_recent",
            "cache_idle_s",
            "cache_min_tokens",
            "cache_disk_gb",
            "checkpoint_every",
            "port",
            "max_rows",
            "max_waiting",
            "prefill_stall_s",
            "keepalive_s",
            "max_body_mb",
            "model_wait_s",
            "specprefill_threshold",
            "image_max_mp",
            "image_cache_mb",
        )
        for key in positive:
            if not 0 < getattr(self, key) < math.inf:
                raise ConfigError(f"{key} must be positive, not {getattr(self, key)}.", param=key)
        for key in (
            "context_length",
            "prefill_chunk",
            "request_timeout_s",
            "memory_limit_gb",
            "rate_limit_per_minute",
            "model_idle_s",
        ):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{key} must be positive, not {value}.", param=key)
        if not 0 < self.prefill_share < 1:
            raise ConfigError(
                f"prefill_share must lie between 0 and 1, not {self.prefill_share}.", param="prefill_share"
            )
        for key, choices in CHOICES.items():
            if getattr(self, key) not in choices:
                raise ConfigError(f"{key} must be one of {', '.join(choices)}, not {getattr(self, key)!r}.", param=key)
        if not 0 <= self.drain_s < math.inf:
            raise ConfigError(f"drain_s must not be negative, not {self.drain_s}.", param="drain_s")
        if self.cache_gb is not None and not 0 <= self.cache_gb < math.inf:
            raise ConfigError(f"cache_gb must not be negative, not {self.cache_gb}.", param="cache_gb")
        for key in ("cache_group_size", "kv_group_size"):
            if getattr(self, key) not in (32, 64, 128):
                raise ConfigError(f"{key} must be 32, 64 or 128, not {getattr(self, key)}.", param=key)
        if not KV_BITS.fullmatch(str(self.kv_bits)):
            raise ConfigError(
                f'kv_bits must be "auto", 16, 8, 4, or keys/values like "8/4", not {self.kv_bits!r}.', param="kv_bits"
            )
        if self.port > 65535:
            raise ConfigError(f"port must be at most 65535, not {self.port}.", param="port")
        if not 0 < self.specprefill_keep_pct <= 1:
            raise ConfigError(
                f"specprefill_keep_pct must lie above 0 and be at most 1, not {self.specprefill_keep_pct}.",
                param="specprefill_keep_pct",
            )
        self._check_speculation()
        self._check_security()

    def _check_speculation(self) -> None:
        if self.speculation == "draft" and self.draft_model == "none":
            raise ConfigError('draft_model is none, but speculation is "draft".', param="draft_model")
        if self.speculation in ("lookup", "off") and self.draft_model not in ("auto", "none"):
            raise ConfigError(
                f"draft_model names {self.draft_model!r}, but speculation is {self.speculation!r}.", param="draft_model"
            )

    def _check_security(self) -> None:
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError("api_keys must be printable ASCII without spaces, none empty.", param="api_keys")
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f'allowed_origins must be like https://name:port, without a path, or "*", not {origin!r}.',
                    param="allowed_origins",
                )
        for host in self.allowed_hosts:
            if host != "*" and not HOST.fullmatch(host):
                raise ConfigError(
                    f'allowed_hosts must be names or addresses without a port, or "*", not {host!r}.',
                    param="allowed_hosts",
                )

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build from keyword values, refusing unknown keys by name."""
        known = {f.name for f in fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(f"Unknown setting {key!r}.", param=key)
        return cls(**values)


DEFAULTS: Mapping[str, Any] = {one.name: one.default for one in fields(Config)}
