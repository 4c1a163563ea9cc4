"""What was found by trying a model on a device, kept in the user's cache folder: one JSON file for each pair.

Self-checks and the cost of steps take seconds to find, and are the same at every load of the same weights, by the same
code, on the same device. A file that was written for anything else, or is damaged, counts as none and is replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

import treadle
from treadle import compiler, runtime, system
from treadle.models.folders import cache_folder
from treadle.native import build
from treadle.types import Caps

log = logging.getLogger("treadle.models")

FORMAT = 1  # of the file
FOLDER = "calibration"  # in the cache folder
OFF = "off"  # what a key says of kernels that are switched off
USUAL = "auto"  # and of compiling that nobody has decided about

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What steps cost at short contexts, and how much logits wobble; see `speculate.calibrate`."""

    noise: Annotated[
        float, Field(ge=0)
    ]  # how much closer than this two logits may be to be told apart by a step over several tokens
    verify: Mapping[Count, Seconds]  # seconds by tokens in the step
    plain: Mapping[Count, Seconds] = field(default_factory=dict)  # seconds from token to token, by rows; learnt in use


@dataclass(frozen=True, slots=True)
class Packing:
    """Whether attention rows can be packed: `fault` is why not."""

    fault: str | None


@dataclass(frozen=True, slots=True)
class Findings:
    """All that is known of one model on one device. Empty parts were not tried yet."""

    format: int
    key: Mapping[str, str]  # what all of it depends on
    name: str  # of the model, for people
    date: str  # of the first finding, as ISO 8601
    caps: Mapping[int, Caps] = field(default_factory=dict)  # by context length
    packing: Packing | None = None
    steps: Mapping[str, StepCosts] = field(default_factory=dict)  # by the format of the rows


class CalibrationFile:
    """The findings for one key. Engine thread only. What cannot be written is kept for as long as the process lives."""

    def __init__(self, path: Path, key: Mapping[str, str], name: str) -> None:
        self.path = path
        known = read(path)
        if known is None or known.key != key:
            known = Findings(FORMAT, key, name, datetime.now(UTC).isoformat(timespec="seconds"))
        self.findings = known

    def caps(self, context_length: int, find: Callable[[], Caps]) -> Caps:
        """What the model can do with that context, in tokens; found where it is not known."""
        known = self.findings.caps.get(context_length)
        if known is None:
            known = find()
            self._keep(replace(self.findings, caps={**self.findings.caps, context_length: known}))
        return known

    def packing_fault(self, find: Callable[[], str | None]) -> str | None:
        """Why attention rows cannot be packed, if they cannot; found where it is not known."""
        known = self.findings.packing
        if known is None:
            known = Packing(find())
            self._keep(replace(self.findings, packing=known))
        return known.fault

    def steps(self, kv: str, find: Callable[[], StepCosts]) -> StepCosts:
        """What steps cost with rows of the format `kv`; found where it is not known."""
        known = self.findings.steps.get(kv)
        if known is None:
            known = find()
            self.learnt(kv, known)
        return known

    def learnt(self, kv: str, costs: StepCosts) -> None:
        """Replace what is known of the cost of steps with rows of the format `kv`."""
        if self.findings.steps.get(kv) == costs:
            return
        self._keep(replace(self.findings, steps={**self.findings.steps, kv: costs}))

    def _keep(self, findings: Findings) -> None:
        self.findings = findings
        draft = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(_form().dump_json(findings, indent=1))
            draft.replace(self.path)
        except OSError as error:
            log.warning("What was found about %s is not kept: %s.", findings.name, error)


def folder() -> Path:
    """Where the files are; not created here."""
    return cache_folder() / FOLDER


def read(path: Path) -> Findings | None:
    """The findings in a file. One that is absent, damaged or of another format counts as none."""
    try:
        found = _form().validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = str(error).partition("\n")[0]
        log.warning("The calibration in %s is not used and will be made anew: %s.", path, reason)
        return None
    return found if found.format == FORMAT else None


def stored() -> dict[Path, Findings]:
    """Every file that can be read, by its path."""
    found = {path: read(path) for path in sorted(folder().glob("*.json"))}
    return {path: findings for path, findings in found.items() if findings is not None}


def forget(name: str | None = None) -> int:
    """Remove what is known of the model `name`, or of all models; how many files that were."""
    known = [path for path, findings in stored().items() if name is None or findings.name == name]
    for path in known:
        path.unlink(missing_ok=True)
    return len(known)


_opened: dict[tuple[Path, str], CalibrationFile] = {}


def calibration(revision: str, config: Any, name: str, compile: str = USUAL) -> CalibrationFile:
    """The findings for weights of that `revision`, built by `config` (anything that has a JSON form or a repr).

    The same object for the same question: a model may be unloaded and loaded again. Where kernels are switched off, or
    `compile` is not "auto", there is a file of its own: a trial does not cost what is known of the usual way.
    """
    facts = runtime.device_facts()
    key = key_of(revision, config, facts, compile)
    device = re.sub(r"[^A-Za-z0-9]+", "-", f"{facts.backend} {facts.name}").strip("-")
    ways = [way.replace(" ", "-") for way in unusual(key)]
    path = folder() / f"{'-'.join([revision, device, *ways])}.json"
    place = (path, json.dumps(key, sort_keys=True))
    if place not in _opened:
        _opened[place] = CalibrationFile(path, key, name)
    return _opened[place]


def key_of(revision: str, config: Any, facts: runtime.DeviceFacts, compile: str = USUAL) -> dict[str, str]:
    """What findings depend on: the model, the device and how much of it may be used, and all code that computes."""
    text = json.dumps(config, sort_keys=True, default=repr)
    return {
        "model": revision,
        "config": hashlib.sha256(text.encode()).hexdigest()[:16],
        "device": facts.name,
        "backend": facts.backend,
        "cores": str(system.physical_cores()),
        "blas": runtime.prepare().note,
        "kernels": _kernels(facts),
        "fused kernels": OFF if compiler.SWITCH in os.environ else "on",
        "compile": compile,
        "code": _code(Path(treadle.__file__).parent),
        **facts.versions,
    }


def unusual(key: Mapping[str, str]) -> list[str]:
    """What somebody had chosen when the findings were made: "kernels off", "compile on"."""
    off = [f"{name} off" for name in ("kernels", "fused kernels") if key.get(name) == OFF]
    compile = key.get("compile", USUAL)
    return off if compile == USUAL else [*off, f"compile {compile}"]


def _kernels(facts: runtime.DeviceFacts) -> str:
    if facts.backend != "cpu":
        return "none"
    if os.environ.get(build.SETTING) == build.OFF:
        return OFF
    found = build.kernels()
    return "none" if found is None else Path(str(found.__file__)).stem


@cache
def _code(package: Path) -> str:
    """Changes with the program's own files: a version says little about a working copy."""
    files = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".so", ".cpp"))
    stats = [(str(path.relative_to(package)), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


@cache
def _form() -> TypeAdapter[Findings]:
    return TypeAdapter(Findings)
