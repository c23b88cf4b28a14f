"""Floating-point instructions: sections 9.7.3 (single, double), 9.7.4 (half) and 9.7.5 (mixed) of the PTX ISA; cvt.

An instruction rounds as its modifier says. Without one, additions and multiplications round to nearest, and may fuse to
FMAs as in ptxas. Approximations (``.approx``) call functions of the C library, whose error is below the permitted one.
bfloat16 arithmetic is computed in float32, and FMAs of 16-bit types in float64, both then rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from .builder import Builder, bits_of, host_function, llvm_type
from .instructions import check_modifiers, instruction, type_of, types_of
from .parser import Instruction, Operand

SUFFIX = {"half": "f16", "float": "f32", "double": "f64"}
ROUNDINGS = frozenset(("rn", "rz", "rm", "rp", "rna"))
MODIFIERS = ROUNDINGS | {"ftz", "sat", "approx", "full", "relu", "NaN", "xorsign", "abs"}
SMALLEST_NORMAL = {"float": "0x3810000000000000", "double": "0x0010000000000000", "half": "0xH0400"}
Compute: TypeAlias = Callable[[str, Sequence[str]], str]


# ---- 16-bit floats ----


def from_bf16(b: Builder, value: str) -> str:
    """Return the float32 value of a bfloat16, given as i16."""
    wide = b.op(f"zext i16 {value} to i32")
    return b.op(f"bitcast i32 {b.op(f'shl i32 {wide}, 16')} to float")


def to_bf16(b: Builder, value: str) -> str:
    """Return a float32 rounded to the nearest bfloat16 (ties to even), as i16."""
    return b.call("i16", "ptx.cvt.rn.bf16.f32", f"float {value}")


def split(b: Builder, word: str) -> tuple[str, str]:
    """Return (lower 16 bits, upper 16 bits) of a 32-bit word."""
    return b.op(f"trunc i32 {word} to i16"), b.op(f"trunc i32 {b.op(f'lshr i32 {word}, 16')} to i16")


def joined(b: Builder, low: str, high: str) -> str:
    """Return a 32-bit word from its lower and upper 16 bits."""
    upper = b.op(f"shl i32 {b.op(f'zext i16 {high} to i32')}, 16")
    return b.op(f"or i32 {upper}, {b.op(f'zext i16 {low} to i32')}")


def elementwise(b: Builder, ins: Instruction, operands: Sequence[Operand], compute: Compute) -> None:
    """Write ``compute(LLVM type, values)`` to the destination; packed types are computed element by element."""
    if ins.opcode in ("add", "sub", "fma") and len(types_of(ins)) == 2:
        mixed_precision(b, ins, operands, compute)
        return
    ty = type_of(ins)
    values = [b.value(operand, ty) for operand in operands]
    if ty in ("f16x2", "bf16x2"):
        pairs = [split(b, value) for value in values]
        low, high = (of_half(b, ty[:-2], [pair[index] for pair in pairs], compute) for index in (0, 1))
        b.set(ins.operands[0], joined(b, low, high), ty)
    elif ty == "bf16":
        b.set(ins.operands[0], of_half(b, ty, values, compute), ty)
    elif ty == "f32x2":
        if ins.opcode not in ("add", "sub", "mul", "fma"):
            raise ins.error(f"{ins.opcode} is not supported for .f32x2")
        b.set(ins.operands[0], two_floats(b, values, compute), ty)
    else:
        b.set(ins.operands[0], compute(llvm_type(ty), values), ty)


def two_floats(b: Builder, values: Sequence[str], compute: Compute) -> str:
    """Return the 64 bits of a packed ``f32x2`` result; ``compute`` is applied to the lower and to the upper floats."""
    halves = []
    for shift in (0, 32):
        bits = [b.op(f"trunc i64 {b.op(f'lshr i64 {value}, {shift}')} to i32") for value in values]
        result = compute("float", [b.op(f"bitcast i32 {each} to float") for each in bits])
        halves.append(b.op(f"zext i32 {b.op(f'bitcast float {result} to i32')} to i64"))
    low, high = halves
    return b.op(f"or i64 {b.op(f'shl i64 {high}, 32')}, {low}")


def mixed_precision(b: Builder, ins: Instruction, operands: Sequence[Operand], compute: Compute) -> None:
    """Compute in float32 (section 9.7.5). All operands but the last have the second type, a 16-bit float."""
    result, ty = types_of(ins)
    if result != "f32" or ty not in ("f16", "bf16"):
        raise ins.error(f"expected .f32 and then .f16 or .bf16, got .{result} and .{ty}")
    halves = [b.value(operand, ty) for operand in operands[:-1]]
    values = [from_bf16(b, half) if ty == "bf16" else b.op(f"fpext half {half} to float") for half in halves]
    b.set(ins.operands[0], compute("float", [*values, b.value(operands[-1], "f32")]), "f32")


def of_half(b: Builder, ty: str, values: Sequence[str], compute: Compute) -> str:
    """Apply ``compute`` to 16-bit floats; ``values`` and the result have the LLVM type i16."""
    if ty == "bf16":
        return to_bf16(b, compute("float", [from_bf16(b, value) for value in values]))
    result = compute("half", [b.op(f"bitcast i16 {value} to half") for value in values])
    return b.op(f"bitcast half {result} to i16")


# ---- modifiers ----


def flushed(b: Builder, ins: Instruction, ty: str, value: str) -> str:
    """Return the value; with ``.ftz``, a subnormal value becomes 0 with the same sign."""
    if not ins.has("ftz"):
        return value
    size = b.call(ty, f"llvm.fabs.{SUFFIX[ty]}", f"{ty} {value}")
    tiny = b.op(f"fcmp olt {ty} {size}, {SMALLEST_NORMAL[ty]}")
    zero = b.call(ty, f"llvm.copysign.{SUFFIX[ty]}", f"{ty} 0.0", f"{ty} {value}")
    return b.op(f"select i1 {tiny}, {ty} {zero}, {ty} {value}")


def saturated(b: Builder, ins: Instruction, ty: str, value: str) -> str:
    """Return the value; with ``.sat``, clamped to [0, 1], and NaN becomes 0."""
    if not ins.has("sat"):
        return value
    positive = b.op(f"fcmp ogt {ty} {value}, 0.0")
    value = b.op(f"select i1 {positive}, {ty} {value}, {ty} 0.0")
    return b.op(f"select i1 {b.op(f'fcmp ogt {ty} {value}, 1.0')}, {ty} 1.0, {ty} {value}")


def rectified(b: Builder, ins: Instruction, ty: str, value: str) -> str:
    """Return the value; with ``.relu``, negative values become 0, and NaN stays."""
    if not ins.has("relu"):
        return value
    negative = b.op(f"fcmp olt {ty} {value}, 0.0")
    return b.op(f"select i1 {negative}, {ty} 0.0, {ty} {value}")


def rounding(ins: Instruction) -> str:
    return next((each for each in ins.modifiers if each in ROUNDINGS), "")


def fusing(b: Builder, ins: Instruction) -> str:
    """Return LLVM's flag ``contract`` if the operation may fuse with another one to an FMA."""
    return "contract " if b.contract and not rounding(ins) else ""


