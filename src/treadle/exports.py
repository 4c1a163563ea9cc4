"""Functions given to the dynamic linker under names of our choice, without a compiler.

A library whose functions carry a prefix cannot stand in for another one, since the linker binds by name. Here a
shared object of a few hundred bytes is made in memory; each of its functions jumps to an address in this process.
Linux on x86-64 and arm64 (the layout: System V ABI, "Object Files" and "Dynamic Linking").
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable

PAGE = 0x10000  # the largest page size in use, so that the two segments never share one
HEADER, SEGMENT, SYMBOL = 64, 56, 24  # sizes in bytes of what ELF64 calls ehdr, phdr and sym
LOAD, DYNAMIC, STACK = 1, 2, 0x6474E551
READ, WRITE, RUN = 4, 2, 1

# The processor's number in an ELF header, and the code that jumps to an address.
_MACHINES: dict[str, tuple[int, Callable[[int], bytes]]] = {
    "x86_64": (62, lambda address: bytes.fromhex("f30f1efa 48b8") + struct.pack("<Q", address) + bytes.fromhex("ffe0")),
    "aarch64": (183, lambda address: struct.pack("<IIQ", 0x58000050, 0xD61F0200, address)),  # ldr x16, +8; br x16
}


def available() -> bool:
    return sys.platform.startswith("linux") and platform.machine() in _MACHINES


def export(functions: dict[str, int]) -> None:
    """Let libraries that are loaded from now on find `functions` (name to address in this process, which must stay
    valid) before those of their own dependencies.

    Raises:
        OSError: this processor is not known, or the system does not let code be mapped from memory.
    """
    if not available():
        raise OSError(f"no functions can be lent on {platform.machine()}")
    file = os.memfd_create("treadle-exports")
    try:
        os.write(file, _shared_object(functions))
        ctypes.CDLL(f"/proc/self/fd/{file}", mode=ctypes.RTLD_GLOBAL)
    finally:
        os.close(file)


def _shared_object(functions: dict[str, int]) -> bytes:
    """One segment to read and run (names and code), one to write (what the linker fills in), no sections."""
    machine, jump = _MACHINES[platform.machine()]
    jumps = [jump(address).ljust(16, b"\0") for address in functions.values()]
    names = b"\0" + b"".join(name.encode() + b"\0" for name in functions)
    symbols_at = HEADER + 4 * SEGMENT
    names_at = symbols_at + SYMBOL * (1 + len(functions))
    hash_at = _aligned(names_at + len(names))
    # One bucket: a chain through all symbols, of which number 0 means none.
    hashes = struct.pack(f"<{4 + len(functions)}I", 1, 1 + len(functions), 1, 0, *range(2, 1 + len(functions)), 0)
    code_at = _aligned(hash_at + len(hashes))
    end = code_at + 16 * len(jumps)
    tags = ((4, hash_at), (5, names_at), (6, symbols_at), (10, len(names)), (11, SYMBOL), (0, 0))
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in tags)

    identity = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)  # 64 bits, little-endian, version 1
    head = identity + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, HEADER, 0, 0, HEADER, SEGMENT, 4, 0, 0, 0)
    segments = (
        (LOAD, READ | RUN, 0, end),
        (LOAD, READ | WRITE, PAGE, len(dynamic)),
        (DYNAMIC, READ | WRITE, PAGE, len(dynamic)),
        (STACK, READ | WRITE, 0, 0),
    )
    for kind, rights, at, size in segments:
        head += struct.pack("<IIQQQQQQ", kind, rights, at, at, at, size, size, PAGE if kind == LOAD else 16)
    symbols, name_at = bytes(SYMBOL), 1
    for index, name in enumerate(functions):
        symbols += struct.pack("<IBBHQQ", name_at, 0x12, 0, 1, code_at + 16 * index, 16)  # a global function
        name_at += len(name) + 1
    read = (head + symbols + names).ljust(hash_at, b"\0") + hashes
    return (read.ljust(code_at, b"\0") + b"".join(jumps)).ljust(PAGE, b"\0") + dynamic


def _aligned(at: int) -> int:
    return -(-at // 16) * 16
