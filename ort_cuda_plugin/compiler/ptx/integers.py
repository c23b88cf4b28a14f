"""Integer arithmetic, logic, shifts, comparisons and selections, and operations on packed bytes and halfwords.

Sections 9.7.1, 9.7.2, 9.7.6 to 9.7.8 and 9.7.17 of the PTX ISA define these instructions, and 9.7.9.7 defines prmt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from .builder import Builder, bits_of, is_float, is_signed, llvm_type
from .floats import float_arithmetic, from_bf16, joined, split
from .instructions import check_modifiers, instruction, type_of, types_of
from .parser import Group, Instruction

Compute: TypeAlias = Callable[..., str]
"""Function (builder, instruction, type, values of the operands) that returns the value of the result."""
CARRY = "%carry"


def is_integer_type(ty: str) -> bool:
    return ty[0] in "us" or (ty[0] == "b" and not ty.startswith("bf"))


def integers(
    section: str, *opcodes: str, modifiers: frozenset[str] = frozenset(), result: str = "", floats: bool = False
) -> Callable[[Compute], Compute]:
    """Register the decorated function, which computes the result of ``opcodes`` from the values of the other operands.

    All operands have the instruction's type. ``modifiers`` are those that the function supports. ``result`` is the type
    of the result, if it differs. With ``floats``, the opcode also exists for floating-point types.
    """

    def register(compute: Compute) -> Compute:
        def translate(b: Builder, ins: Instruction) -> None:
            if floats and not all(map(is_integer_type, types_of(ins))):
                float_arithmetic(b, ins)
                return
            ty = type_of(ins)
            check_modifiers(ins, modifiers)
            values = [b.value(operand, ty) for operand in ins.operands[1:]]
            if ty.endswith("x2"):
                pairs = [split(b, value) for value in values]
                low, high = (compute(b, ins, ty[:-2], *(pair[index] for pair in pairs)) for index in (0, 1))
                b.set(ins.operands[0], joined(b, low, high), ty)
                return
            b.set(ins.operands[0], compute(b, ins, ty, *values), result or ty)

        instruction(section, *opcodes)(translate)
        return compute

    return register


def clamped_shift(b: Builder, kind: str, ty: str, x: str, amount: str) -> str:
    """Shift by ``amount``, an i32, with ``shl``, ``lshr`` or ``ashr``. A shift by the width or more gives 0, or the
    sign for ashr.
    """
    bits, width = bits_of(ty), llvm_type(ty)
    inside = b.op(f"icmp ult i32 {amount}, {bits}")
    limited = b.op(f"select i1 {inside}, i32 {amount}, i32 {bits - 1}")
    value = b.op(f"{kind} {width} {x}, {b.convert_bits(limited, 'i32', width)}")
    return value if kind == "ashr" else b.op(f"select i1 {inside}, {width} {value}, {width} 0")


@integers("9.7.1.1, 9.7.1.2, 9.7.2.1, 9.7.2.3", "add", "sub", modifiers=frozenset(("cc", "sat")), floats=True)
def add(b: Builder, ins: Instruction, ty: str, x: str, y: str) -> str:
    width = llvm_type(ty)
    if ins.has("sat"):
        kind = ("s" if is_signed(ty) else "u") + ins.opcode
        return b.call(width, f"llvm.{kind}.sat.{width}", f"{width} {x}", f"{width} {y}")
    if ins.has("cc"):
        return with_carry(b, ins, ty, x, y, None)
    return b.op(f"{ins.opcode} {width} {x}, {y}")


@integers("9.7.2.2, 9.7.2.4", "addc", "subc", modifiers=frozenset(("cc",)))
def add_with_carry(b: Builder, ins: Instruction, ty: str, x: str, y: str) -> str:
    return with_carry(b, ins, ty, x, y, b.op(f"load i1, ptr {CARRY}"))


def with_carry(b: Builder, ins: Instruction, ty: str, x: str, y: str, carry: str | None) -> str:
    """Add or subtract with twice the bits, including the i1 ``carry``, if given; with ``.cc``, store the new carry."""
    bits = bits_of(ty)
    wide = f"i{2 * bits}"
    kind = "sub" if ins.opcode.startswith("sub") else "add"
    total = b.op(f"{kind} {wide} {b.op(f'zext i{bits} {x} to {wide}')}, {b.op(f'zext i{bits} {y} to {wide}')}")
    if carry is not None:
        total = b.op(f"{kind} {wide} {total}, {b.op(f'zext i1 {carry} to {wide}')}")
    if ins.has("cc"):
        out = b.op(f"trunc {wide} {b.op(f'lshr {wide} {total}, {bits}')} to i1")
        b.emit(f"store i1 {out}, ptr {CARRY}")
    return b.op(f"trunc {wide} {total} to i{bits}")


@instruction("9.7.1.3, 9.7.1.4, 9.7.2.5", "mul", "mad", "madc")
def multiply(b: Builder, ins: Instruction) -> None:
    """Multiply, and add the last operand, which has the type of the selected part of the product."""
    ty = type_of(ins)
    if not is_integer_type(ty):
        float_arithmetic(b, ins)
        return
    check_modifiers(ins, frozenset(("lo", "hi", "wide", "cc", "sat")))
    d, x, y, *addends = ins.operands
    value, result = product(b, ins, b.value(x, ty), b.value(y, ty), ty)
    for addend in addends:
        z = b.value(addend, result)
        if ins.opcode == "madc" or ins.has("cc"):
            carry = b.op(f"load i1, ptr {CARRY}") if ins.opcode == "madc" else None
            value = with_carry(b, ins, result, value, z, carry)
        elif ins.has("sat"):
            value = b.call("i32", "llvm.sadd.sat.i32", f"i32 {value}", f"i32 {z}")
        else:
            value = b.op(f"add {llvm_type(result)} {value}, {z}")
    b.set(d, value, result)


def product(b: Builder, ins: Instruction, x: str, y: str, ty: str) -> tuple[str, str]:
    """Return (the part of the product that ``.lo``, ``.hi`` or ``.wide`` selects, its type)."""
    bits = bits_of(ty)
    if not ins.has("hi", "wide"):
        return b.op(f"mul i{bits} {x}, {y}"), ty
    extend, wide = ("sext" if is_signed(ty) else "zext"), f"i{2 * bits}"
    whole = b.op(f"mul {wide} {b.op(f'{extend} i{bits} {x} to {wide}')}, {b.op(f'{extend} i{bits} {y} to {wide}')}")
    if ins.has("wide"):
        return whole, f"{ty[0]}{2 * bits}"
    return b.op(f"trunc {wide} {b.op(f'lshr {wide} {whole}, {bits}')} to i{bits}"), ty


@integers("9.7.1.5, 9.7.1.6", "mul24", "mad24", modifiers=frozenset(("lo", "hi")))
def multiply_24(b: Builder, ins: Instruction, ty: str, x: str, y: str, addend: str = "0") -> str:
    shift = "ashr" if is_signed(ty) else "lshr"
    x, y = (b.op(f"{shift} i32 {b.op(f'shl i32 {each}, 8')}, 8") for each in (x, y))
    if ins.has("hi"):
        extend = "sext" if is_signed(ty) else "zext"
        whole = b.op(f"mul i64 {b.op(f'{extend} i32 {x} to i64')}, {b.op(f'{extend} i32 {y} to i64')}")
        value = b.op(f"trunc i64 {b.op(f'lshr i64 {whole}, 16')} to i32")
    else:
        value = b.op(f"mul i32 {x}, {y}")
    return b.op(f"add i32 {value}, {addend}")


@integers("9.7.1.8, 9.7.1.9", "div", "rem", floats=True)
def divide(b: Builder, ins: Instruction, ty: str, x: str, y: str) -> str:
    """Divide, or return the remainder.

    For a divisor of 0, which the ISA leaves undefined, the quotient is all ones and the remainder is x.
    """
    width, sign = llvm_type(ty), "s" if is_signed(ty) else "u"
    zero = b.op(f"icmp eq {width} {y}, 0")
    unsafe = zero
    if is_signed(ty):
        least = b.op(f"icmp eq {width} {x}, {-(1 << bits_of(ty) - 1)}")
        overflow = b.op(f"and i1 {least}, {b.op(f'icmp eq {width} {y}, -1')}")
        unsafe = b.op(f"or i1 {zero}, {overflow}")
    divisor = b.op(f"select i1 {unsafe}, {width} 1, {width} {y}")
    value = b.op(f"{sign}{ins.opcode} {width} {x}, {divisor}")
    instead = "-1" if ins.opcode == "div" else x
    return b.op(f"select i1 {zero}, {width} {instead}, {width} {value}")


@integers("9.7.1.10, 9.7.1.11", "abs", "neg", floats=True)
def negate(b: Builder, ins: Instruction, ty: str, x: str) -> str:
    width = llvm_type(ty)
    value = b.op(f"sub {width} 0, {x}")
    if ins.opcode == "neg":
        return value
    return b.op(f"select i1 {b.op(f'icmp slt {width} {x}, 0')}, {width} {value}, {width} {x}")


@integers("9.7.1.12, 9.7.1.13", "min", "max", modifiers=frozenset(("relu",)), floats=True)
def least(b: Builder, ins: Instruction, ty: str, x: str, y: str) -> str:
    width = llvm_type(ty)
    relation = ("s" if is_signed(ty) else "u") + ("lt" if ins.opcode == "min" else "gt")
    value = b.op(f"select i1 {b.op(f'icmp {relation} {width} {x}, {y}')}, {width} {x}, {width} {y}")
    if ins.has("relu"):
        value = b.op(f"select i1 {b.op(f'icmp slt {width} {value}, 0')}, {width} 0, {width} {value}")
    return value


@integers("9.7.1.7", "sad")
def difference(b: Builder, ins: Instruction, ty: str, x: str, y: str, z: str) -> str:
    width, relation = llvm_type(ty), "sgt" if is_signed(ty) else "ugt"
    greater = b.op(f"icmp {relation} {width} {x}, {y}")
    first, second = b.op(f"sub {width} {x}, {y}"), b.op(f"sub {width} {y}, {x}")
    return b.op(f"add {width} {b.op(f'select i1 {greater}, {width} {first}, {width} {second}')}, {z}")


@integers("9.7.1.14, 9.7.1.15", "popc", "clz", result="u32")
def count_bits(b: Builder, ins: Instruction, ty: str, x: str) -> str:
    width = llvm_type(ty)
    if ins.opcode == "popc":
        value = b.call(width, f"llvm.ctpop.{width}", f"{width} {x}")
    else:
        value = b.call(width, f"llvm.ctlz.{width}", f"{width} {x}", "i1 false")
    return b.convert_bits(value, width, "i32")


@integers("9.7.1.16", "bfind", modifiers=frozenset(("shiftamt",)), result="u32")
def find_leading(b: Builder, ins: Instruction, ty: str, x: str) -> str:
    """Return the position of the most significant bit that differs from the sign bit; all ones if no bit differs.

    With ``.shiftamt``, return the left shift that moves this bit to the top.
    """
    width, bits = llvm_type(ty), bits_of(ty)
    if is_signed(ty):
        inverted = b.op(f"xor {width} {x}, -1")
        x = b.op(f"select i1 {b.op(f'icmp slt {width} {x}, 0')}, {width} {inverted}, {width} {x}")
    zeros = b.convert_bits(b.call(width, f"llvm.ctlz.{width}", f"{width} {x}", "i1 false"), width, "i32")
    value = zeros if ins.has("shiftamt") else b.op(f"sub i32 {bits - 1}, {zeros}")
    return b.op(f"select i1 {b.op(f'icmp eq {width} {x}, 0')}, i32 -1, i32 {value}")


@integers("9.7.1.18", "brev")
def reverse(b: Builder, ins: Instruction, ty: str, x: str) -> str:
    width = llvm_type(ty)
    return b.call(width, f"llvm.bitreverse.{width}", f"{width} {x}")


def low_byte(b: Builder, ins: Instruction, index: int) -> str:
    """Return the lowest 8 bits of a 32-bit operand."""
    return b.op(f"and i32 {b.value(ins.operands[index], 'u32')}, 255")


def low_bits(b: Builder, ty: str, count: str) -> str:
    """Return a mask of the lowest ``count`` bits; a larger count than the type's width gives all ones."""
    return b.op(f"sub {llvm_type(ty)} {clamped_shift(b, 'shl', ty, '1', count)}, 1")