# ---- directed rounding: rz (toward 0), rm (down), rp (up) ----


def exact_sum(b: Builder, x: str, y: str) -> tuple[str, str]:
    """Return (rounded sum of two doubles, its exact error), by Knuth's TwoSum."""
    total = b.op(f"fadd double {x}, {y}")
    rest = b.op(f"fsub double {total}, {x}")
    first = b.op(f"fsub double {x}, {b.op(f'fsub double {total}, {rest}')}")
    return total, b.op(f"fadd double {first}, {b.op(f'fsub double {y}, {rest}')}")


def directed(b: Builder, mode: str, total: str, error: str) -> str:
    """Return total + error, which is exact as a sum of two doubles, rounded to float32 toward 0 (rz), down (rm) or up
    (rp).
    """
    near = b.op(f"fptrunc double {total} to float")
    wide = b.op(f"fpext float {near} to double")
    above = b.op(f"fcmp ogt double {wide}, {total}")
    below = b.op(f"fcmp olt double {wide}, {total}")
    same = b.op(f"fcmp oeq double {wide}, {total}")
    rest_up, rest_down = (b.op(f"fcmp {relation} double {error}, 0.0") for relation in ("ogt", "olt"))
    too_high = b.op(f"or i1 {above}, {b.op(f'and i1 {same}, {rest_down}')}")
    too_low = b.op(f"or i1 {below}, {b.op(f'and i1 {same}, {rest_up}')}")
    bits = b.op(f"bitcast float {near} to i32")
    negative = b.op(f"icmp slt i32 {bits}, 0")
    if mode == "rm":
        step, away = too_high, negative
    elif mode == "rp":
        step, away = too_low, b.op(f"xor i1 {negative}, true")
    else:
        step, away = b.op(f"select i1 {negative}, i1 {too_low}, i1 {too_high}"), "false"
    finite = b.op(f"fcmp one double {total}, 0x7FF0000000000000")
    step = b.op(f"and i1 {step}, {finite}")
    delta = b.op(f"select i1 {away}, i32 1, i32 -1")
    moved = b.op(f"add i32 {bits}, {delta}")
    chosen = b.op(f"select i1 {step}, i32 {moved}, i32 {bits}")
    return b.op(f"bitcast i32 {chosen} to float")


