"""The compiled kernels: found in the cache folder, or compiled there once for this processor, and loaded.

A library is named by what it was made from and for: source, versions of MLX, nanobind, Python and the compiler, and the
features of the processor. One that was made elsewhere is never loaded, and one that is damaged is made again. Each is
tried in a process of its own before it is used in this one.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from treadle import system
from treadle.models.folders import cache_folder, locked

log = logging.getLogger(__name__)

SETTING = "TREADLE_CPU_KERNELS"  # in the environment: the folder to keep them in, or "off" for MLX's own operations
OFF = "off"
MODULE = "treadle_native"
SOURCE = Path(__file__).parent / "cpp"
COMPILE_S = 300.0
TRIAL_S = 60.0
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-fvisibility=hidden", "-pthread")
DEFINITIONS = ("-DNDEBUG", "-DNB_DOMAIN=mlx", f"-DTREADLE_MODULE={MODULE}")

_lock = threading.Lock()
_found: ModuleType | str | None = None


class _Unavailable(Exception):
    """The reason, as a part of a sentence."""


def kernels() -> Any:
    """The module of kernels, or None where there is none; see `why_not`. The first call may compile for a minute.

    Any thread; only after `runtime.prepare`.
    """
    found = _decide()
    return None if isinstance(found, str) else found


def why_not() -> str | None:
    """Why there are no kernels, as a part of a sentence; None where there are. As `kernels`."""
    found = _decide()
    return found if isinstance(found, str) else None


def _decide() -> ModuleType | str:
    global _found
    with _lock:
        if _found is None:
            try:
                _found = _load()
                _found.set_num_threads(system.physical_cores())
            except _Unavailable as error:
                _found = str(error)
                log.warning("MLX's own operations are used instead of the CPU kernels, which is slower: %s.", error)
        return _found


def _load() -> ModuleType:
    setting = os.environ.get(SETTING)
    if setting == OFF:
        raise _Unavailable(f"{SETTING} is {OFF}")
    if not sys.platform.startswith("linux"):
        raise _Unavailable("they are for Linux")
    compiler = shutil.which("g++")
    if compiler is None:
        raise _Unavailable("there is no C++ compiler (install g++)")
    folder = Path(setting).expanduser() if setting else cache_folder() / "kernels"
    library = folder / f"{MODULE}-{_digest(_ingredients(compiler))}.so"
    try:
        if not _whole(library):
            library.parent.mkdir(parents=True, exist_ok=True)
            with locked(library.with_suffix(".lock"), lambda: log.info("Another process compiles the CPU kernels.")):
                if not _whole(library):
                    _compile(compiler, library)
    except OSError as error:
        raise _Unavailable(f"nothing can be written to {library.parent} ({error.strerror})") from error
    return loaded(library)


def loaded(library: Path) -> ModuleType:
    """The library as a Python module; MLX comes first, of which it is a part."""
    import mlx.core  # noqa: F401

    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(library))
    spec = importlib.util.spec_from_file_location(MODULE, library, loader=loader)
    if spec is None:
        raise _Unavailable(f"{library} is no library")
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise _Unavailable(f"{library} cannot be loaded ({error})") from error
    return module


def _seal(library: Path) -> Path:
    """Where the checksum of a library is kept, which was written after it was tried."""
    return library.with_suffix(".sha256")


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _whole(library: Path) -> bool:
    """Whether a library is there, as it was when it was tried."""
    try:
        return _seal(library).read_text(encoding="utf-8") == _checksum(library)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _ingredients(compiler: str) -> list[str]:
    """Everything that a library depends on."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise _Unavailable(f"{compiler} does not run") from error
    sources = [f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in sorted(SOURCE.iterdir())]
    python = [sys.implementation.cache_tag, sysconfig.get_config_var("SOABI") or ""]
    return [*sources, *FLAGS, *DEFINITIONS, version, *python, _version("mlx"), _version("nanobind"), _processor()]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise _Unavailable(f"the package {package} is missing") from error


def _processor() -> str:
    """Its instruction sets, as the kernel lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    keys = ("flags", "Features", "model name", "CPU part", "CPU implementer")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(keys)}))


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _compile(compiler: str, library: Path) -> None:
    """Compile into the place of `library`, which appears there whole and tried or not at all."""
    began = time.perf_counter()
    log.info("Compiling the CPU kernels for this processor, once (about half a minute).")
    with tempfile.TemporaryDirectory(dir=library.parent) as place:
        made = Path(place) / library.name
        _run(_commands(compiler, Path(place), made))
        _try(made)
        seal = _seal(made)
        seal.write_text(_checksum(made), encoding="utf-8")
        made.replace(library)
        seal.replace(_seal(library))
    log.info("Compiled the CPU kernels in %.0f s: %s", time.perf_counter() - began, library)


def _commands(compiler: str, place: Path, library: Path) -> list[list[list[str]]]:
    """Commands in steps; those of a step may run at once."""
    import mlx.core
    import nanobind

    mlx = Path(mlx.core.__file__).parent
    binding = Path(nanobind.__file__).parent
    folders = (
        mlx / "include",
        binding / "include",
        binding / "ext" / "robin_map" / "include",
        Path(sysconfig.get_paths()["include"]),
    )
    if not (folders[-1] / "Python.h").is_file():
        raise _Unavailable("Python's headers are missing (install python3-dev)")
    common = [compiler, *FLAGS, *DEFINITIONS, *(f"-I{folder}" for folder in folders)]
    sources = [binding / "src" / "nb_combined.cpp", *sorted(SOURCE.glob("*.cpp"))]
    objects = [place / f"{source.stem}.o" for source in sources]
    compiles = [[*common, "-c", str(a), "-o", str(b)] for a, b in zip(sources, objects, strict=True)]
    link = [compiler, *FLAGS, "-shared", *map(str, objects), f"-L{mlx / 'lib'}", "-lmlx", "-o", str(library)]
    return [compiles, [link]]


def _run(steps: list[list[list[str]]]) -> None:
    for commands in steps:
        running: list[subprocess.Popen[str]] = []
        try:
            waiting = list(commands)
            while waiting or running:
                while waiting and len(running) < max(2, system.physical_cores()):
                    running.append(subprocess.Popen(waiting.pop(0), stderr=subprocess.PIPE, text=True))
                first = running.pop(0)
                _, errors = first.communicate(timeout=COMPILE_S)
                if first.returncode:
                    line = next((line for line in errors.splitlines() if "error" in line), "it failed")
                    raise _Unavailable(f"the compiler cannot make them ({line.strip()})")
        except (OSError, subprocess.SubprocessError) as error:
            raise _Unavailable(f"the compiler cannot make them ({error})") from error
        finally:
            for process in running:
                process.kill()
                process.wait()


def _try(library: Path) -> None:
    """See that a library loads and computes what MLX computes, in a process of its own: a bad one could end it."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "treadle.native.trial", str(library)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TRIAL_S, env=os.environ | {"PYTHONPATH": path}
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise _Unavailable(f"they could not be tried ({error})") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise _Unavailable(f"what the compiler made does not work here ({last})")