@instruction("9.7.1.19", "bfe")
def extract_field(b: Builder, ins: Instruction) -> None:
    """Extract ``length`` bits from bit ``start`` on; a .s type extends the field's highest bit."""
    check_modifiers(ins, frozenset())
    ty = type_of(ins)
    bits, width = bits_of(ty), llvm_type(ty)
    x, start, length = b.value(ins.operands[1], ty), low_byte(b, ins, 2), low_byte(b, ins, 3)
    mask = low_bits(b, ty, length)
    moved = clamped_shift(b, "ashr" if is_signed(ty) else "lshr", ty, x, start)
    value = b.op(f"and {width} {moved}, {mask}")
    if is_signed(ty):  # extend the sign of the field: its highest bit, but at most bit bits - 1 of x
        last = b.op(f"add i32 {start}, {b.op(f'sub i32 {length}, 1')}")
        inside = b.op(f"icmp ult i32 {last}, {bits - 1}")
        position = b.convert_bits(b.op(f"select i1 {inside}, i32 {last}, i32 {bits - 1}"), "i32", width)
        sign = b.op(f"trunc {width} {b.op(f'lshr {width} {x}, {position}')} to i1")
        filled = b.op(f"or {width} {moved}, {b.op(f'xor {width} {mask}, -1')}")
        value = b.op(f"select i1 {sign}, {width} {filled}, {width} {value}")
        value = b.op(f"select i1 {b.op(f'icmp eq i32 {length}, 0')}, {width} 0, {width} {value}")
    b.set(ins.operands[0], value, ty)