def with_direction(b: Builder, ins: Instruction, ty: str, values: Sequence[str]) -> str:
    """Return an addition, multiplication, FMA, division or square root with a directed rounding."""
    if ty == "double":
        return directed_double(b, ins, values)
    if ty != "float":
        raise ins.error(f"the rounding .{rounding(ins)} is supported for .f32 and .f64 only")
    wide = [b.op(f"fpext float {value} to double") for value in values]
    if ins.opcode in ("add", "sub"):
        second = b.op(f"fneg double {wide[1]}") if ins.opcode == "sub" else wide[1]
        total, error = exact_sum(b, wide[0], second)
    elif ins.opcode in ("mul", "fma", "mad"):
        total, error = b.op(f"fmul double {wide[0]}, {wide[1]}"), "0.0"  # exact: the product of two floats has 48 bits
        if ins.opcode != "mul":
            total, error = exact_sum(b, total, wide[2])
    elif ins.opcode in ("sqrt", "rcp", "div"):
        total, error = quotient(b, ins.opcode, wide)
    else:
        raise ins.error(f"the rounding .{rounding(ins)} is not supported for {ins.opcode}")
    return directed(b, rounding(ins), total, error)


DIRECTED = host_function("ocp_emu_directed", "double", "i32", "i32", "double", "double", "double")
OPERATIONS = {"add": 0, "sub": 1, "mul": 2, "fma": 3, "mad": 3, "div": 4, "rcp": 4, "sqrt": 5}
"""The emulator's numbers for operations with a directed rounding."""
DIRECTIONS = {"rm": 1, "rp": 2, "rz": 3}


def directed_double(b: Builder, ins: Instruction, values: Sequence[str]) -> str:
    """Return the result for doubles, which the host CPU computes with its rounding mode changed."""
    if ins.opcode not in OPERATIONS:
        raise ins.error(f"the rounding .{rounding(ins)} is not supported for {ins.opcode}")
    given = ["1.0", *values] if ins.opcode == "rcp" else list(values)
    given += ["0.0"] * (3 - len(given))
    numbers = (OPERATIONS[ins.opcode], DIRECTIONS[rounding(ins)])
    return b.call("double", DIRECTED, *(f"i32 {each}" for each in numbers), *(f"double {each}" for each in given))


def quotient(b: Builder, opcode: str, values: Sequence[str]) -> tuple[str, str]:
    """Return (rounded square root, reciprocal or quotient of doubles, a number with the sign of its error)."""
    if opcode == "sqrt":
        total = b.call("double", "llvm.sqrt.f64", f"double {values[0]}")
        product, above, divisor = total, values[0], "1.0"
    else:
        above, divisor = values if opcode == "div" else ("1.0", values[0])
        total = b.op(f"fdiv double {above}, {divisor}")
        product = divisor
    negative = b.op(f"fneg double {total}")
    rest = b.call("double", "llvm.fma.f64", f"double {negative}", f"double {product}", f"double {above}")
    return total, b.op(
        f"fmul double {rest}, {b.call('double', 'llvm.copysign.f64', 'double 1.0', f'double {divisor}')}"
    )


