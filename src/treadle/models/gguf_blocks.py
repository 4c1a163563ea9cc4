"""The block formats of GGUF, decoded with NumPy: to integer codes with a scale and a bias, or to values.

Every function takes one tensor as `[rows, bytes per row]` and works on all of it at once. The layouts are the
format's own (ggml's `block_*` structures), written down as structured dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Blocks = NDArray[Any]

GROUP = 32  # values that share a scale and a bias
FOUR = np.uint8(4)
# Values of the 4-bit codes of IQ4_NL and IQ4_XS, and of MXFP4 (E2M1).
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
FP4_BIAS = 127  # exponent byte of scale 1


@dataclass(frozen=True, slots=True)
class Affine:
    """`value = scale * code + bias`, exactly.

    Codes are `[rows, groups, 32]`, scales and biases `[rows, groups]`.
    """

    bits: int
    codes: Bytes
    scales: Floats
    biases: Floats

    def values(self) -> Floats:
        """`[rows, columns]`."""
        values: Floats = self.codes * self.scales[..., None]
        values += self.biases[..., None]
        return values.reshape(len(values), -1)


@dataclass(frozen=True, slots=True)
class Fp4:
    """`value = FP4_VALUES[code] * 2 ** (exponent - 127)`.

    Codes are `[rows, groups, 32]`, exponents `[rows, groups]`.
    """

    codes: Bytes
    exponents: Bytes

    def values(self) -> Floats:
        """`[rows, columns]`."""
        scales = np.ldexp(np.float32(1), self.exponents.astype(np.int32) - FP4_BIAS).astype(np.float32)
        return (FP4_VALUES[self.codes] * scales[..., None]).reshape(len(self.codes), -1)


def _layout(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype(list(fields))


def _nibbles(packed: Bytes) -> Bytes:
    """`[..., n]` bytes to `[..., 2, n]`: all low halves, then all high halves."""
    return np.stack([packed & 15, packed >> 4], axis=-2)


def _fields(packed: Bytes, width: int) -> Bytes:
    """`[..., n]` bytes to `[..., 8 / width, n]`: the `width`-bit fields, lowest first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8(2**width - 1)


def _float(halves: Blocks) -> Floats:
    return halves.astype(np.float32)


def _scaled(values: Floats, scales: Floats) -> Floats:
    """Values `[rows, ..., n]` times scales `[rows, ...]`, as `[rows, columns]`."""
    scaled: Floats = values * scales[..., None]
    return scaled.reshape(len(scaled), -1)


def _grouped(codes: Bytes) -> Bytes:
    return np.ascontiguousarray(codes).reshape(len(codes), -1, GROUP)


