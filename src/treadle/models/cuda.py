"""CUDA kernels from source, compiled in a moment and kept on disk. Engine thread only.

`mx.fast.cuda_kernel` puts headers of MLX before every kernel: some 3 s each with NVRTC, at each start, and a model has
a dozen. Kernels that need no header are compiled here by the same NVRTC in a tenth of that, and kept in the cache
folder; `mx.fast.precompiled_cuda_kernel` launches them. Where either is missing, or the compiler refuses, MLX's own
way is taken, by kernels that do not need the types below; the others are not used then.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.models.folders import cache_folder

log = logging.getLogger("treadle.models")

FOLDER = "cuda"
MOST_FILES = 512
LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")  # as MLX has loaded it
DIGEST = 32  # bytes before the code in a file
NAME = "NAME_OF_KERNEL"  # until the text is known
TYPES = {
    mx.bfloat16: "bfloat16",
    mx.float16: "float16",
    mx.float32: "float",
    mx.int32: "int",
    mx.uint32: "unsigned int",
}
# Numbers of 16 bits without CUDA's headers: all that kernels do with them is to convert.
PRELUDE = """
struct bfloat16 {
    unsigned short bits;
    bfloat16() = default;
    __device__ static bfloat16 of(unsigned short bits) { bfloat16 x; x.bits = bits; return x; }
    __device__ explicit bfloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    __device__ explicit operator float() const { return __uint_as_float(static_cast<unsigned int>(bits) << 16); }
};
struct float16 {
    unsigned short bits;
    float16() = default;
    __device__ static float16 of(unsigned short bits) { float16 x; x.bits = bits; return x; }
    __device__ explicit float16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    __device__ explicit operator float() const {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
};
"""
# sum += a b on tensor cores: 16 x 16 by 16 x 8 numbers of 16 bits, over the lanes of a warp.
TILE = """
template <bool BF16>
__device__ __forceinline__ void tile(float (&sum)[4], unsigned int a0, unsigned int a1, unsigned int a2,
                                     unsigned int a3, unsigned int b0, unsigned int b1) {
    if constexpr (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
"""


def bits_of(number: float) -> int:
    """A float32 as a template takes it, and `__int_as_float` gives it back.

    Constants of a model are part of a kernel's text, because a small array is slow to read (`models/upload.py`).
    """
    return int(np.float32(number).view(np.int32))


class Kernel:
    """Called as what `mx.fast.cuda_kernel` returns.

    A source may use the `_shape`, `_strides` and `_ndim` of an input, which is made contiguous.
    """

    def __init__(self, name: str, inputs: Sequence[str], outputs: Sequence[str], source: str, header: str = "") -> None:
        self.name = name
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.source = source
        self.header = header
        self._codes: dict[Any, tuple[str, bytes] | None] = {}  # by all that a text depends on
        self._plains: dict[int, Any] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[Any],
        shared_memory: int = 0,
    ) -> list[Any]:
        """`shared_memory`: bytes of it that a source asks for by `extern __shared__`."""
        places = {"grid": grid, "threadgroup": threadgroup}
        results = {"output_shapes": output_shapes, "output_dtypes": output_dtypes}
        key = (*template, *((a.dtype, a.ndim) for a in inputs), *output_dtypes)
        if key not in self._codes:
            self._codes[key] = self._code(inputs, template, output_dtypes)
        found = self._codes[key]
        if found is None:
            plain = self._plain(shared_memory)
            return plain(inputs=inputs, template=template, **places, **results)  # type: ignore[no-any-return]
        name, code = found
        return mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=code,
            inputs=inputs,
            scalars=[size for a, _ in self._shaped(inputs) for size in a.shape],
            ensure_row_contiguous=True,
            shared_memory=shared_memory,
            **places,  # type: ignore[arg-type]
            **results,  # type: ignore[arg-type]
        )

    def _code(
        self, inputs: Sequence[Any], template: Sequence[tuple[str, Any]], output_dtypes: Sequence[Any]
    ) -> tuple[str, bytes] | None:
        """A name, and what the device runs; None where MLX has to compile it."""
        compiler = nvrtc()
        if compiler is None or any(kind not in TYPES for kind in (*(a.dtype for a in inputs), *output_dtypes)):
            return None
        text = self.text(inputs, template, output_dtypes)
        name = f"{self.name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        code = compiler.code(name, text.replace(NAME, name))
        return None if code is None else (name, code)

    def text(self, inputs: Sequence[Any], template: Sequence[tuple[str, Any]], output_dtypes: Sequence[Any]) -> str:
        """The whole of it for arrays of these types and numbers of axes, with NAME for its name."""
        arguments = [f"const {TYPES[a.dtype]}* {name}" for a, name in zip(inputs, self.inputs, strict=True)]
        arguments += [f"{TYPES[kind]}* {name}" for kind, name in zip(output_dtypes, self.outputs, strict=True)]
        lines = [f"using {key} = {TYPES[value]};" for key, value in template if value in TYPES]
        lines += [f"constexpr int {key} = {int(value)};" for key, value in template if value not in TYPES]
        for a, name in self._shaped(inputs):
            sizes = [f"{name}_size_{i}" for i in range(a.ndim)]
            arguments += [f"const int {size}" for size in sizes]
            steps = [" * ".join(["1L", *sizes[i + 1 :]]) for i in range(a.ndim)]
            lines.append(f"const int {name}_shape[] = {{{', '.join(sizes)}}};")
            lines.append(f"const long {name}_strides[] = {{{', '.join(steps)}}};")
            lines.append(f"constexpr int {name}_ndim = {a.ndim};")
        opening = f'extern "C" __global__ void {NAME}({", ".join(arguments)}) {{'
        return "\n".join((PRELUDE, self.header, opening, *lines, self.source, "}"))

    def _shaped(self, inputs: Sequence[Any]) -> list[tuple[Any, str]]:
        named = zip(inputs, self.inputs, strict=True)
        return [(a, name) for a, name in named if f"{name}_shape" in self.source or f"{name}_strides" in self.source]

    def _plain(self, shared_memory: int) -> Any:
        """What MLX makes of it, which is told about shared memory before and not at each launch."""
        if shared_memory not in self._plains:
            self._plains[shared_memory] = mx.fast.cuda_kernel(
                name=self.name,
                input_names=self.inputs,
                output_names=self.outputs,
                source=self.source,
                header=self.header,
                shared_memory=shared_memory,
            )
        return self._plains[shared_memory]


class Nvrtc:
    """The compiler, for one architecture."""

    def __init__(self, library: Any, architecture: str) -> None:
        self._library = library
        self._options = [
            f"--gpu-architecture={architecture}",
            "--std=c++17",
            "--device-as-default-execution-space",
            "-w",
        ]
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._do("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value} {' '.join(self._options)}"
        self._known: dict[str, bytes | None] = {}

    def code(self, name: str, text: str) -> bytes | None:
        """What the device runs, from memory, from disk, or compiled; None where the compiler refuses, once told."""
        if name not in self._known:
            try:
                self._known[name] = self._kept(name, text)
            except RuntimeError as error:
                log.info("The kernel %s is compiled by MLX: %s", name, str(error).strip().partition("\n")[0])
                self._known[name] = None
        return self._known[name]

    def _kept(self, name: str, text: str) -> bytes:
        digest = hashlib.sha256((self.version + text).encode()).hexdigest()[:32]
        path = cache_folder() / FOLDER / f"{digest}.cubin"
        try:
            whole = path.read_bytes()
        except OSError:
            whole = b""
        code = whole[DIGEST:]
        if whole and hashlib.sha256(code).digest() == whole[:DIGEST]:
            return code
        code = self.compiled(name, text)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            old = sorted(path.parent.glob("*.cubin"), key=os.path.getmtime)
            for one in old[: len(old) - MOST_FILES + 1 if len(old) >= MOST_FILES else 0]:
                one.unlink(missing_ok=True)
            draft.write_bytes(hashlib.sha256(code).digest() + code)
            draft.replace(path)
        except OSError as error:
            log.debug("A compiled kernel is not kept: %s.", error)
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        return code

    def compiled(self, name: str, text: str) -> bytes:
        """Raises RuntimeError with what the compiler says."""
        program = ctypes.c_void_p()
        self._do("nvrtcCreateProgram", ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
        try:
            options = (ctypes.c_char_p * len(self._options))(*(option.encode() for option in self._options))
            if self._library.nvrtcCompileProgram(program, len(options), options):
                raise RuntimeError(self._read(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode())
            return self._read(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: Any, size_of: str, get: str) -> bytes:
        size = ctypes.c_size_t()
        self._do(size_of, program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        self._do(get, program, found)
        return bytes(found.raw)

    def _do(self, call: str, *arguments: Any) -> None:
        if result := getattr(self._library, call)(*arguments):
            raise RuntimeError(f"{call} failed with {result}")


@cache
def nvrtc() -> Nvrtc | None:
    """The compiler for this machine's device; None: there is none here, or MLX cannot launch what it makes."""
    if not mx.cuda.is_available() or not hasattr(mx.fast, "precompiled_cuda_kernel"):
        return None
    architecture = str(mx.device_info().get("architecture", ""))
    for name in LIBRARIES:
        try:
            return Nvrtc(ctypes.CDLL(name), architecture)
        except (OSError, AttributeError, RuntimeError):
            continue
    return None