# ---- arithmetic ----


def fused(b: Builder, ty: str, values: Sequence[str]) -> str:
    """Return x * y + z, rounded once."""
    if ty == "half":
        wide = [b.op(f"fpext half {value} to double") for value in values]
        total = b.call("double", "llvm.fma.f64", *(f"double {value}" for value in wide))
        return b.op(f"fptrunc double {total} to half")
    return b.call(ty, f"llvm.fma.{SUFFIX[ty]}", *(f"{ty} {value}" for value in values))


def extreme(b: Builder, ins: Instruction, ty: str, values: Sequence[str]) -> str:
    """Return the minimum or maximum. -0 is less than +0. If one operand is NaN, return the other one, or NaN with
    ``.NaN``.
    """
    x, y = values
    width = {"half": 16, "float": 32, "double": 64}[ty]
    relation, zeros = ("olt", "or") if ins.opcode == "min" else ("ogt", "and")
    value = b.op(f"select i1 {b.op(f'fcmp {relation} {ty} {x}, {y}')}, {ty} {x}, {ty} {y}")
    p, q = (b.op(f"bitcast {ty} {each} to i{width}") for each in (x, y))
    both = b.op(f"bitcast i{width} {b.op(f'{zeros} i{width} {p}, {q}')} to {ty}")
    value = b.op(f"select i1 {b.op(f'fcmp oeq {ty} {x}, {y}')}, {ty} {both}, {ty} {value}")
    first, second = (b.op(f"fcmp uno {ty} {each}, {each}") for each in (x, y))
    if ins.has("NaN"):
        value = b.op(f"select i1 {first}, {ty} {x}, {ty} {value}")
        return b.op(f"select i1 {second}, {ty} {y}, {ty} {value}")
    value = b.op(f"select i1 {first}, {ty} {y}, {ty} {value}")
    return b.op(f"select i1 {second}, {ty} {x}, {ty} {value}")


def basic(b: Builder, ins: Instruction, ty: str, values: Sequence[str]) -> str:
    """Return the result of an operation with rounding to nearest."""
    x = values[0]
    operations = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
    if ins.opcode in ("fma", "mad"):
        return fused(b, ty, values)
    if ins.opcode in operations:
        flag = fusing(b, ins) if ins.opcode != "div" else ""
        return b.op(f"{operations[ins.opcode]} {flag}{ty} {x}, {values[1]}")
    if ins.opcode in ("min", "max"):
        return extreme(b, ins, ty, values)
    if ins.opcode == "neg":
        return b.op(f"fneg {ty} {x}")
    if ins.opcode in ("abs", "sqrt"):
        name = "fabs" if ins.opcode == "abs" else "sqrt"
        return b.call(ty, f"llvm.{name}.{SUFFIX[ty]}", f"{ty} {x}")
    if ins.opcode == "rcp":
        value = b.op(f"fdiv {ty} 1.0, {x}")
        return upper_word(b, value) if ty == "double" and ins.has("approx") else value
    raise ins.error(f"{ins.opcode} is not supported for .{type_of(ins)}")


def upper_word(b: Builder, value: str) -> str:
    """Return a double with its lower 32 bits cleared, as rcp.approx.ftz.f64 does."""
    bits = b.op(f"and i64 {b.op(f'bitcast double {value} to i64')}, -4294967296")
    return b.op(f"bitcast i64 {bits} to double")


