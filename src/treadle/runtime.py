"""What must happen before and around importing MLX and mlx-lm: a fast BLAS, file limits, hooks, device facts.

`prepare` comes first in the process, before anything imports `mlx.core`.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any, Literal

from treadle import blas, compiler, system
from treadle.blas import Blas
from treadle.errors import LoadError

if sys.platform != "win32":
    import resource

log = logging.getLogger(__name__)

Backend = Literal["cpu", "cuda", "metal"]

TESTED = "mlx 0.32.4 with mlx-lm 0.32.2"
CUDA_BUILDS = ("mlx-cuda-13", "mlx-cuda-12")
REPORTED = (
    "treadle",
    "mlx",
    "mlx-lm",
    "transformers",
    "tokenizers",
    "numpy",
    "mlx-vlm",
    "pillow",
    *CUDA_BUILDS,
    blas.OPENBLAS,
)
HOOKS: dict[str, tuple[str, ...]] = {
    "models.cache": (
        "KVCache",
        "RotatingKVCache",
        "ArraysCache",
        "CacheList",
        "ChunkedKVCache",
        "make_prompt_cache",
    ),
    "models.base": ("create_attention_mask", "scaled_dot_product_attention"),
    "utils": ("load_model", "load_config", "dequantize_model", "get_total_parameters", "_get_classes"),
    "tokenizer_utils": ("TokenizerWrapper",),
}

ATTENTION_PLANS = "2048"  # that MLX keeps on CUDA instead of 256: each took 45 ms to make

_lock = threading.RLock()
_blas: Blas | None = None
_asked_compiler = False


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device MLX computes on. Sizes in bytes; `versions` maps package to version, installed ones only."""

    backend: Backend
    name: str
    memory_bytes: int
    working_set_bytes: int  # what may be used without hurting the rest of the machine
    versions: dict[str, str]


def prepare() -> Blas:
    """Load the optimised BLAS where one is needed; the first call decides, later ones return its answer.
    Fused CPU kernels are turned off where they cannot be compiled.

    On Linux without an NVIDIA build of MLX, OpenBLAS must be in the process before `mlx.core` is: its symbols
    then win over the reference BLAS that the wheel links (measured: prefill 20 times faster). The number of
    threads defaults to half the physical cores and is left alone when the environment sets one.
    """
    global _asked_compiler
    with _lock:
        found = _prepare_libraries()
        if not _asked_compiler:
            _asked_compiler = True
            if _cpu_build() and compiler.SWITCH not in os.environ and (reason := compiler.why_not()) is not None:
                os.environ[compiler.SWITCH] = "1"
                log.warning("MLX computes without fused kernels, somewhat slower: %s.", reason)
        return found


def prepare_ahead() -> None:
    """Begin to `prepare`: what has to come before NumPy too is done at once, the compiler is tried meanwhile."""
    with _lock:
        _prepare_libraries()
    threading.Thread(target=prepare, name="treadle-prepare", daemon=True).start()


def _prepare_libraries() -> Blas:
    """The environment and the BLAS, once. NumPy has an OpenBLAS of its own that reads the same number of threads."""
    global _blas
    if _blas is None:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no advice to install PyTorch
        os.environ.setdefault("MLX_CUDA_SDPA_CACHE_SIZE", ATTENTION_PLANS)
        _blas = _load_blas()
        level = logging.WARNING if _blas.name == "reference" else logging.INFO
        log.log(level, "BLAS: %s", _blas.note)
    return _blas


def _cpu_build() -> bool:
    return sys.platform.startswith("linux") and all(_version(name) is None for name in CUDA_BUILDS)


def _load_blas() -> Blas:
    if not sys.platform.startswith("linux"):
        return Blas("system", "MLX uses the libraries of the operating system.")
    if cuda := next((name for name in CUDA_BUILDS if _version(name) is not None), None):
        return Blas("system", f"MLX uses the NVIDIA libraries of {cuda}.")
    return blas.load()


def mlx_lm_module(name: str) -> ModuleType:
    """Import `mlx_lm.<name>` without letting the import touch this process's file limits.

    Raises:
        LoadError: the module is missing, lacks a package it needs, or tries to exit the process.
    """
    with guarded_import(f"mlx_lm.{name}"):
        return importlib.import_module(f"mlx_lm.{name}")


@contextmanager
def guarded_import(what: str) -> Iterator[None]:
    """While inside, `resource.setrlimit` does nothing, and a failing or exiting import is a LoadError.

    mlx-lm sets the limit of open files when imported: that lowers a larger one and fails under a smaller.
    """
    with _lock, _kept_limits():
        try:
            yield
        except SystemExit as error:
            raise LoadError(f"{what} cannot be used: it tried to exit the process ({error}).") from error
        except ImportError as error:
            raise LoadError(f"{what} cannot be imported: {error}.") from error


@contextmanager
def _kept_limits() -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    original = resource.setrlimit
    resource.setrlimit = _keep_limit
    try:
        yield
    finally:
        resource.setrlimit = original


def _keep_limit(_kind: int, _limits: tuple[int, int]) -> None:
    return None


def check_hooks(hooks: dict[str, tuple[str, ...]] = HOOKS) -> None:
    """Make sure that everything used of mlx-lm exists.

    Raises:
        LoadError: names what is missing, the installed version and the tested ones.
    """
    for name, attributes in hooks.items():
        module = mlx_lm_module(name)
        missing = [attribute for attribute in attributes if attribute not in vars(module)]
        if missing:
            raise LoadError(
                f"mlx-lm {_version('mlx-lm')} lacks {name}.{missing[0]}, which Treadle needs (tested with {TESTED})."
            )


def device_facts() -> DeviceFacts:
    """What MLX computes on. Imports `mlx.core`, so `prepare` comes first."""
    prepare()
    import mlx.core as mx

    backend: Backend = "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else "cpu"
    info: dict[str, Any] = mx.device_info()
    total = system.total_memory()
    if backend == "metal":
        total = int(info.get("memory_size", total))
        working = int(info.get("max_recommended_working_set_size", total * 3 // 4))
    elif backend == "cuda":
        total = int(info.get("total_memory", info.get("memory_size", total)))
        working = total * 9 // 10
    else:
        working = total * 3 // 4
    return DeviceFacts(backend, str(info.get("device_name", backend)), total, working, dict(_versions()))


@cache
def _versions() -> dict[str, str]:
    return {name: version for name in REPORTED if (version := _version(name)) is not None}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