@instruction("9.7.1.20", "bfi")
def insert_field(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset())
    ty = type_of(ins)
    width = llvm_type(ty)
    field, base = (b.value(operand, ty) for operand in ins.operands[1:3])
    start, length = (low_byte(b, ins, index) for index in (3, 4))
    mask = clamped_shift(b, "shl", ty, low_bits(b, ty, length), start)
    inserted = b.op(f"and {width} {clamped_shift(b, 'shl', ty, field, start)}, {mask}")
    kept = b.op(f"and {width} {base}, {b.op(f'xor {width} {mask}, -1')}")
    b.set(ins.operands[0], b.op(f"or {width} {inserted}, {kept}"), ty)


@instruction("9.7.1.23, 9.7.1.24", "dp4a", "dp2a")
def dot_product(b: Builder, ins: Instruction) -> None:
    """Add four products of bytes (dp4a), or two products of halfwords with the lower (.lo) or upper (.hi) two bytes
    (dp2a).
    """
    check_modifiers(ins, frozenset(("lo", "hi")))
    first, second = types_of(ins)[:2]
    _, x, y, z = ins.operands
    a, c, total = b.value(x, first), b.value(y, second), b.value(z, "u32")
    count = 4 if ins.opcode == "dp4a" else 2
    for index in range(count):
        width = 32 // count
        element = extended_part(b, a, index * width, width, is_signed(first))
        offset = 2 if ins.has("hi") else 0
        factor = extended_part(b, c, (index + offset) * 8, 8, is_signed(second))
        total = b.op(f"add i32 {total}, {b.op(f'mul i32 {element}, {factor}')}")
    b.set(ins.operands[0], total, "u32")