@instruction("9.7.3.8, 9.7.3.12, 9.7.3.13, 9.7.4.3", "fma", "rcp", "sqrt")
def float_arithmetic(b: Builder, ins: Instruction) -> None:
    """Translate a floating-point instruction, with its modifiers except ``.xorsign``."""
    check_modifiers(ins, MODIFIERS)
    if ins.has("xorsign"):
        raise ins.error("the modifier .xorsign is not supported")

    def compute(ty: str, values: Sequence[str]) -> str:
        values = [flushed(b, ins, ty, value) for value in values]
        if rounding(ins) in ("rz", "rm", "rp"):
            value = with_direction(b, ins, ty, values)
        else:
            value = basic(b, ins, ty, values)
        value = rectified(b, ins, ty, saturated(b, ins, ty, value))
        return flushed(b, ins, ty, value)

    elementwise(b, ins, ins.operands[1:], compute)


FUNCTIONS = {"sin": "sin", "cos": "cos", "lg2": "log2", "ex2": "exp2", "tanh": "tanh", "rsqrt": ""}


@instruction("9.7.3.15 to 9.7.3.22, 9.7.4.9, 9.7.4.10", *FUNCTIONS)
def approximate(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, MODIFIERS)

    def compute(ty: str, values: Sequence[str]) -> str:
        value = flushed(b, ins, ty, values[0])
        if ty == "half":
            value = b.op(f"fpext half {value} to float")
        width = "float" if ty == "half" else ty
        if ins.opcode == "rsqrt":
            root = b.call(width, f"llvm.sqrt.{SUFFIX[width]}", f"{width} {value}")
            value = b.op(f"fdiv {width} 1.0, {root}")
            value = upper_word(b, value) if width == "double" and ins.has("ftz") else value
        elif width == "double":
            raise ins.error("the type .f64 is not supported")
        else:
            value = b.call("float", f"{FUNCTIONS[ins.opcode]}f", f"float {value}")
        value = flushed(b, ins, width, value)
        return b.op(f"fptrunc float {value} to half") if ty == "half" else value

    elementwise(b, ins, ins.operands[1:], compute)


@instruction("9.7.3.2", "copysign")
def copy_sign(b: Builder, ins: Instruction) -> None:
    """Translate copysign, which returns the second operand with the sign of the first."""
    check_modifiers(ins, frozenset())
    ty = type_of(ins)
    width = llvm_type(ty)
    sign, size = (b.value(each, ty) for each in ins.operands[1:])
    b.set(ins.operands[0], b.call(width, f"llvm.copysign.{SUFFIX[width]}", f"{width} {size}", f"{width} {sign}"), ty)


TESTS = {"finite": 0x1F8, "infinite": 0x204, "notanumber": 0x003, "number": 0x3FC, "normal": 0x108, "subnormal": 0x090}
"""For each test of the instruction testp: the classes of ``llvm.is.fpclass`` for which it is true, as a mask."""


@instruction("9.7.3.1", "testp")
def test_property(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset(TESTS))
    ty = type_of(ins)
    width = llvm_type(ty)
    test = next(each for each in ins.modifiers if each in TESTS)
    value = b.call(
        "i1", f"llvm.is.fpclass.{SUFFIX[width]}", f"{width} {b.value(ins.operands[1], ty)}", f"i32 {TESTS[test]}"
    )
    b.set(ins.operands[0], value, "pred")


# ---- conversions ----

INTEGER_ROUNDINGS = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
CONVERSION_MODIFIERS = MODIFIERS | frozenset(INTEGER_ROUNDINGS)


