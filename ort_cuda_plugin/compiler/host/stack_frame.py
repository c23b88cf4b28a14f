"""Stack bytes of compiled functions, read from their machine code for x86-64 or aarch64."""

from __future__ import annotations

import struct

CALLEE_BYTES = 4096
"""Stack bytes reserved for functions that kernels call: those of the C library, and the emulator's fiber switch."""
RED_ZONE_BYTES = 128
"""Bytes below the stack pointer that an x86-64 function may use without moving it."""
ALIGNED_FRAME_BYTES = 64
"""Bytes by which an aligned frame may grow: LLVM aligns frames to at most a vector of 64 bytes."""
EM_X86_64, EM_AARCH64 = 62, 183  # e_machine of ELF files


def frame_bytes(code: bytes, machine: int) -> int:
    """Return the stack bytes that a function and its callees need; 0 if its prologue is unknown.

    ``machine`` is the ``e_machine`` of the function's ELF object.
    """
    if machine == EM_X86_64:
        return _x86_64(code)
    return _aarch64(code) if machine == EM_AARCH64 else 0


def _x86_64(code: bytes) -> int:
    """Read the prologue: pushes, and the subtraction from the stack pointer that ends it."""
    position, pushed = 0, 8
    while position < len(code):
        byte = code[position]
        if 0x50 <= byte <= 0x57:  # push
            position, pushed = position + 1, pushed + 8
        elif byte == 0x41 and 0x50 <= code[position + 1] <= 0x57:  # push r8..r15
            position, pushed = position + 2, pushed + 8
        elif code[position : position + 3] == b"\x48\x89\xe5":  # mov rbp, rsp
            position += 3
        elif code[position : position + 3] == b"\x48\x83\xe4":  # and rsp, imm8
            position, pushed = position + 4, pushed + ALIGNED_FRAME_BYTES
        elif code[position : position + 3] == b"\x48\x83\xec":  # sub rsp, imm8
            return pushed + code[position + 3] + CALLEE_BYTES
        elif code[position : position + 3] == b"\x48\x81\xec":  # sub rsp, imm32
            return pushed + int(struct.unpack_from("<I", code, position + 3)[0]) + CALLEE_BYTES
        elif code[position : position + 3] == b"\x48\x81\xe4":  # and rsp, imm32
            position, pushed = position + 7, pushed + 4096
        else:
            break
    return pushed + RED_ZONE_BYTES + CALLEE_BYTES if pushed > 8 else 0


def _aarch64(code: bytes) -> int:
    """Add up all instructions that lower the stack pointer: the scheduler may move others between them."""
    total = CALLEE_BYTES
    for (word,) in struct.iter_unpack("<I", code[: len(code) // 4 * 4]):
        if word & 0xFF8003FF in (0xD10003FF, 0xD10003E9):  # sub sp, sp, #imm; sub x9, sp, #imm
            total += (word >> 10 & 0xFFF) << (12 if word & 1 << 22 else 0)
            if word & 0x1F == 9:  # `and sp, x9, #mask` follows
                total += ALIGNED_FRAME_BYTES
        elif word & 0xFFC003E0 in (0xA98003E0, 0x6D8003E0):  # stp of x or d registers, [sp, #imm]!
            total += 8 * (128 - (word >> 15 & 0x7F)) if word & 1 << 21 else 0
        elif word & 0xFFE00FE0 in (0xF8000FE0, 0xFC000FE0):  # str of an x or d register, [sp, #imm]!
            total += 512 - (word >> 12 & 0x1FF) if word & 1 << 20 else 0
    return total
