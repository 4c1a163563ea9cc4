"""MLX and mlx-lm are imported so that the process keeps its limits and computes fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from treadle import runtime
from treadle.errors import LoadError


def installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


CPU_BUILD = sys.platform.startswith("linux") and not any(map(installed, runtime.CUDA_BUILDS))
needs_openblas = pytest.mark.skipif(
    not (CPU_BUILD and installed(runtime.OPENBLAS)), reason="needs the CPU build of MLX and OpenBLAS on Linux"
)
BLAS = "import json\nfrom treadle import runtime\n"
TELL = "print(json.dumps([runtime.prepare().name, runtime.prepare().num_threads, runtime.prepare().note]))"


def run(code: str, limit: int | None = None, **environment: str) -> Any:
    """Run code in a fresh interpreter, with a limit of open files, and read the JSON that it prints last."""
    kept = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", code]
    if limit is not None:
        command = ["bash", "-c", f'ulimit -n {limit} && exec "$@"', "bash", *command]
    done = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_openblas
def test_openblas_is_used_with_threads_for_half_the_cores() -> None:
    name, threads, note = run(BLAS + TELL)
    assert (name, threads) == ("openblas", runtime.blas_threads())
    assert "OpenBLAS" in note


@needs_openblas
@pytest.mark.parametrize("variable", ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"])
def test_a_thread_count_of_the_user_is_kept(variable: str) -> None:
    assert run(BLAS + TELL, **{variable: "1"})[:2] == ["openblas", 1]


@needs_openblas
def test_mlx_multiplies_through_openblas() -> None:
    """The library's own counters are not public, so the proof is the address that the name resolves to."""
    code = BLAS + (
        "import ctypes\n"
        "blas = runtime.prepare()\n"
        "import mlx.core as mx\n"
        "own = ctypes.CDLL(blas.path).cblas_sgemm\n"
        "seen = ctypes.CDLL(None).cblas_sgemm\n"
        "address = lambda f: ctypes.cast(f, ctypes.c_void_p).value\n"
        "product = mx.sum(mx.ones((64, 32)) @ mx.ones((32, 16))).item()\n"
        "print(json.dumps([address(own) == address(seen), product]))"
    )
    assert run(code) == [True, 64 * 32 * 16]


@needs_openblas
def test_coming_after_mlx_is_told() -> None:
    name, _, note = run("import mlx.core\n" + BLAS + TELL)
    assert name == "reference"
    assert "imported before" in note


@needs_openblas
def test_loading_a_model_prepares_before_mlx_is_imported() -> None:
    code = BLAS + (
        "from pathlib import Path\n"
        "from treadle.errors import LoadError\n"
        "from treadle.models.load import load_model\n"
        "from treadle.models.sources import ResolvedSource\n"
        "try:\n"
        "    load_model(ResolvedSource('x', 'gguf', Path('missing.gguf'), ''), None)\n"
        "except LoadError:\n"
        "    pass\n"
    )
    assert run(code + TELL)[0] == "openblas"


@needs_openblas
def test_a_missing_openblas_is_told() -> None:
    name, _, note = run(BLAS + "runtime.OPENBLAS = 'no-such-package'\n" + TELL)
    assert name == "reference"
    assert "install no-such-package" in note


@needs_openblas
def test_the_fortran_library_of_mlx_stands_in_for_a_missing_one() -> None:
    code = (
        "import ctypes, json\nfrom treadle import runtime\n"
        "real, asked = ctypes.CDLL, []\n"
        "def load(name, *args, **kwargs):\n"
        "    asked.append(name)\n"
        "    if name == 'libgfortran.so.5' and len(asked) == 1:\n"
        "        raise OSError(name)\n"
        "    return real(name, *args, **kwargs)\n"
        "runtime.ctypes.CDLL = load\n"
        "runtime._lend_gfortran()\n"
        "lent = real('libgfortran.so.5')\n"
        "print(json.dumps([lent._gfortran_concat_string is not None, len(asked) > 1]))"
    )
    assert run(code) == [True, True]


LIMITS = (
    "import json, resource\n"
    "before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
    "from treadle.runtime import mlx_lm_module\n"
    "mlx_lm_module('utils')\n"
    "print(json.dumps([before, resource.getrlimit(resource.RLIMIT_NOFILE)]))"
)


@pytest.mark.parametrize("limit", [1024, 8192])
def test_importing_mlx_lm_keeps_the_limit_of_open_files(limit: int) -> None:
    assert run(LIMITS, limit=limit) == [[limit, limit], [limit, limit]]


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(LoadError, match=r"mlx_lm\.models\.no_such_model cannot be imported"):
        runtime.mlx_lm_module("models.no_such_model")


def test_an_import_that_exits_is_an_error() -> None:
    with (
        pytest.raises(LoadError, match="it tried to exit the process"),
        runtime.guarded_import("a model file"),
    ):
        sys.exit(1)


def test_the_limits_work_again_after_a_guarded_import() -> None:
    import resource

    with pytest.raises(LoadError), runtime.guarded_import("x"):
        raise ImportError("no")
    assert "_keep_limit" not in resource.setrlimit.__qualname__


def test_every_hook_of_mlx_lm_exists() -> None:
    runtime.check_hooks()


def test_a_missing_hook_is_named_with_the_tested_versions() -> None:
    with pytest.raises(LoadError, match=r"lacks models\.cache\.NoSuchCache.*tested with mlx "):
        runtime.check_hooks({"models.cache": ("KVCache", "NoSuchCache")})


def test_device_facts_are_plausible() -> None:
    facts = runtime.device_facts()
    assert facts.backend in ("cpu", "cuda", "metal")
    assert facts.name
    assert 0 < facts.working_set_bytes <= facts.memory_bytes
    assert facts.versions["mlx"] == version("mlx")
    assert 0 < runtime.free_memory() <= runtime.total_memory()


def test_cores_are_at_least_one_and_at_most_what_the_system_counts() -> None:
    assert 1 <= runtime.physical_cores() <= (os.cpu_count() or 1)
