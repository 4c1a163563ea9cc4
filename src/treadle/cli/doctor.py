"""`treadle doctor`: what this machine has and what works on it."""

from __future__ import annotations

import os
import platform
from collections import Counter
from typing import Annotated

import typer

from treadle import compiler, runtime
from treadle.cli import options
from treadle.config import Config
from treadle.errors import LoadError, TreadleError
from treadle.models.folders import cache_folder
from treadle.models.sources import known_models, title

GB = 1e9


def doctor(
    model: Annotated[str | None, typer.Option("--model", "-m", help="Also load this model and describe it.")] = None,
    context_length: options.ContextLength = options.DEFAULTS["context_length"],
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Forget what was measured of models, or of --model alone, before.")
    ] = False,
) -> None:
    """Show the device, versions, memory and what works; exit code 1 when something does not.

    treadle doctor

    treadle doctor --model smollm2 --recalibrate
    """
    failures = [*_machine(), *_hooks(), *_models()]
    if recalibrate:
        _forget(None if model is None else title(model))
    if model is not None:
        failures += _model(Config.of(model=model, context_length=context_length))
    _calibrations(None if model is None else title(model))
    if failures:
        raise TreadleError(failures[0])


def _line(key: str, value: str) -> None:
    print(f"{key:<16} {value}", flush=True)


def _machine() -> list[str]:
    """The device and its libraries."""
    blas = runtime.prepare()
    _line(
        "system",
        f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
    )
    try:
        facts = runtime.device_facts()
    except ImportError as error:
        _line("device", f"FAILED: MLX cannot be imported: {error}")
        return [f"MLX cannot be imported: {error}."]
    _line("device", f"{facts.name} ({facts.backend})")
    _line(
        "memory",
        f"{facts.memory_bytes / GB:.1f} GB, of which {facts.working_set_bytes / GB:.1f} GB may be used",
    )
    _line("BLAS", blas.note)
    if facts.backend == "cpu":
        _line("fused kernels", _fused())
    for name, version in facts.versions.items():
        _line(name, version)
    return []


def _fused() -> str:
    """Whether MLX's CPU build compiles kernels for several operations at once."""
    if compiler.SWITCH not in os.environ:
        return "compiled when needed"
    return f"off: {compiler.why_not() or f'{compiler.SWITCH} is set'}"


def _hooks() -> list[str]:
    """Whether mlx-lm has everything that is used of it."""
    try:
        runtime.check_hooks()
    except LoadError as error:
        _line("mlx-lm hooks", f"FAILED: {error.message}")
        return [error.message]
    _line("mlx-lm hooks", "all found")
    return []


def _models() -> list[str]:
    """Where models are kept and which are there."""
    found = [known.name for known in known_models() if known.downloaded]
    _line("cache folder", str(cache_folder()))
    _line("downloaded", ", ".join(found) or "no models")
    return []


def _forget(name: str | None) -> None:
    """Let the next load measure anew: the model `name`, or all."""
    from treadle.models.calibration import forget

    _line("forgotten", f"what was measured of models, in {forget(name)} files")


def _calibrations(name: str | None) -> None:
    """What loads have measured: of the model `name`, or of all."""
    from treadle.models.calibration import stored, unusual

    for findings in stored().values():
        if name in (None, findings.name):
            device, caps = findings.key.get("device"), next(iter(findings.caps.values()), None)
            revision, mlx = findings.key.get("model"), findings.key.get("mlx")
            facts = [findings.date, *unusual(findings.key), f"mlx {mlx}"]
            _line("calibration", f"{findings.name} (revision {revision}) on {device}, {', '.join(facts)}")
            if caps is not None:
                _line("  several rows", caps.batching.value + (f": {caps.why}" if caps.why else ""))
            if findings.packing is not None:
                _line("  packed rows", findings.packing.fault or "right")
            for kv, costs in findings.steps.items():
                steps = ", ".join(f"{n}: {1000 * seconds:.3g} ms" for n, seconds in costs.verify.items())
                _line(f"  steps, {kv} bits", f"{steps} by tokens; logits wobble by {costs.noise:.2g}")


def _model(config: Config) -> list[str]:
    """Load a model as the server would and tell what it can do."""
    from treadle.cli.session import opened

    try:
        with opened(config) as session:
            model, caps = session.model, session.model.caps
    except TreadleError as error:
        _line("model", f"FAILED: {error.message}")
        return [error.message]
    kinds = ", ".join(f"{count} {kind.value}" for kind, count in Counter(caps.layers).items())
    _line("model", f"{model.name} ({model.source}, revision {model.revision})")
    _line("context", f"{caps.context_length} tokens")
    _line("vocabulary", f"{caps.vocab_size} tokens")
    _line("layers", kinds + (f"; window {caps.window} tokens" if caps.window is not None else ""))
    _line("batching", f"{caps.batching.value}: {caps.why}" if caps.why else caps.batching.value)
    _line("images", "none: a model of text alone" if caps.vision is None else caps.vision.why)
    _line("chat template", "yes" if model.chat_template is not None else "none: only text completion works")
    return []