@instruction("9.7.9.21", "cvt")
def convert(b: Builder, ins: Instruction) -> None:
    kinds = [each for each in ins.modifiers if each not in CONVERSION_MODIFIERS and each != "satfinite"]
    if ins.has("satfinite") and kinds[0] not in EIGHT_BITS:
        names = " and ".join(f".{each}" for each in EIGHT_BITS)
        raise ins.error(f"the modifier .satfinite is supported for conversions to {names} only, got .{kinds[0]}")
    if len(kinds) != 2:
        got = ", ".join(f".{each}" for each in kinds) or "none"
        raise ins.error(f"expected a destination type and a source type, got {got}")
    target, source = kinds
    if target in EIGHT_BITS:
        narrow(b, ins, target, source)
        return
    if source in EIGHT_BITS and target == "f16x2":
        widen(b, ins, source)
        return
    if target in ("f16x2", "bf16x2"):
        pack(b, ins, target, source)
        return
    if target == "tf32":
        value = flushed(b, ins, "float", b.value(ins.operands[1], source))
        b.set(ins.operands[0], to_tf32(b, ins, rectified(b, ins, "float", value)), "b32")
        return
    if not {target, source} <= {*(f"{k}{n}" for k in "us" for n in (8, 16, 32, 64)), "f16", "bf16", "f32", "f64"}:
        raise ins.error(f"the conversion from .{source} to .{target} is not supported")
    value = b.value(ins.operands[1], source)
    if source[0] in "us":
        b.set(ins.operands[0], from_integer(b, ins, value, source, target), target)
        return
    if source == "bf16":
        value, source = from_bf16(b, value), "f32"
    value = flushed(b, ins, llvm_type(source), value)
    if target[0] in "us":
        b.set(ins.operands[0], to_integer(b, ins, value, source, target), target)
    else:
        b.set(ins.operands[0], between_floats(b, ins, value, source, target), target)


def from_integer(b: Builder, ins: Instruction, value: str, source: str, target: str) -> str:
    """Convert an integer to another integer type (saturating with ``.sat``), or to a float."""
    signed = source[0] == "s"
    if target[0] in "us":
        return (
            clamped(b, value, source, target)
            if ins.has("sat")
            else b.convert_bits(value, llvm_type(source), llvm_type(target), signed)
        )
    if rounding(ins) not in ("", "rn"):
        return rounded_integer(b, ins, value, source, target)
    ty = "float" if target == "bf16" else llvm_type(target)
    result = b.op(f"{'s' if signed else 'u'}itofp {llvm_type(source)} {value} to {ty}")
    return to_bf16(b, result) if target == "bf16" else result


def rounded_integer(b: Builder, ins: Instruction, value: str, source: str, target: str) -> str:
    """Convert an integer of up to 64 bits to float32 with a directed rounding, as the sum of two exact doubles."""
    if target != "f32":
        raise ins.error(f"the rounding .{rounding(ins)} is not supported for .{target}")
    wide = b.convert_bits(value, llvm_type(source), "i64", source[0] == "s")
    high = b.op(f"and i64 {wide}, -4294967296")
    low = b.op(f"uitofp i64 {b.op(f'and i64 {wide}, 4294967295')} to double")
    upper = b.op(f"{'s' if source[0] == 's' else 'u'}itofp i64 {high} to double")
    return directed(b, rounding(ins), *exact_sum(b, upper, low))


def clamped(b: Builder, value: str, source: str, target: str) -> str:
    """Convert an integer to the nearest value of another integer type."""
    wide = b.convert_bits(value, llvm_type(source), "i128", source[0] == "s")
    bits = bits_of(target)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if target[0] == "s" else (0, (1 << bits) - 1)
    wide = b.op(f"select i1 {b.op(f'icmp slt i128 {wide}, {low}')}, i128 {low}, i128 {wide}")
    wide = b.op(f"select i1 {b.op(f'icmp sgt i128 {wide}, {high}')}, i128 {high}, i128 {wide}")
    return b.op(f"trunc i128 {wide} to i{bits}")


def to_integer(b: Builder, ins: Instruction, value: str, source: str, target: str) -> str:
    """Convert a float to an integer, saturating; NaN becomes 0."""
    mode = next((each for each in ins.modifiers if each in INTEGER_ROUNDINGS), "")
    if not mode:
        raise ins.error("a conversion from a float to an integer needs a rounding: .rni, .rzi, .rmi or .rpi")
    ty = llvm_type(source)
    if ty == "half":
        ty, value = "float", b.op(f"fpext half {value} to float")
    rounded = b.call(ty, f"llvm.{INTEGER_ROUNDINGS[mode]}.{SUFFIX[ty]}", f"{ty} {value}")
    width, sign = llvm_type(target), target[0]
    return b.call(width, f"llvm.fpto{sign}i.sat.{width}.{SUFFIX[ty]}", f"{ty} {rounded}")


