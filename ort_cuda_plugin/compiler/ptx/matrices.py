"""Matrix instructions of a warp: mma, ldmatrix and stmatrix, section 9.7.14 of the PTX ISA.

The emulator computes for all lanes of a warp when each has arrived (``csrc_shim/emulator/blocks/matrix.h``). The lanes
pass the addresses of their registers' values.
"""

from __future__ import annotations

import re

from .builder import Builder, thread_function
from .instructions import check_modifiers, instruction
from .parser import Group, Instruction, Operand

KINDS = ("f16", "bf16", "tf32", "s8", "u8", "e4m3", "e5m2", "s4", "u4", "b1", "f64")
"""Types of operand elements; the index is the emulator's number of the type."""
BITS = dict(zip(KINDS, (16, 16, 32, 8, 8, 8, 8, 4, 4, 1, 64), strict=True))
SUMS = ("f32", "f16", "s32", "f64")
"""Types of accumulators; the index is the emulator's number of the type."""
FAMILIES = (("f16",), ("bf16",), ("tf32",), ("s8", "u8"), ("e4m3", "e5m2"), ("s4", "u4"), ("b1",), ("f64",))
"""Groups of types: operands a and b must have types of one group."""
MULTIPLY = thread_function("mma", "void", "i32", "ptr", "ptr", "ptr", "ptr")
LOAD = thread_function("load_matrix", "void", "i32", "i32", "ptr", "ptr")
STORE = thread_function("store_matrix", "void", "i32", "i32", "ptr", "ptr")


def accumulators_of(a: str) -> tuple[str, ...]:
    """Return the accumulator types that mma supports for operand type ``a``."""
    if a in ("f16", "e4m3", "e5m2"):
        return ("f16", "f32")
    return ("f64",) if a == "f64" else ("f32",) if a in ("bf16", "tf32") else ("s32",)


def form_of(ins: Instruction) -> tuple[int, str, str]:
    """Return (the emulator's number for this variant of mma, type of a, type of the accumulators). Raises PtxError."""
    shape = next((re.fullmatch(r"m(8|16)n8k(\d+)", each) for each in ins.modifiers if each[0] == "m"), None)
    types = [each for each in ins.modifiers if each in KINDS or each in SUMS]
    if shape is None or len(types) != 4:
        raise ins.error("expected a shape .m8n8kN or .m16n8kN, and four known types of d, a, b and c")
    check_modifiers(
        ins, frozenset(("sync", "aligned", "row", "col", "satfinite", "xor", "and", "popc", shape[0], *types))
    )
    d, a, b, c = types
    if d != c or d not in accumulators_of(a) or not any({a, b} <= set(family) for family in FAMILIES):
        raise ins.error(f"the types .{d}, .{a}, .{b} and .{c} of d, a, b and c are not supported together")
    registers, rest = divmod(int(shape[2]), 4 if a == "f64" else 128 // BITS[a])
    if rest or not 0 < registers <= 4 or not ins.has("row") or not ins.has("col"):
        raise ins.error(f"the shape .{shape[0]} is not supported for .{a}, or the layouts are not .row.col")
    form = KINDS.index(a) | KINDS.index(b) << 4 | SUMS.index(d) << 8 | int(shape[1]) // 8 << 10 | registers << 12
    return form | ins.has("satfinite") << 16 | ins.has("xor") << 17, a, d


def group_of(operand: Operand) -> Group:
    """Return the operand as a group of registers; PTX also allows a single register without braces."""
    return operand if isinstance(operand, Group) else Group("{", (operand,))


def stored(b: Builder, role: str, group: Group, ty: str) -> str:
    """Store the registers of a group in scratch memory; return the memory's address."""
    memory = b.scratch(role, 4 * len(group.items) * (2 if ty == "b64" else 1))
    for index, item in enumerate(group.items):
        at = b.op(f"getelementptr i{ty[1:]}, ptr {memory}, i64 {index}")
        b.emit(f"store i{ty[1:]} {b.value(item, ty)}, ptr {at}")
    return memory


def loaded(b: Builder, memory: str, group: Group, ty: str) -> None:
    """Set the registers of a group to the values in scratch memory."""
    for index, item in enumerate(group.items):
        at = b.op(f"getelementptr i{ty[1:]}, ptr {memory}, i64 {index}")
        b.set(item, b.op(f"load i{ty[1:]}, ptr {at}"), ty)


@instruction("9.7.14.5", "mma")
def multiply_matrices(b: Builder, ins: Instruction) -> None:
    form, element, total = form_of(ins)
    d, x, y, c = (group_of(each) for each in ins.operands)
    halves, registers = form >> 10 & 3, form >> 12 & 15
    sums = halves if total == "f16" else 2 * halves
    got, expected = [len(each.items) for each in (d, x, y, c)], [sums, halves * registers, registers, sums]
    if got != expected:
        raise ins.error(f"registers of d, a, b and c: got {got}, expected {expected} for this shape and these types")
    word, sum_word = "b64" if element == "f64" else "b32", "b64" if total == "f64" else "b32"
    given = [stored(b, role, each, ty) for role, each, ty in (("a", x, word), ("b", y, word), ("c", c, sum_word))]
    result = b.scratch("d", 4 * sums * (2 if total == "f64" else 1))
    b.call("void", MULTIPLY, f"i32 {form}", *(f"ptr {memory}" for memory in given), f"ptr {result}")
    loaded(b, result, d, sum_word)


COUNTS = {"x1": 1, "x2": 2, "x4": 4}
LAYOUT = frozenset(("sync", "aligned", "m8n8", *COUNTS, "trans", "shared", "shared::cta"))


def matrices(ins: Instruction, group: Group) -> int:
    """Return the number of matrices that ldmatrix or stmatrix moves. Raises PtxError."""
    check_modifiers(ins, LAYOUT)
    count = next((COUNTS[each] for each in ins.modifiers if each in COUNTS), 0)
    if not count or not ins.has("m8n8") or not ins.has("b16"):
        raise ins.error("expected .m8n8, .b16, and .x1, .x2 or .x4: other matrices are not supported")
    if len(group.items) != count:
        raise ins.error(f"got a vector operand of {len(group.items)} registers, expected {count}: one per matrix")
    return count


@instruction("9.7.14.5.15", "ldmatrix")
def load_matrices(b: Builder, ins: Instruction) -> None:
    operand, address = ins.operands
    d = group_of(operand)
    count = matrices(ins, d)
    memory = b.scratch("d", 4 * count)
    row = b.pointer(address, "shared" if ins.has("shared", "shared::cta") else "")
    b.call("void", LOAD, f"i32 {count}", f"i32 {int(ins.has('trans'))}", f"ptr {row}", f"ptr {memory}")
    loaded(b, memory, d, "b32")


@instruction("9.7.14.5.16", "stmatrix")
def store_matrices(b: Builder, ins: Instruction) -> None:
    address, operand = ins.operands
    given = group_of(operand)
    count = matrices(ins, given)
    memory = stored(b, "a", given, "b32")
    row = b.pointer(address, "shared" if ins.has("shared", "shared::cta") else "")
    b.call("void", STORE, f"i32 {count}", f"i32 {int(ins.has('trans'))}", f"ptr {row}", f"ptr {memory}")