def extended_part(b: Builder, word: str, start: int, width: int, signed: bool) -> str:
    part = b.op(f"trunc i32 {b.op(f'lshr i32 {word}, {start}')} to i{width}")
    return b.op(f"{'sext' if signed else 'zext'} i{width} {part} to i32")


# ---- logic and shifts ----


@integers("9.7.8.1, 9.7.8.2, 9.7.8.3", "and", "or", "xor")
def logic(b: Builder, ins: Instruction, ty: str, x: str, y: str) -> str:
    return b.op(f"{ins.opcode} {llvm_type(ty)} {x}, {y}")


@integers("9.7.8.4", "not")
def invert(b: Builder, ins: Instruction, ty: str, x: str) -> str:
    return b.op(f"xor {llvm_type(ty)} {x}, {'true' if ty == 'pred' else '-1'}")


@integers("9.7.8.5", "cnot")
def is_zero(b: Builder, ins: Instruction, ty: str, x: str) -> str:
    width = llvm_type(ty)
    return b.op(f"zext i1 {b.op(f'icmp eq {width} {x}, 0')} to {width}")


@instruction("9.7.8.6", "lop3")
def logic_of_three(b: Builder, ins: Instruction) -> None:
    """Compute a bitwise function of three operands; the immediate is its truth table. The result is the OR of its
    minterms.
    """
    check_modifiers(ins, frozenset())
    d, *inputs, last = ins.operands[:5]
    a, c, e = (b.value(each, "b32") for each in inputs)
    table = int(b.value(last, "u32"))
    inverted = {each: b.op(f"xor i32 {each}, -1") for each in dict.fromkeys((a, c, e))}
    result = "0"
    for index in range(8):
        if table >> index & 1:
            chosen = [x if index >> bit & 1 else inverted[x] for x, bit in ((a, 2), (c, 1), (e, 0))]
            term = b.op(f"and i32 {b.op(f'and i32 {chosen[0]}, {chosen[1]}')}, {chosen[2]}")
            result = b.op(f"or i32 {result}, {term}")
    b.set(d, result, "b32")