def between_floats(b: Builder, ins: Instruction, value: str, source: str, target: str) -> str:
    """Convert a float to a float type. Between equal types, the rounding modifier rounds to an integer."""
    ty, result = llvm_type(source), "float" if target == "bf16" else llvm_type(target)
    mode = next((each for each in ins.modifiers if each in INTEGER_ROUNDINGS), "")
    if mode:
        value = b.call(ty, f"llvm.{INTEGER_ROUNDINGS[mode]}.{SUFFIX[ty]}", f"{ty} {value}")
    order = ["half", "float", "double"]
    narrows = order.index(result) < order.index(ty) or (target == "bf16" and source != "bf16")
    if narrows and rounding(ins) not in ("rn", ""):
        value = directed_narrowing(b, ins, value, source, target)
    elif order.index(result) < order.index(ty):
        value = b.op(f"fptrunc {ty} {value} to {result}")
    elif result != ty:
        value = b.op(f"fpext {ty} {value} to {result}")
    value = flushed(b, ins, result, saturated(b, ins, result, rectified(b, ins, result, value)))
    return to_bf16(b, value) if target == "bf16" else value


def directed_narrowing(b: Builder, ins: Instruction, value: str, source: str, target: str) -> str:
    """Convert a double to float32 with a directed rounding; or round a float32 to a bfloat16 value, with .rz only."""
    if (source, target) == ("f64", "f32"):
        return directed(b, rounding(ins), value, "0.0")
    if (source, target) == ("f32", "bf16") and rounding(ins) == "rz":
        bits = b.op(f"and i32 {b.op(f'bitcast float {value} to i32')}, -65536")
        nan = b.op(f"fcmp uno float {value}, {value}")
        return b.op(f"select i1 {nan}, float {value}, float {b.op(f'bitcast i32 {bits} to float')}")
    raise ins.error(f"the rounding .{rounding(ins)} is not supported from .{source} to .{target}")


def pack(b: Builder, ins: Instruction, target: str, source: str) -> None:
    """Convert two floats to a pair of 16-bit floats; the first operand becomes the upper one."""
    if source != "f32" or rounding(ins) != "rn":
        raise ins.error(f"the conversion to .{target} is supported from .f32 with .rn only")
    parts = []
    for operand in (ins.operands[2], ins.operands[1]):
        value = rectified(b, ins, "float", b.value(operand, "f32"))
        if target == "bf16x2":
            parts.append(to_bf16(b, value))
        else:
            parts.append(b.op(f"bitcast half {b.op(f'fptrunc float {value} to half')} to i16"))
    b.set(ins.operands[0], joined(b, *parts), target)


# ---- 8-bit floats ----

EIGHT_BITS = {"e4m3x2": (3, 7, 448), "e5m2x2": (2, 15, 57344)}
"""For each type of a pair of 8-bit floats: mantissa bits, bias of the exponent, and largest number."""


def to_eight_bits(b: Builder, value: str, mantissa: int, bias: int, largest: int) -> str:
    """Return a float32 rounded to an 8-bit float, saturated to the largest number, as i8."""
    size = b.call("float", "llvm.fabs.f32", f"float {value}")
    limited = b.op(f"select i1 {b.op(f'fcmp olt float {size}, {largest}.0')}, float {size}, float {largest}.0")
    bits = b.op(f"bitcast float {limited} to i32")
    dropped = 23 - mantissa
    odd = b.op(f"and i32 {b.op(f'lshr i32 {bits}, {dropped}')}, 1")
    up = b.op(f"add i32 {bits}, {b.op(f'add i32 {odd}, {(1 << dropped - 1) - 1}')}")
    normal = b.op(f"sub i32 {b.op(f'lshr i32 {up}, {dropped}')}, {127 - bias << mantissa}")
    # adding this float rounds to the spacing of the 8-bit type's subnormal numbers
    unit = 127 + 23 + 1 - bias - mantissa << 23
    total = b.op(f"fadd float {limited}, {b.op(f'bitcast i32 {unit} to float')}")
    subnormal = b.op(f"sub i32 {b.op(f'bitcast float {total} to i32')}, {unit}")
    tiny = b.op(f"icmp ult i32 {bits}, {128 - bias << 23}")
    code = b.op(f"select i1 {tiny}, i32 {subnormal}, i32 {normal}")
    code = b.op(f"select i1 {b.op(f'fcmp uno float {value}, {value}')}, i32 127, i32 {code}")
    signed = b.op(f"bitcast float {value} to i32")
    sign = b.op(f"and i32 {b.op(f'lshr i32 {signed}, 24')}, 128")
    number = b.op(f"fcmp ord float {value}, {value}")
    sign = b.op(f"select i1 {number}, i32 {sign}, i32 0")
    return b.op(f"trunc i32 {b.op(f'or i32 {code}, {sign}')} to i8")