def _high_bits(packed: Bytes) -> Bytes:
    """`[rows, blocks, 4]` bytes to the fifth bits of 32 values, `[rows, blocks, 32]`, each 0 or 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << FOUR


def _q4_0(raw: Bytes) -> Affine:
    blocks = raw.view(_layout(("d", "<f2"), ("qs", "u1", 16)))
    scales = _float(blocks["d"])
    return Affine(4, _grouped(_nibbles(blocks["qs"])), scales, -8 * scales)


def _q4_1(raw: Bytes) -> Affine:
    blocks = raw.view(_layout(("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)))
    return Affine(4, _grouped(_nibbles(blocks["qs"])), _float(blocks["d"]), _float(blocks["m"]))


def _q5_0(raw: Bytes) -> Affine:
    blocks = raw.view(_layout(("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)))
    scales = _float(blocks["d"])
    codes = _grouped(_nibbles(blocks["qs"])) | _high_bits(blocks["qh"])
    return Affine(5, codes, scales, -16 * scales)


def _q5_1(raw: Bytes) -> Affine:
    blocks = raw.view(_layout(("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)))
    codes = _grouped(_nibbles(blocks["qs"])) | _high_bits(blocks["qh"])
    return Affine(5, codes, _float(blocks["d"]), _float(blocks["m"]))


def _q8_0(raw: Bytes) -> Affine:
    blocks = raw.view(_layout(("d", "<f2"), ("qs", "u1", 32)))
    scales = _float(blocks["d"])
    return Affine(8, _grouped(blocks["qs"] ^ np.uint8(128)), scales, -128 * scales)


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """12 bytes to the 8 six-bit scales and the 8 six-bit minima of a superblock."""
    first, second, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([first & 63, (high & 15) | ((first >> 6) << 4)], axis=-1)
    minima = np.concatenate([second & 63, (high >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales, minima


def _k_affine(bits: int, blocks: Blocks, codes: Bytes) -> Affine:
    scales, minima = _k_scales(blocks["scales"])
    groups = (len(codes), -1)
    factor = _float(blocks["d"])[..., None] * scales
    bias = -_float(blocks["dmin"])[..., None] * minima
    return Affine(bits, _grouped(codes), factor.reshape(groups), bias.reshape(groups))


def _q4_k(raw: Bytes) -> Affine:
    blocks = raw.view(_layout(("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)))
    quarters = blocks["qs"].reshape(*blocks.shape, 4, 32)
    return _k_affine(4, blocks, _nibbles(quarters))


def _q5_k(raw: Bytes) -> Affine:
    layout = _layout(("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128))
    blocks = raw.view(layout)
    low = _nibbles(blocks["qs"].reshape(*blocks.shape, 4, 32)).reshape(*blocks.shape, 8, 32)
    return _k_affine(5, blocks, low | (_fields(blocks["qh"], 1) << FOUR))


def _q2_k(raw: Bytes) -> Floats:
    blocks = raw.view(_layout(("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")))
    codes = _fields(blocks["qs"].reshape(*blocks.shape, 2, 32), 2).reshape(*blocks.shape, 16, 16)
    factor = _float(blocks["d"])[..., None] * _float(blocks["scales"] & 15)
    minima = _float(blocks["dmin"])[..., None] * _float(blocks["scales"] >> FOUR)
    return (factor[..., None] * codes - minima[..., None]).reshape(len(raw), -1)


def _q3_k(raw: Bytes) -> Floats:
    blocks = raw.view(_layout(("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")))
    packed = blocks["scales"]
    low = _nibbles(packed[..., :8]).reshape(*blocks.shape, 16)
    high = _fields(packed[..., 8:], 2).reshape(*blocks.shape, 16)
    scales = _float(low | (high << FOUR)) - 32
    codes = _fields(blocks["qs"].reshape(*blocks.shape, 2, 32), 2).reshape(*blocks.shape, 8, 32)
    third = _fields(blocks["hmask"], 1)  # a set bit means that nothing is taken off
    values = _float(codes | (third << np.uint8(2))).reshape(*blocks.shape, 16, 16) - 4
    return _scaled(values, _float(blocks["d"])[..., None] * scales)


def _q6_k(raw: Bytes) -> Floats:
    blocks = raw.view(_layout(("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")))
    low = _nibbles(blocks["ql"].reshape(*blocks.shape, 2, 64)).reshape(*blocks.shape, 8, 32)
    high = _fields(blocks["qh"].reshape(*blocks.shape, 2, 32), 2).reshape(*blocks.shape, 8, 32)
    values = _float(low | (high << FOUR)).reshape(*blocks.shape, 16, 16) - 32
    return _scaled(values, _float(blocks["d"])[..., None] * _float(blocks["scales"]))


def _iq4_nl(raw: Bytes) -> Floats:
    blocks = raw.view(_layout(("d", "<f2"), ("qs", "u1", 16)))
    values = IQ4_VALUES[_grouped(_nibbles(blocks["qs"]))]
    return _scaled(values, _float(blocks["d"]))


def _iq4_xs(raw: Bytes) -> Floats:
    blocks = raw.view(_layout(("d", "<f2"), ("high", "<u2"), ("low", "u1", 4), ("qs", "u1", 128)))
    pairs = (blocks["high"][..., None] >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    low = np.stack([blocks["low"] & 15, blocks["low"] >> 4], axis=-1).reshape(*blocks.shape, 8)
    scales = _float(low | (pairs << 4)) - 32
    values = IQ4_VALUES[_nibbles(blocks["qs"].reshape(*blocks.shape, 8, 16))].reshape(*blocks.shape, 8, 32)
    return _scaled(values, _float(blocks["d"])[..., None] * scales)


def _bf16(raw: Bytes) -> Floats:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def mxfp4(raw: Bytes) -> Fp4:
    blocks = raw.view(_layout(("e", "u1"), ("qs", "u1", 16)))
    return Fp4(_grouped(_nibbles(blocks["qs"])), np.ascontiguousarray(blocks["e"]))


AFFINE: dict[str, Callable[[Bytes], Affine]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
VALUES: dict[str, Callable[[Bytes], Floats]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
PLAIN: dict[str, Callable[[Bytes], Floats]] = {
    "F32": lambda raw: raw.view("<f4"),
    "F16": lambda raw: raw.view("<f2").astype(np.float32),
    "BF16": _bf16,
}


def requantise(values: Floats) -> Affine:
    """The nearest 8-bit affine form of `[rows, columns]`; off by at most half a step of each group of 32."""
    groups = values.reshape(len(values), -1, GROUP)
    low = groups.min(axis=-1)
    scales = (groups.max(axis=-1) - low) / np.float32(255)
    steps = np.where(scales == 0, np.float32(1), scales)
    codes = np.rint((groups - low[..., None]) / steps[..., None])
    return Affine(8, np.clip(codes, 0, 255).astype(np.uint8), scales, low)


def pack(codes: Bytes, bits: int) -> NDArray[np.uint32]:
    """Codes `[rows, groups, 32]` to MLX's stream of bits along a row, lowest first: `[rows, words]`."""
    rows = len(codes)
    if bits == 8:
        packed = codes
    elif bits == 4:
        pairs = codes.view("<u2")  # low code in the low byte, high code in the high byte
        packed = (pairs | (pairs >> 4)).astype(np.uint8)
    else:
        packed = _pack_five(codes)
    return np.ascontiguousarray(packed).reshape(rows, -1).view("<u4")


def _pack_five(codes: Bytes) -> Bytes:
    """Eight 5-bit codes to 40 bits, by pairs, fours and eights inside 64-bit words."""
    words = codes.view("<u8")
    words = (words & 0x001F001F001F001F) | ((words & 0x1F001F001F001F00) >> 3)
    words = (words & 0x000003FF000003FF) | ((words & 0x03FF000003FF0000) >> 6)
    words = (words & 0x00000000000FFFFF) | ((words & 0x000FFFFF00000000) >> 12)
    return words.view(np.uint8).reshape(*words.shape, 8)[..., :5]