@instruction("9.7.8.8, 9.7.8.9", "shl", "shr")
def shift(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset())
    ty = type_of(ins)
    kind = "shl" if ins.opcode == "shl" else "ashr" if is_signed(ty) else "lshr"
    x, amount = b.value(ins.operands[1], ty), b.value(ins.operands[2], "u32")
    b.set(ins.operands[0], clamped_shift(b, kind, ty, x, amount), ty)


@instruction("9.7.8.7", "shf")
def funnel_shift(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset(("l", "r", "clamp", "wrap")))
    low, high, amount = (b.value(each, "b32") for each in ins.operands[1:])
    if ins.has("wrap"):
        amount = b.op(f"and i32 {amount}, 31")
    else:
        over = b.op(f"icmp ugt i32 {amount}, 32")
        amount = b.op(f"select i1 {over}, i32 32, i32 {amount}")
    upper = b.op(f"shl i64 {b.op(f'zext i32 {high} to i64')}, 32")
    both = b.op(f"or i64 {upper}, {b.op(f'zext i32 {low} to i64')}")
    moved = b.op(f"{'shl' if ins.has('l') else 'lshr'} i64 {both}, {b.op(f'zext i32 {amount} to i64')}")
    if ins.has("l"):
        moved = b.op(f"lshr i64 {moved}, 32")
    b.set(ins.operands[0], b.op(f"trunc i64 {moved} to i32"), "b32")


MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}
"""For each mode of prmt: equivalent selectors of the default mode, by the lowest two bits of the mode's selector."""


@instruction("9.7.9.7", "prmt")
def permute_bytes(b: Builder, ins: Instruction) -> None:
    """Select four of the eight bytes of two words. Bit 3 of a byte's selector replicates the byte's sign."""
    check_modifiers(ins, frozenset(MODES))
    low, high, selector = (b.value(each, "b32") for each in ins.operands[1:])
    if mode := next((each for each in ins.modifiers if each in MODES), ""):
        given = b.op(f"and i32 {selector}, 3")
        selector = str(MODES[mode][0])
        for number, other in enumerate(MODES[mode]):
            same = b.op(f"icmp eq i32 {given}, {number}")
            selector = b.op(f"select i1 {same}, i32 {other}, i32 {selector}")
    upper = b.op(f"shl i64 {b.op(f'zext i32 {high} to i64')}, 32")
    both = b.op(f"or i64 {upper}, {b.op(f'zext i32 {low} to i64')}")
    result = "0"
    for index in range(4):
        nibble = b.op(f"lshr i32 {selector}, {4 * index}")
        start = b.op(f"shl i32 {b.op(f'and i32 {nibble}, 7')}, 3")
        moved = b.op(f"lshr i64 {both}, {b.op(f'zext i32 {start} to i64')}")
        byte = b.op(f"trunc i64 {moved} to i8")
        sign = b.op(f"ashr i8 {byte}, 7")
        repeats = b.op(f"trunc i32 {b.op(f'lshr i32 {nibble}, 3')} to i1")
        chosen = b.op(f"zext i8 {b.op(f'select i1 {repeats}, i8 {sign}, i8 {byte}')} to i32")
        result = b.op(f"or i32 {result}, {b.op(f'shl i32 {chosen}, {8 * index}')}")
    b.set(ins.operands[0], result, "b32")


