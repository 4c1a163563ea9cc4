"""Whether MLX's CPU build can compile fused kernels here. It needs a working `g++` and a folder of its own in the
temporary folder at the moment a kernel is first used; where either fails, that computation fails with it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SWITCH = "MLX_DISABLE_COMPILE"  # read by MLX when it is imported
COMPILE_S = 30.0
PROBE = '#include <cmath>\nextern "C" double probe(double x) { return std::exp(x); }\n'


def why_not() -> str | None:
    """The reason why fused kernels cannot be compiled, or None when they can. Takes a tenth of a second."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "there is no C++ compiler (g++)"
    folder = Path(os.environ.get("TMPDIR") or "/tmp")
    if (stranger := _not_ours(folder / "mlx")) is not None:
        return f"{stranger} belongs to another user"
    try:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            return _trial(compiler, Path(place))
    except OSError as error:
        return f"nothing can be written to {folder} ({error.strerror})"


def _not_ours(folder: Path) -> Path | None:
    """A folder on MLX's way to its kernels that is somebody else's: not writable, and not to be trusted either."""
    folders = [folder, *(path for path in folder.glob("*") if path.is_dir()), *folder.glob("*/cpu")]
    return next((path for path in folders if path.exists() and path.stat().st_uid != os.getuid()), None)


def _trial(compiler: str, folder: Path) -> str | None:
    source, library = folder / "probe.cpp", folder / "probe.so"
    source.write_text(PROBE)
    command = [compiler, "-std=c++17", "-fPIC", "-shared", str(source), "-o", str(library)]
    try:
        subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_S)
        ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError):
        return f"{compiler} does not make a library that can be loaded from {folder.parent}"
    return None
