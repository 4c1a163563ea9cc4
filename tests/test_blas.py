"""MLX's CPU backend computes through OpenBLAS, whose functions it finds under plain names."""

from __future__ import annotations

import ctypes
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.fresh import run
from treadle import blas, exports, runtime


def installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


CPU_BUILD = sys.platform.startswith("linux") and not any(map(installed, runtime.CUDA_BUILDS))
needs_openblas = pytest.mark.skipif(
    not (CPU_BUILD and installed(blas.OPENBLAS)), reason="needs the CPU build of MLX and OpenBLAS on Linux"
)
BLAS = "import json\nfrom treadle import runtime\n"
TELL = "print(json.dumps([runtime.prepare().name, runtime.prepare().num_threads, runtime.prepare().note]))"


@needs_openblas
def test_openblas_is_used_with_threads_for_half_the_cores() -> None:
    name, threads, note = run(BLAS + TELL)
    assert (name, threads) == ("openblas", blas.num_threads())
    assert "OpenBLAS" in note


@needs_openblas
@pytest.mark.parametrize("variable", ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"])
def test_a_thread_count_of_the_user_is_kept(variable: str) -> None:
    assert run(BLAS + TELL, **{variable: "1"})[:2] == ["openblas", 1]


@needs_openblas
def test_mlx_multiplies_through_openblas() -> None:
    """The library's own counters are not public, so the proof is a function of ours in its place, which is called."""
    code = BLAS + (
        "import ctypes\n"
        "from treadle import blas\n"
        "made, calls = blas.exports.export, []\n"
        "@ctypes.CFUNCTYPE(None)\n"
        "def counted(): calls.append(1)\n"
        "def spied(found): made({**found, 'cblas_sgemm': ctypes.cast(counted, ctypes.c_void_p).value})\n"
        "blas.exports.export = spied\n"
        "runtime.prepare()\n"
        "import mlx.core as mx\n"
        "mx.eval(mx.ones((64, 32)) @ mx.ones((32, 16)))\n"
        "print(json.dumps(len(calls)))"
    )
    assert run(code) == 1


@needs_openblas
def test_every_shape_is_multiplied_right_on_this_processor() -> None:
    """A library built for another processor ends the process at the first shape whose kernel it cannot run."""
    code = BLAS + (
        "runtime.prepare()\n"
        "import mlx.core as mx, numpy as np\n"
        "worst, random = 0.0, np.random.default_rng(0)\n"
        "from itertools import product as every\n"
        "for m, k, n in every((1, 2, 7, 16, 33, 130), (1, 3, 16, 65, 300), (1, 4, 31, 64, 257)):\n"
        "    a, b = random.standard_normal((m, k)), random.standard_normal((k, n))\n"
        "    for left, right in ((a, b), (a, b.T.copy().T), (a.T.copy().T, b), (a.T.copy().T, b.T.copy().T)):\n"
        "        left, right = (mx.array(x.astype(np.float32)) for x in (left, right))\n"
        "        worst = max(worst, float(np.abs(np.array(left @ right) - a @ b).max()))\n"
        "    with mx.stream(mx.cpu):\n"
        "        product = (mx.array(a).astype(mx.complex64) * 1j) @ mx.array(b).astype(mx.complex64)\n"
        "        worst = max(worst, float(np.abs(np.array(product) - 1j * (a @ b)).max()))\n"
        "print(json.dumps(worst))"
    )
    assert run(code) < 1e-3


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
    name, _, note = run(BLAS + "runtime.blas.OPENBLAS = 'no-such-package'\n" + TELL)
    assert name == "reference"
    assert "install no-such-package" in note


@needs_openblas
def test_an_unknown_processor_keeps_the_reference_blas() -> None:
    name, _, note = run("import platform\nplatform.machine = lambda: 'loongarch64'\n" + BLAS + TELL)
    assert name == "reference"
    assert "loongarch64" in note


@pytest.mark.skipif(not exports.available(), reason="needs Linux on x86-64 or arm64")
def test_exported_functions_are_found_by_their_names_and_called_with_their_arguments() -> None:
    kind = ctypes.CFUNCTYPE(ctypes.c_double, *[ctypes.c_long] * 8, *[ctypes.c_double] * 9)
    kept = [kind(lambda *values, base=base: base + sum(values)) for base in range(5)]
    names = [f"treadle_test_{'x' * base}_{base}" for base in range(5)]
    exports.export({name: ctypes.cast(f, ctypes.c_void_p).value or 0 for name, f in zip(names, kept, strict=True)})
    everything = ctypes.CDLL(None)
    for base, name in enumerate(names):
        found = everything[name]
        found.argtypes, found.restype = kind._argtypes_, kind._restype_
        assert found(*range(8), *(n / 2 for n in range(9))) == base + 28 + 18
    with pytest.raises(AttributeError):
        _ = everything["treadle_test_none"]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_both_processors_get_one_page_of_code_and_one_to_write(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    made = exports._shared_object({"first": 0x1122334455667788, "second": 2})
    assert made[:4] == b"\x7fELF"
    assert len(made) == exports.PAGE + 6 * 16
    assert 0x1122334455667788.to_bytes(8, "little") in made