@instruction("9.7.1.21", "szext")
def extend_field(b: Builder, ins: Instruction) -> None:
    """Extend the lowest ``count`` bits to 32 bits: with their sign for .s32, with zeros for .u32."""
    check_modifiers(ins, frozenset(("clamp", "wrap")))
    ty = type_of(ins)
    x, count = b.value(ins.operands[1], ty), b.value(ins.operands[2], "u32")
    if ins.has("wrap"):
        count = b.op(f"and i32 {count}, 31")
    shift = b.op(f"sub i32 32, {count}")
    up = clamped_shift(b, "shl", ty, x, shift)
    value = clamped_shift(b, "ashr" if is_signed(ty) else "lshr", ty, up, shift)
    whole = b.op(f"icmp uge i32 {count}, 32")
    value = b.op(f"select i1 {b.op(f'icmp eq i32 {count}, 0')}, i32 0, i32 {value}")
    b.set(ins.operands[0], b.op(f"select i1 {whole}, i32 {x}, i32 {value}"), ty)


@instruction("9.7.1.22", "bmsk")
def make_mask(b: Builder, ins: Instruction) -> None:
    """Translate bmsk: a mask of ``count`` bits from bit ``start`` on."""
    check_modifiers(ins, frozenset(("clamp", "wrap")))
    start, count = (b.value(operand, "u32") for operand in ins.operands[1:])
    if ins.has("wrap"):
        start, count = (b.op(f"and i32 {each}, 31") for each in (start, count))
    b.set(ins.operands[0], clamped_shift(b, "shl", "b32", low_bits(b, "b32", count), start), "b32")


# ---- packed bytes and halfwords ----

