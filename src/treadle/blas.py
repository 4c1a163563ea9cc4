"""The matrix library of MLX's CPU backend: OpenBLAS in place of the reference BLAS that the wheel links.

OpenBLAS's official package picks the kernels for the processor it runs on; a build for one processor would end the
process with "illegal instruction" on another. Its functions carry a prefix, so they are exported under plain names.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from treadle import exports, system

OPENBLAS = "scipy-openblas32"
LIBRARY = "scipy_openblas32/lib/libscipy_openblas.so"
PREFIX = "scipy_"
USED = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # all that MLX calls


@dataclass(frozen=True, slots=True)
class Blas:
    """Which matrix library MLX's CPU backend uses in this process, and why (`note`, one sentence)."""

    name: Literal["openblas", "preloaded", "reference", "system"]
    note: str
    path: str | None = None
    num_threads: int | None = None


def load() -> Blas:
    """Put OpenBLAS before the reference BLAS. Linux with MLX's CPU build; only before `mlx.core` is imported."""
    if _defines_sgemm():
        return Blas("preloaded", "MLX uses the BLAS that was loaded into the process before it.")
    if "mlx.core" in sys.modules:
        return Blas("reference", "MLX was imported before runtime.prepare(), so it keeps its reference BLAS.")
    path = _installed()
    if path is None:
        return Blas("reference", f"MLX uses its slow reference BLAS; install {OPENBLAS} for a fast one.")
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(num_threads()))
    try:
        library = ctypes.CDLL(str(path))
        addresses = {name: ctypes.cast(library[PREFIX + name], ctypes.c_void_p).value or 0 for name in USED}
        exports.export(addresses)
    except (OSError, AttributeError) as error:
        return Blas("reference", f"MLX uses its slow reference BLAS: OpenBLAS cannot be loaded ({error}).")
    threads = int(library[f"{PREFIX}openblas_get_num_threads"]())
    kernels = library[f"{PREFIX}openblas_get_corename"]
    kernels.restype = ctypes.c_char_p
    note = f"MLX uses OpenBLAS ({kernels().decode()}) with {threads} thread(s)."
    return Blas("openblas", note, str(path), threads)


def num_threads() -> int:
    """Half the cores. OpenBLAS's threads wait by spinning: with one of them short of a core, decoding fell from
    18 to 1 token/s, while the second thread on a quiet machine with two cores brought 30 %.
    """
    return max(1, system.physical_cores() // 2)


def _defines_sgemm() -> bool:
    try:
        _ = ctypes.CDLL(None).cblas_sgemm
    except AttributeError:
        return False
    return True


def _installed() -> Path | None:
    try:
        path = Path(str(metadata.distribution(OPENBLAS).locate_file(LIBRARY)))
    except metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None