def narrow(b: Builder, ins: Instruction, target: str, source: str) -> None:
    """Convert two floats to a pair of 8-bit floats, the first one to the upper byte; or convert a pair of halves."""
    if rounding(ins) != "rn" or not ins.has("satfinite"):
        raise ins.error(f"the conversion to .{target} is supported with .rn.satfinite only")
    if source == "f32":
        values = [b.value(operand, "f32") for operand in (ins.operands[2], ins.operands[1])]
    elif source == "f16x2":
        halves = split(b, b.value(ins.operands[1], source))
        values = [b.op(f"fpext half {b.op(f'bitcast i16 {half} to half')} to float") for half in halves]
    else:
        raise ins.error(f"the conversion from .{source} to .{target} is not supported")
    low, high = (to_eight_bits(b, rectified(b, ins, "float", value), *EIGHT_BITS[target]) for value in values)
    upper = b.op(f"shl i16 {b.op(f'zext i8 {high} to i16')}, 8")
    b.set(ins.operands[0], b.op(f"or i16 {upper}, {b.op(f'zext i8 {low} to i16')}"), "b16")


def widen(b: Builder, ins: Instruction, source: str) -> None:
    """Convert a pair of 8-bit floats to a pair of halves, which is exact."""
    pair = b.value(ins.operands[1], "b16")
    halves = []
    for byte in (b.op(f"and i16 {pair}, 255"), b.op(f"lshr i16 {pair}, 8")):
        sign = b.op(f"shl i16 {b.op(f'and i16 {byte}, 128')}, 8")
        size = b.op(f"and i16 {byte}, 127")
        if source == "e5m2x2":
            bits = b.op(f"shl i16 {size}, 8")
        else:  # e4m3: scale by 2**8, the difference of the exponents' biases
            small = b.op(f"bitcast i16 {b.op(f'shl i16 {size}, 7')} to half")
            bits = b.op(f"bitcast half {b.op(f'fmul half {small}, 256.0')} to i16")
            bits = b.op(f"select i1 {b.op(f'icmp eq i16 {size}, 127')}, i16 32767, i16 {bits}")
        value = b.op(f"bitcast i16 {b.op(f'or i16 {bits}, {sign}')} to half")
        halves.append(b.op(f"bitcast half {rectified(b, ins, 'half', value)} to i16"))
    b.set(ins.operands[0], joined(b, *halves), "b32")


def to_tf32(b: Builder, ins: Instruction, value: str) -> str:
    """Round a float32 to TF32, 10 bits of mantissa: to nearest with ties away from 0 (.rna) or to even (.rn), or toward
    0 (.rz).
    """
    if rounding(ins) == "rna":
        return b.call("i32", "ptx.cvt.rna.tf32.f32", f"float {value}")
    if rounding(ins) not in ("rn", "rz"):
        raise ins.error("expected the rounding .rna, .rn or .rz")
    bits = b.op(f"bitcast float {value} to i32")
    if rounding(ins) == "rn":
        odd = b.op(f"and i32 {b.op(f'lshr i32 {bits}, 13')}, 1")
        finite = b.op(f"icmp ult i32 {b.op(f'and i32 {bits}, 2147483647')}, 2139095040")
        up = b.op(f"select i1 {finite}, i32 {b.op(f'add i32 {odd}, 4095')}, i32 0")
        bits = b.op(f"add i32 {bits}, {up}")
    return b.op(f"and i32 {bits}, -8192")