PACKED = tuple(f"{name}{count}" for name in ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax") for count in (2, 4))


def packed_result(b: Builder, opcode: str, x: str, y: str) -> str:
    """Return the result of a packed operation (`PACKED`) for one halfword or byte of each operand, as i32."""
    if opcode in ("vadd", "vsub"):
        return b.op(f"{opcode[1:]} i32 {x}, {y}")
    if opcode == "vavrg":
        total = b.op(f"add i32 {b.op(f'add i32 {x}, {y}')}, 1")
        return b.op(f"ashr i32 {total}, 1")
    less = b.op(f"icmp slt i32 {x}, {y}")
    if opcode == "vabsdiff":
        first, second = b.op(f"sub i32 {y}, {x}"), b.op(f"sub i32 {x}, {y}")
        return b.op(f"select i1 {less}, i32 {first}, i32 {second}")
    a, c = (x, y) if opcode == "vmin" else (y, x)
    return b.op(f"select i1 {less}, i32 {a}, i32 {c}")


@instruction("9.7.17", *PACKED)
def packed(b: Builder, ins: Instruction) -> None:
    """Translate an operation on packed halfwords or bytes. With ``.add``, the results are added to the last operand."""
    check_modifiers(ins, frozenset(("sat", "add")))
    result, first, second = types_of(ins)
    d, x, y, z = ins.operands
    a, c = b.value(x, "b32"), b.value(y, "b32")
    width = 32 // int(ins.opcode[-1])
    total = b.value(z, "b32") if ins.has("add") else "0"
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if is_signed(result) else (0, (1 << width) - 1)
    for start in range(0, 32, width):
        parts = (extended_part(b, word, start, width, is_signed(ty)) for word, ty in ((a, first), (c, second)))
        value = packed_result(b, ins.opcode[:-1], *parts)
        if ins.has("sat"):
            value = b.op(f"select i1 {b.op(f'icmp slt i32 {value}, {low}')}, i32 {low}, i32 {value}")
            value = b.op(f"select i1 {b.op(f'icmp sgt i32 {value}, {high}')}, i32 {high}, i32 {value}")
        if ins.has("add"):
            total = b.op(f"add i32 {total}, {value}")
        else:
            kept = b.op(f"and i32 {value}, {(1 << width) - 1}")
            total = b.op(f"or i32 {total}, {b.op(f'shl i32 {kept}, {start}')}")
    b.set(d, total, "b32")


# ---- comparison and selection ----

ORDERED = {"eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}
UNORDERED = {"equ": "ueq", "neu": "une", "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge"}
FLOAT_RELATIONS = {**ORDERED, **UNORDERED, "num": "ord", "nan": "uno"}
UNSIGNED_ONLY = {"lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"}
RELATIONS = frozenset((*FLOAT_RELATIONS, *UNSIGNED_ONLY, "and", "or", "xor", "ftz"))


def compare(b: Builder, ins: Instruction, x: str, y: str, ty: str) -> str:
    """Return the i1 result of the comparison that the instruction's modifiers name, such as ``.lt``."""
    relation = next((each for each in ins.modifiers if each in RELATIONS - {"and", "or", "xor", "ftz"}), "")
    if ty == "bf16":
        x, y, ty = from_bf16(b, x), from_bf16(b, y), "f32"
    if is_float(ty) and relation in FLOAT_RELATIONS:
        return b.op(f"fcmp {FLOAT_RELATIONS[relation]} {llvm_type(ty)} {x}, {y}")
    sign = "s" if is_signed(ty) else "u"
    if relation in ("eq", "ne") and not is_float(ty):
        return b.op(f"icmp {relation} {llvm_type(ty)} {x}, {y}")
    kind = UNSIGNED_ONLY.get(relation) or (f"{sign}{relation}" if relation in ("lt", "le", "gt", "ge") else "")
    if not kind:
        raise ins.error(f"the relation {relation!r} does not exist for .{ty}")
    return b.op(f"icmp {kind} {llvm_type(ty)} {x}, {y}")


def compared_pair(b: Builder, ins: Instruction, ty: str) -> list[str]:
    """Return the i1 results of comparing the lower and the upper halves of a packed type."""
    single = ty.removesuffix("x2")
    pairs = [split(b, b.value(operand, ty)) for operand in ins.operands[1:3]]
    conditions = []
    for index in (0, 1):
        x, y = (b.convert_bits(pair[index], "i16", llvm_type(single)) for pair in pairs)
        conditions.append(compare(b, ins, x, y, single))
    return conditions


def combined(b: Builder, ins: Instruction, condition: str) -> str:
    """Return the condition combined with the predicate in the last operand, if the instruction has ``.and``, ``.or`` or
    ``.xor``.
    """
    operation = next((each for each in ins.modifiers if each in ("and", "or", "xor")), "")
    return b.op(f"{operation} i1 {condition}, {b.value(ins.operands[3], 'pred')}") if operation else condition


@instruction("9.7.6.2, 9.7.7.2", "setp")
def set_predicate(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, RELATIONS)
    ty = type_of(ins)
    d, x, y = ins.operands[:3]
    if ty.endswith("x2"):
        items = d.items if isinstance(d, Group) else (d,)
        for item, condition in zip(items, compared_pair(b, ins, ty), strict=False):
            b.set(item, combined(b, ins, condition), "pred")
        return
    condition = compare(b, ins, b.value(x, ty), b.value(y, ty), ty)
    if isinstance(d, Group):
        b.set(d.items[1], combined(b, ins, b.op(f"xor i1 {condition}, true")), "pred")
        d = d.items[0]
    b.set(d, combined(b, ins, condition), "pred")


@instruction("9.7.6.1, 9.7.7.1", "set")
def set_value(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, RELATIONS)
    result, ty = types_of(ins)
    d, x, y = ins.operands[:3]
    if ty.endswith("x2"):
        ones = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(result, 0xFFFF)
        flags = [combined(b, ins, condition) for condition in compared_pair(b, ins, ty)]
        low, high = (b.op(f"select i1 {flag}, i16 {ones}, i16 0") for flag in flags)
        b.set(d, joined(b, low, high), "b32")
        return
    condition = combined(b, ins, compare(b, ins, b.value(x, ty), b.value(y, ty), ty))
    if result == "bf16":
        value = b.op(f"select i1 {condition}, i16 16256, i16 0")
    elif is_float(result):
        value = b.op(f"uitofp i1 {condition} to {llvm_type(result)}")
    else:
        value = b.op(f"sext i1 {condition} to {llvm_type(result)}")
    b.set(d, value, result)


@instruction("9.7.6.3", "selp")
def select(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset())
    ty = type_of(ins)
    d, x, y, condition = ins.operands
    width = llvm_type(ty)
    a, c = b.value(x, ty), b.value(y, ty)
    b.set(d, b.op(f"select i1 {b.value(condition, 'pred')}, {width} {a}, {width} {c}"), ty)


@instruction("9.7.6.4", "slct")
def select_by_sign(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset(("ftz",)))
    ty, by = types_of(ins)
    d, x, y, sign = ins.operands
    width = llvm_type(ty)
    value = b.value(sign, by)
    condition = b.op(f"fcmp oge float {value}, 0.0" if is_float(by) else f"icmp sge i32 {value}, 0")
    a, c = b.value(x, ty), b.value(y, ty)
    b.set(d, b.op(f"select i1 {condition}, {width} {a}, {width} {c}"), ty)
