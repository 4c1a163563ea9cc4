"""How CUDA kernels are put together, compiled and kept; and that CUDA's own compiler takes all of them."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from treadle.models import cuda, few_queries, gemv, kernels, packed_gemm, packed_gemv, upload
from treadle.models.around import Around, Form
from treadle.models.cuda import Kernel, Nvrtc


class Compiler:
    """Behaves like the library: the code of a program is its text, and a text with an error is refused."""

    def __init__(self) -> None:
        self.compiled: list[bytes] = []
        self.minor = 0

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 13, self.minor
        return 0

    def nvrtcCreateProgram(self, program: Any, text: bytes, name: bytes, *rest: Any) -> int:
        self.text = text
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:
        self.compiled.append(self.text)
        return int(b"error" in self.text)

    def nvrtcGetProgramLogSize(self, program: Any, size: Any) -> int:
        size._obj.value = 8
        return 0

    def nvrtcGetProgramLog(self, program: Any, into: Any) -> int:
        into.value = b"line 1"
        return 0

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(self.text)
        return 0

    def nvrtcGetCUBIN(self, program: Any, into: Any) -> int:
        into.raw = self.text
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:
        return 0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    return tmp_path / cuda.FOLDER


def call(kernel: Kernel, *inputs: Any, n: int = 3, shared: int = 0) -> list[Any]:
    return kernel(
        inputs=list(inputs),
        template=[("T", inputs[0].dtype), ("N", n), ("ALONE", True)],
        grid=(64, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(2, 3)],
        output_dtypes=[mx.bfloat16],
        shared_memory=shared,
    )


def test_a_source_is_told_types_constants_and_what_it_asks_of_shapes() -> None:
    kernel = Kernel("sum", ["a", "b"], ["out"], "out[0] = a[b_strides[0] * b_ndim];", "header")
    text = kernel.text(
        [mx.zeros((2, 3), mx.float16), mx.zeros((4, 5, 6), mx.int32)],
        [("T", mx.float16), ("N", 7), ("ALONE", True)],
        [mx.float32],
    )
    assert f"void {cuda.NAME}(const float16* a, const int* b, float* out, const int b_size_0" in text
    assert "using T = float16;" in text and "constexpr int N = 7;" in text and "constexpr int ALONE = 1;" in text
    assert "const int b_shape[] = {b_size_0, b_size_1, b_size_2};" in text and "constexpr int b_ndim = 3;" in text
    assert "const long b_strides[] = {1L * b_size_1 * b_size_2, 1L * b_size_2, 1L};" in text
    assert "a_shape" not in text and text.index("header") < text.index("void")


def test_a_kernel_is_launched_with_its_code_and_the_sizes_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    library = Compiler()
    monkeypatch.setattr(cuda, "nvrtc", lambda: made)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **all: told.append(all) or [mx.zeros((2, 3))])
    made = Nvrtc(library, "sm_90")
    kernel = Kernel("sum", ["a", "b"], ["out"], "out[0] = a_shape[0];")
    for shape in ((2, 3), (4, 5)):
        call(kernel, mx.zeros(shape, mx.bfloat16), mx.zeros(1))
    call(kernel, mx.zeros((2, 3), mx.bfloat16), mx.zeros(1), n=4)
    assert [one["scalars"] for one in told] == [[2, 3], [4, 5], [2, 3]]
    assert told[0]["name"] == told[1]["name"] != told[2]["name"] and len(library.compiled) == 2
    monkeypatch.setattr(kernel, "text", None)  # it is put together once for arrays of a kind, not for each size
    call(kernel, mx.zeros((6, 7), mx.bfloat16), mx.zeros(1))
    assert told[3]["name"] == told[0]["name"] and told[3]["scalars"] == [6, 7]
    assert told[0]["name"].encode() in told[0]["compiled_source"], "the function has the name it is looked for by"


def test_code_is_kept_on_disk_for_this_compiler_and_a_damaged_file_is_made_anew(cache: Path) -> None:
    library = Compiler()
    assert Nvrtc(library, "sm_90").code("one", "text") == b"text"
    (path,) = cache.glob("*.cubin")
    assert Nvrtc(library, "sm_90").code("one", "text") == b"text" and len(library.compiled) == 1
    path.write_bytes(path.read_bytes()[:-1])
    assert Nvrtc(library, "sm_90").code("one", "text") == b"text" and len(library.compiled) == 2
    path.write_bytes(b"")
    assert Nvrtc(library, "sm_90").code("one", "text") == b"text" and len(library.compiled) == 3
    library.minor = 1
    assert Nvrtc(library, "sm_90").code("one", "text") == b"text" and len(library.compiled) == 4
    assert Nvrtc(library, "sm_80").code("one", "text") == b"text" and len(library.compiled) == 5


def test_old_files_go_when_there_are_many(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MOST_FILES", 2)
    compiler = Nvrtc(Compiler(), "sm_90")
    for text in ("a", "b", "c", "d"):
        assert compiler.code(text, text) == text.encode()
        assert len(list(cache.glob("*.cubin"))) <= 2


def test_where_nothing_can_be_kept_code_is_made(cache: Path) -> None:
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the folder would be")
    assert Nvrtc(Compiler(), "sm_90").code("one", "text") == b"text"


def test_what_the_compiler_refuses_goes_mlx_s_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[dict[str, Any]] = []
    library = Compiler()
    compiler = Nvrtc(library, "sm_90")

    def launch(
        *, inputs: Any, template: Any, grid: Any, threadgroup: Any, output_shapes: Any, output_dtypes: Any
    ) -> list[str]:
        return ["by MLX"]  # as MLX's own, it is told of shared memory when it is made

    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **all: made.append(all) or launch)
    caplog.set_level("INFO")
    refused, unknown = (Kernel("sum", ["a"], ["out"], source, "header") for source in ("error", "right"))
    a = mx.zeros((2, 3), mx.bfloat16)
    monkeypatch.setattr(cuda, "nvrtc", lambda: compiler)
    assert call(refused, a) == call(refused, a) == ["by MLX"]
    assert len(library.compiled) == len(made) == caplog.text.count("compiled by MLX: line 1") == 1
    monkeypatch.setattr(cuda, "nvrtc", lambda: None)
    assert call(unknown, a) == ["by MLX"] and made[-1]["header"] == "header" and made[-1]["input_names"] == ("a",)
    assert call(unknown, a, shared=4096) == ["by MLX"] and [one["shared_memory"] for one in made[1:]] == [0, 4096]


def test_there_is_no_compiler_without_a_device() -> None:
    cuda.nvrtc.cache_clear()
    assert mx.cuda.is_available() or cuda.nvrtc() is None


def libraries(pattern: str) -> list[Path]:
    found = importlib.util.find_spec("nvidia")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    return [path for folder in folders for path in sorted(Path(folder).rglob(pattern))]


def launches(dtype: Any) -> dict[str, Callable[[], Any]]:
    """Every kernel, in each form that differs in more than a size."""
    row, rows, many = (mx.zeros((n, 512), dtype) for n in (1, 11, 40))
    norm, dense = mx.zeros(512, dtype), mx.zeros((64, 512), dtype)
    told = mx.zeros((2, 512), mx.int32), mx.zeros(2, mx.int32), mx.zeros(4, mx.int32)
    asked, held = mx.zeros((2, 8, 1, 128), dtype), mx.zeros((2, 2, 512, 128), dtype)
    codes = mx.quantize(mx.zeros((2, 2, 512, 128), mx.bfloat16), group_size=64, bits=8)
    pieces = kernels.Kernels()

    def packed(bits: int, size: int, around: Around, x: Any, *more: Any) -> Any:
        weights = mx.quantize(dense, group_size=size, bits=bits)
        form = Form(size, bits)
        if x.shape[0] == 1:
            return packed_gemv.launch(form, around, 1e-6, x, *weights, *more)
        return packed_gemm.launch(form, around, x, *weights, *more)

    def heads(freqs: Any, normed: bool, into: Any = None) -> Any:
        stacked = mx.zeros((3, 6 * 64), dtype)
        turn = kernels.Turn(64, normed, 1.0, 1e4 if freqs is None else None, freqs)
        norms = (mx.zeros(64, dtype), mx.zeros(64, dtype), 1e-5) if normed else ()
        whole = kernels.Heads(2, 2, 64, None, turn, *norms)
        more = kernels._more(whole, stacked)
        return kernels._heads(kernels._settings(whole), stacked, told[1], *more, *(into or ()))

    found: dict[str, Callable[[], Any]] = {
        "gemv": lambda: gemv.launch(Around(bias=True), 0.0, row, dense, mx.zeros(64, dtype)),
        "gemv gated": lambda: gemv.launch(Around(norm=True, gated=True), 1e-6, row, dense, norm),
        "packed add": lambda: packed(4, 64, Around(add=True), row, mx.zeros((1, 64), dtype)),
        "packed gated": lambda: packed(4, 64, Around(norm=True, gated=True), row, norm),
        "packed rows": lambda: packed(4, 32, Around(), rows),
        "packed bytes": lambda: packed(8, 128, Around(gated=True), many),
        "add norm": lambda: pieces.add_norm(row, row, norm, 1e-5),
        "gated": lambda: pieces.gated(row),
        "heads": lambda: heads(None, True),
        "heads by paces": lambda: heads(mx.zeros(32), False),
        "heads in place": lambda: heads(None, True, (held[..., :64], held[..., :64], told[1][:1])),
        "attention": lambda: few_queries._launch(asked, held, held, *told, scale=1.0, split=1, packed=None),
        "attention in parts": lambda: few_queries._launch(asked, held, held, *told, scale=1.0, split=4, packed=None),
        "few numbers": lambda: [upload._writer(size)(scalars=[0] * size) for size in upload.SIZES],  # type: ignore[misc]
        "attention over codes": lambda: few_queries._launch(
            asked, held, held, *told, *codes, *codes, scale=1.0, split=4, packed=(64, 64)
        ),
    }
    halves = ("packed", "gemv", "attention")
    return {k: v for k, v in found.items() if dtype != mx.float32 or not k.startswith(halves)}


@pytest.mark.skipif(not libraries("libnvrtc.so.*"), reason="NVRTC is not installed")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_compiler_of_cuda_takes_every_kernel(
    dtype: Any, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in libraries("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(path))  # looked for by its name alone
    compiler = Nvrtc(ctypes.CDLL(str(libraries("libnvrtc.so.*")[0])), architecture)
    told: list[dict[str, Any]] = []

    def launched(**all: Any) -> list[Any]:
        told.append(all)
        return [mx.zeros(shape, kind) for shape, kind in zip(all["output_shapes"], all["output_dtypes"], strict=True)]

    for module in (cuda, upload):
        monkeypatch.setattr(module, "nvrtc", lambda: compiler)
    upload._writer.cache_clear()
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launched)
    for name, launch in launches(dtype).items():
        before = len(told)
        launch()
        assert len(told) > before, name
    upload._writer.cache_clear()
    assert all(one["compiled_source"].startswith(b"\x7fELF") for one in told)
