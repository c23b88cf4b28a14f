"""Test cases of PTX instructions: each with a reference in Python that was written from the PTX ISA document alone."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

Reference = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """An instruction, or several, that compute register %d from %a, %b and %c.

    ``text`` are the instructions. ``bits`` is the width of the operand registers, ``result`` that of %d. ``reference``
    maps the operands' bits, as unsigned integers, to the bits of %d.
    """

    text: str
    bits: int
    reference: Reference
    result: int = 0


# ---- numbers ----


def signed(bits: int, width: int) -> int:
    return bits - (1 << width) if bits >> (width - 1) else bits


def masked(value: int, width: int) -> int:
    return value & ((1 << width) - 1)


def f32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def f64(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


def bits32(value: float | np.floating[Any]) -> int:
    with np.errstate(over="ignore"):
        return int(np.float32(value).view(np.uint32))


def bits64(value: float) -> int:
    return int(np.float64(value).view(np.uint64))


def rounded(value: Fraction, mode: str) -> float:
    """Round a rational number to float32 in the mode rn, rz, rm or rp."""
    near = np.float32(float(value))
    while Fraction(float(near)) > value and mode in ("rm",):
        near = np.nextafter(near, np.float32(-np.inf))
    while Fraction(float(near)) < value and mode in ("rp",):
        near = np.nextafter(near, np.float32(np.inf))
    if mode == "rz":
        return rounded(value, "rm" if value > 0 else "rp")
    if mode == "rn":  # float() rounds to double first, so the nearest float32 may be a neighbor
        around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
        distances = [abs(Fraction(float(each)) - value) for each in around]
        best = [each for each, distance in zip(around, distances, strict=True) if distance == min(distances)]
        return float(min(best, key=lambda each: int(np.float32(each).view(np.uint32)) & 1))
    return float(near)


def truncated(x: int, y: int) -> int:
    return int(Fraction(x, y).__trunc__())


def permuted(a: int, b: int, c: int) -> int:
    both = a | b << 32
    out = 0
    for index in range(4):
        nibble = c >> 4 * index & 15
        byte = both >> 8 * (nibble & 7) & 255
        out |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * index
    return out


def extracted(width: int, is_signed: bool) -> Reference:
    def reference(a: int, b: int, c: int) -> int:
        start, length = b & 255, c & 255
        last = min(start + length - 1, width - 1)
        sign = (a >> last & 1) if is_signed and length else 0
        out = 0
        for index in range(width):
            source = a >> (start + index) & 1 if start + index < width else sign
            out |= (source if index < length else sign) << index
        return out if length else 0

    return reference


def inserted(a: int, b: int, c: int) -> int:
    """Return the result of ``bfi.b32 d, a, b, 5, c``."""
    out = b
    for index in range(c & 255):
        if 5 + index < 32:
            out = out & ~(1 << 5 + index) | (a >> index & 1 if index < 32 else 0) << 5 + index
    return out


def table_of_three(table: int) -> Reference:
    def reference(a: int, b: int, c: int) -> int:
        return sum((table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32))

    return reference


def dot4(a: int, b: int, c: int) -> int:
    return masked(c + sum(signed(a >> 8 * i & 255, 8) * (b >> 8 * i & 255) for i in range(4)), 32)


def to_int(width: int, is_signed: bool, mode: Callable[[float], float]) -> Reference:
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if is_signed else (0, (1 << width) - 1)

    def reference(a: int, *_: int) -> int:
        value = f32(a)
        if math.isnan(value):
            return 0
        if math.isinf(value):
            return masked(high if value > 0 else low, width)
        return masked(min(max(int(mode(value)), low), high), width)

    return reference


def smaller(x: float, y: float) -> float:
    if math.isnan(x):
        return y
    if math.isnan(y):
        return x
    return min((x, math.copysign(1, x)), (y, math.copysign(1, y)))[0]


def fused(mode: str) -> Reference:
    def reference(a: int, b: int, c: int) -> int:
        x, y, z = f32(a), f32(b), f32(c)
        if not all(map(math.isfinite, (x, y, z))):
            return bits32(x * y + z)
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        if exact == 0:
            return bits32(x * y + z)
        return bits32(rounded(exact, mode))

    return reference


def mixed(operation: str, ty: str, mode: str = "rn") -> Reference:
    """Return the reference of a mixed-precision add, sub or fma: 16-bit operands, the last one float32."""

    def value(bits: int) -> float:
        return f32((bits & 65535) << 16) if ty == "bf16" else float(np.uint16(bits & 65535).view(np.float16))

    def reference(a: int, b: int, c: int) -> int:
        one = bits32(1.0)
        if operation == "fma":
            return int(fused(mode)(bits32(value(a)), bits32(value(b)), c))
        return int(fused(mode)(bits32(value(a)), one, c ^ (1 << 31) if operation == "sub" else c))

    return reference


def saturated_sum(a: int, b: int, c: int) -> int:
    return masked(min(max(signed(a, 32) + signed(b, 32), -(1 << 31)), (1 << 31) - 1), 32)


def product_with_carry(a: int, b: int, c: int) -> int:
    """Return the result of ``mad.lo.cc``, then ``madc.hi`` with the addend 7."""
    return masked((a * b >> 32) + 7 + (masked(a * b, 32) + c >> 32), 32)


def signed_24(a: int, b: int, c: int) -> int:
    return masked(signed(masked(a, 24), 24) * signed(masked(b, 24), 24) + c, 32)


def quotient(a: int, b: int, c: int) -> int:
    return masked(truncated(signed(a, 32), signed(b, 32)), 32) if b else masked(-1, 32)


def remainder(a: int, b: int, c: int) -> int:
    x, y = signed(a, 32), signed(b, 32)
    return masked(x - y * truncated(x, y), 32) if b else a


def to_int8(a: int, b: int, c: int) -> int:
    return masked(min(max(signed(a, 32), -128), 127), 32)


def smaller_or_nan(a: int, b: int, c: int) -> int:
    x, y = f32(a), f32(b)
    return bits32(math.nan if math.isnan(x) or math.isnan(y) else smaller(x, y))


def sum_in_unit_interval(a: int, b: int, c: int) -> int:
    total = float(np.float32(f32(a)) + np.float32(f32(b)))
    return bits32(0.0 if math.isnan(total) else min(max(total, 0.0), 1.0))


def product_without_subnormals(a: int, b: int, c: int) -> int:
    return bits32(flush(float(np.float32(flush(f32(a))) * np.float32(flush(f32(b))))))


def half_to_float(a: int, b: int, c: int) -> int:
    return bits32(np.float32(np.uint16(a & 65535).view(np.float16)))


def two_floats(operation: Callable[[float, float, float], float]) -> Reference:
    """Return a reference that computes with the lower and with the upper floats of its operands."""

    def reference(a: int, b: int, c: int) -> int:
        low, high = (bits32(operation(*(f32(masked(each >> start, 32)) for each in (a, b, c)))) for start in (0, 32))
        return high << 32 | low

    return reference


def fused_floats(x: float, y: float, z: float) -> float:
    total = Fraction(x) * Fraction(y) + Fraction(z)
    if total == 0:
        raise ValueError("a fraction has no sign of zero")
    return rounded(total, "rn")


def two_halves(a: int, b: int, c: int) -> int:
    return int(half(f32(a)).view(np.uint16)) << 16 | int(half(f32(b)).view(np.uint16))


def tf32(a: int, b: int, c: int) -> int:
    return (masked(a + 4096, 32) if a & 0x7FFFFFFF < 0x7F800000 else a) & ~8191


def fused_halves(a: int, b: int, c: int) -> int:
    return pairwise(a, b, lambda x, y: np.float16(np.float64(x) * np.float64(y) + np.float64(x)))


def bfloat16_products(a: int, b: int, c: int) -> int:
    out = 0
    for start in (0, 16):
        x, y = (np.float32(f32((each >> start & 65535) << 16)) for each in (a, b))
        out |= bfloat16(bits32(x * y)) << start
    return out


def bytewise(operation: Callable[[int, int], int], is_signed: bool = False) -> Reference:
    """Return the reference of an operation on the four bytes of two 32-bit words."""

    def reference(a: int, b: int, c: int) -> int:
        out = 0
        for start in range(0, 32, 8):
            x, y = (each >> start & 255 for each in (a, b))
            if is_signed:
                x, y = signed(x, 8), signed(y, 8)
            out |= masked(operation(x, y), 8) << start
        return out

    return reference


def extended(a: int, b: int, c: int) -> int:
    """Return the result of ``szext.clamp.s32``."""
    return masked(signed(masked(a, b), b), 32) if 0 < b < 32 else a if b else 0


def permuted_as(*selectors: int) -> Reference:
    return lambda a, b, c: permuted(a, b, selectors[c & 3])


def directed(function: Callable[[Fraction, Fraction], Fraction], mode: str) -> Reference:
    """Return the reference of a rational function of two floats, rounded to float32 in a mode."""

    def reference(a: int, b: int, c: int) -> int:
        x, y = f32(a), f32(b)
        if not math.isfinite(x) or not math.isfinite(y) or x == 0 or y == 0:
            raise ValueError("left to the cases with rounding to nearest")
        exact = function(Fraction(x), Fraction(y))
        if not 2**-100 < abs(exact) < 2**100:
            raise OverflowError("left to the cases with rounding to nearest")
        return bits32(rounded(exact, mode))

    return reference


def root_below(a: int, b: int, c: int) -> int:
    """Return the result of ``sqrt.rm``: the largest float32 whose square is at most the operand."""
    x = f32(a)
    if not 2**-100 < x < 2**100:
        raise ValueError("left to the cases with rounding to nearest")
    near = np.float32(math.sqrt(x))
    while Fraction(float(near)) ** 2 > Fraction(x):
        near = np.nextafter(near, np.float32(0))
    return bits32(near)


def differing_halves(a: int, b: int, c: int) -> int:
    """Return bits for the two halves that ``setp.ne`` finds unequal. It is ordered: with NaN it is false."""
    pairs = [[np.uint16(each >> s & 65535).view(np.float16) for each in (a, b)] for s in (0, 16)]
    return sum(1 << index for index, (x, y) in enumerate(pairs) if x == x and y == y and x != y)


# ---- the cases ----

INTEGER = [
    Case("add.u32 %d, %a, %b;", 32, lambda a, b, c: masked(a + b, 32)),
    Case("sub.s32 %d, %a, %b;", 32, lambda a, b, c: masked(a - b, 32)),
    Case("add.sat.s32 %d, %a, %b;", 32, saturated_sum),
    Case("add.cc.u32 %t, %a, %b; addc.u32 %d, %c, 0;", 32, lambda a, b, c: masked(c + (a + b >> 32), 32)),
    Case("sub.cc.u32 %t, %a, %b; subc.u32 %d, %c, 0;", 32, lambda a, b, c: masked(c - (a < b), 32)),
    Case("mul.lo.s32 %d, %a, %b;", 32, lambda a, b, c: masked(a * b, 32)),
    Case("mul.hi.s32 %d, %a, %b;", 32, lambda a, b, c: masked(signed(a, 32) * signed(b, 32) >> 32, 32)),
    Case("mul.hi.u32 %d, %a, %b;", 32, lambda a, b, c: a * b >> 32),
    Case("mul.wide.s32 %d, %a, %b;", 32, lambda a, b, c: masked(signed(a, 32) * signed(b, 32), 64), 64),
    Case("mul.wide.u32 %d, %a, %b;", 32, lambda a, b, c: a * b, 64),
    Case("mad.lo.u32 %d, %a, %b, %c;", 32, lambda a, b, c: masked(a * b + c, 32)),
    Case("mad.hi.u32 %d, %a, %b, %c;", 32, lambda a, b, c: masked((a * b >> 32) + c, 32)),
    Case("mad.lo.cc.u32 %t, %a, %b, %c; madc.hi.u32 %d, %a, %b, 7;", 32, product_with_carry),
    Case("mul24.lo.u32 %d, %a, %b;", 32, lambda a, b, c: masked(masked(a, 24) * masked(b, 24), 32)),
    Case("mad24.lo.s32 %d, %a, %b, %c;", 32, signed_24),
    Case("div.s32 %d, %a, %b;", 32, quotient),
    Case("rem.s32 %d, %a, %b;", 32, remainder),
    Case("div.u32 %d, %a, %b;", 32, lambda a, b, c: a // b if b else masked(-1, 32)),
    Case("abs.s32 %d, %a;", 32, lambda a, b, c: masked(abs(signed(a, 32)), 32)),
    Case("neg.s32 %d, %a;", 32, lambda a, b, c: masked(-a, 32)),
    Case("min.s32 %d, %a, %b;", 32, lambda a, b, c: masked(min(signed(a, 32), signed(b, 32)), 32)),
    Case("max.u32 %d, %a, %b;", 32, lambda a, b, c: max(a, b)),
    Case("sad.s32 %d, %a, %b, %c;", 32, lambda a, b, c: masked(abs(signed(a, 32) - signed(b, 32)) + c, 32)),
    Case("popc.b32 %d, %a;", 32, lambda a, b, c: a.bit_count()),
    Case("clz.b32 %d, %a;", 32, lambda a, b, c: 32 - a.bit_length()),
    Case("bfind.u32 %d, %a;", 32, lambda a, b, c: masked(a.bit_length() - 1, 32)),
    Case("bfind.s32 %d, %a;", 32, lambda a, b, c: masked((~signed(a, 32) if a >> 31 else a).bit_length() - 1, 32)),
    Case("bfind.shiftamt.u32 %d, %a;", 32, lambda a, b, c: 32 - a.bit_length() if a else masked(-1, 32)),
    Case("brev.b32 %d, %a;", 32, lambda a, b, c: int(f"{a:032b}"[::-1], 2)),
    Case("bfe.u32 %d, %a, %b, %c;", 32, extracted(32, False)),
    Case("bfe.s32 %d, %a, %b, %c;", 32, extracted(32, True)),
    Case("bfi.b32 %d, %a, %b, 5, %c;", 32, inserted),
    Case("dp4a.s32.u32 %d, %a, %b, %c;", 32, dot4),
    Case("and.b32 %d, %a, %b;", 32, lambda a, b, c: a & b),
    Case("xor.b32 %d, %a, %b;", 32, lambda a, b, c: a ^ b),
    Case("not.b32 %d, %a;", 32, lambda a, b, c: masked(~a, 32)),
    Case("cnot.b32 %d, %a;", 32, lambda a, b, c: int(a == 0)),
    Case("lop3.b32 %d, %a, %b, %c, 0xE8;", 32, table_of_three(0xE8)),
    Case("lop3.b32 %d, %a, %b, %c, 0x96;", 32, table_of_three(0x96)),
    Case("shl.b32 %d, %a, %b;", 32, lambda a, b, c: masked(a << b, 32) if b < 32 else 0),
    Case("shr.u32 %d, %a, %b;", 32, lambda a, b, c: a >> b if b < 32 else 0),
    Case("shr.s32 %d, %a, %b;", 32, lambda a, b, c: masked(signed(a, 32) >> min(b, 31), 32)),
    Case("shf.l.wrap.b32 %d, %a, %b, %c;", 32, lambda a, b, c: masked((b << 32 | a) << (c & 31) >> 32, 32)),
    Case("shf.r.clamp.b32 %d, %a, %b, %c;", 32, lambda a, b, c: masked((b << 32 | a) >> min(c, 32), 32)),
    Case("prmt.b32 %d, %a, %b, %c;", 32, permuted),
    Case(
        "setp.lt.s32 %p, %a, %b; selp.b32 %d, %a, %c, %p;",
        32,
        lambda a, b, c: a if signed(a, 32) < signed(b, 32) else c,
    ),
    Case("setp.hs.u32 %p, %a, %b; selp.b32 %d, 1, 0, %p;", 32, lambda a, b, c: int(a >= b)),
    Case(
        "setp.eq.u32 %q, %a, 0; setp.ne.or.u32 %p, %b, 0, %q; selp.b32 %d, 1, 0, %p;",
        32,
        lambda a, b, c: int(b != 0 or a == 0),
    ),
    Case(
        "setp.gt.u32 %p|%q, %a, %b; selp.b32 %t, 2, 0, %p; selp.b32 %d, 1, %t, %q;",
        32,
        lambda a, b, c: 2 if a > b else 1,
    ),
    Case("set.le.u32.s32 %d, %a, %b;", 32, lambda a, b, c: masked(-(signed(a, 32) <= signed(b, 32)), 32)),
    Case("slct.b32.s32 %d, %a, %b, %c;", 32, lambda a, b, c: a if signed(c, 32) >= 0 else b),
    Case("mov.b32 {%h1, %h2}, %a; mov.b32 %d, {%h2, %h1};", 32, lambda a, b, c: masked(a << 16 | a >> 16, 32)),
    Case("cvt.s32.s8 %d, %a;", 32, lambda a, b, c: masked(signed(a & 255, 8), 32)),
    Case("cvt.u32.u16 %d, %a;", 32, lambda a, b, c: a & 65535),
    Case("cvt.sat.s8.s32 %t, %a; cvt.s32.s8 %d, %t;", 32, to_int8),
    Case("cvt.s64.s32 %d, %a;", 32, lambda a, b, c: masked(signed(a, 32), 64), 64),
    Case("@!%p0 mov.b32 %d, %a; @%p0 mov.b32 %d, %b;", 32, lambda a, b, c: a),
    Case("prmt.b32.f4e %d, %a, %b, %c;", 32, permuted_as(0x3210, 0x4321, 0x5432, 0x6543)),
    Case("prmt.b32.b4e %d, %a, %b, %c;", 32, permuted_as(0x5670, 0x6701, 0x7012, 0x0123)),
    Case("prmt.b32.rc8 %d, %a, %b, %c;", 32, permuted_as(0x0000, 0x1111, 0x2222, 0x3333)),
    Case("prmt.b32.ecl %d, %a, %b, %c;", 32, permuted_as(0x3210, 0x3211, 0x3222, 0x3333)),
    Case("prmt.b32.ecr %d, %a, %b, %c;", 32, permuted_as(0x0000, 0x1110, 0x2210, 0x3210)),
    Case("prmt.b32.rc16 %d, %a, %b, %c;", 32, permuted_as(0x1010, 0x3232, 0x1010, 0x3232)),
    Case("szext.clamp.s32 %d, %a, %b;", 32, extended),
    Case("bmsk.wrap.b32 %d, %a, %b;", 32, lambda a, b, c: masked(((1 << (b & 31)) - 1) << (a & 31), 32)),
    Case("vabsdiff4.u32.u32.u32 %d, %a, %b, 0;", 32, bytewise(lambda x, y: abs(x - y))),
    Case("vadd4.s32.s32.s32.sat %d, %a, %b, 0;", 32, bytewise(lambda x, y: min(max(x + y, -128), 127), True)),
    Case("vavrg4.u32.u32.u32 %d, %a, %b, 0;", 32, bytewise(lambda x, y: (x + y + 1) // 2)),
    Case("vmin4.s32.s32.s32 %d, %a, %b, 0;", 32, bytewise(min, True)),
    Case(
        "min.s16x2 %d, %a, %b;",
        32,
        lambda a, b, c: sum(
            masked(min(signed(a >> s & 65535, 16), signed(b >> s & 65535, 16)), 16) << s for s in (0, 16)
        ),
    ),
    Case("add.u16x2 %d, %a, %b;", 32, lambda a, b, c: sum(masked((a >> s) + (b >> s), 16) << s for s in (0, 16))),
    Case("add.u64 %d, %a, %b;", 64, lambda a, b, c: masked(a + b, 64)),
    Case("mul.hi.u64 %d, %a, %b;", 64, lambda a, b, c: a * b >> 64),
    Case("mul.lo.s64 %d, %a, %b;", 64, lambda a, b, c: masked(a * b, 64)),
    Case("shr.s64 %d, %a, 7;", 64, lambda a, b, c: masked(signed(a, 64) >> 7, 64)),
    Case("bfe.u64 %d, %a, 9, 40;", 64, lambda a, b, c: a >> 9 & (1 << 40) - 1),
    Case("clz.b64 %r, %a; cvt.u64.u32 %d, %r;", 64, lambda a, b, c: 64 - a.bit_length()),
    Case("cvt.u32.u64 %r, %a; cvt.u64.u32 %d, %r;", 64, lambda a, b, c: masked(a, 32)),
]
FLOAT = [
    Case("add.rn.f32 %d, %a, %b;", 32, lambda a, b, c: bits32(np.float32(f32(a)) + np.float32(f32(b)))),
    Case("sub.rn.f32 %d, %a, %b;", 32, lambda a, b, c: bits32(np.float32(f32(a)) - np.float32(f32(b)))),
    Case("mul.rn.f32 %d, %a, %b;", 32, lambda a, b, c: bits32(np.float32(f32(a)) * np.float32(f32(b)))),
    Case("div.rn.f32 %d, %a, %b;", 32, lambda a, b, c: bits32(np.float32(f32(a)) / np.float32(f32(b)))),
    Case("rcp.rn.f32 %d, %a;", 32, lambda a, b, c: bits32(np.float32(1) / np.float32(f32(a)))),
    Case("sqrt.rn.f32 %d, %a;", 32, lambda a, b, c: bits32(np.sqrt(np.float32(f32(a))))),
    *(Case(f"fma.{mode}.f32 %d, %a, %b, %c;", 32, fused(mode)) for mode in ("rn", "rz", "rm", "rp")),
    Case("div.rp.f32 %d, %a, %b;", 32, directed(lambda x, y: x / y, "rp")),
    Case("rcp.rz.f32 %d, %a;", 32, directed(lambda x, y: 1 / x, "rz")),
    Case("sqrt.rm.f32 %d, %a;", 32, root_below),
    Case(
        "set.lt.f16x2.f16x2 %d, %a, %b;", 32, lambda a, b, c: pairwise(a, b, lambda x, y: np.float16(1 if x < y else 0))
    ),
    Case(
        "setp.ne.f16x2 %p|%q, %a, %b; selp.b32 %t, 1, 0, %p; selp.b32 %r, 2, 0, %q; or.b32 %d, %t, %r;",
        32,
        differing_halves,
    ),
    Case("neg.f32 %d, %a;", 32, lambda a, b, c: a ^ 1 << 31),
    Case("abs.f32 %d, %a;", 32, lambda a, b, c: a & (1 << 31) - 1),
    Case("copysign.f32 %d, %a, %b;", 32, lambda a, b, c: (a & 1 << 31) | (b & (1 << 31) - 1)),
    Case("min.f32 %d, %a, %b;", 32, lambda a, b, c: bits32(smaller(f32(a), f32(b)))),
    Case("max.f32 %d, %a, %b;", 32, lambda a, b, c: bits32(-smaller(-f32(a), -f32(b)))),
    Case("min.NaN.f32 %d, %a, %b;", 32, smaller_or_nan),
    Case("add.sat.f32 %d, %a, %b;", 32, sum_in_unit_interval),
    Case("mul.rn.ftz.f32 %d, %a, %b;", 32, product_without_subnormals),
    Case("setp.lt.f32 %p, %a, %b; selp.b32 %d, 1, 0, %p;", 32, lambda a, b, c: int(f32(a) < f32(b))),
    Case("setp.geu.f32 %p, %a, %b; selp.b32 %d, 1, 0, %p;", 32, lambda a, b, c: int(not f32(a) < f32(b))),
    Case(
        "setp.nan.f32 %p, %a, %b; selp.b32 %d, 1, 0, %p;",
        32,
        lambda a, b, c: int(f32(a) != f32(a) or f32(b) != f32(b)),
    ),
    Case("testp.subnormal.f32 %p, %a; selp.b32 %d, 1, 0, %p;", 32, lambda a, b, c: int(0 < abs(f32(a)) < 2.0**-126)),
    Case("testp.finite.f32 %p, %a; selp.b32 %d, 1, 0, %p;", 32, lambda a, b, c: int(math.isfinite(f32(a)))),
    Case("cvt.rzi.s32.f32 %d, %a;", 32, to_int(32, True, math.trunc)),
    Case("cvt.rni.s32.f32 %d, %a;", 32, to_int(32, True, round)),
    Case("cvt.rmi.u32.f32 %d, %a;", 32, to_int(32, False, math.floor)),
    Case("cvt.rpi.s64.f32 %d, %a;", 32, to_int(64, True, math.ceil), 64),
    Case("cvt.rni.f32.f32 %d, %a;", 32, lambda a, b, c: bits32(np.rint(np.float32(f32(a))))),
    Case("cvt.rn.f32.s32 %d, %a;", 32, lambda a, b, c: bits32(rounded(Fraction(signed(a, 32)), "rn") if a else 0.0)),
    Case("cvt.rp.f32.u32 %d, %a;", 32, lambda a, b, c: bits32(rounded(Fraction(a), "rp") if a else 0.0)),
    Case("cvt.rn.f16.f32 %h1, %a; cvt.u32.u16 %d, %h1;", 32, lambda a, b, c: int(half(f32(a)).view(np.uint16))),
    Case("cvt.u16.u32 %h1, %a; cvt.f32.f16 %d, %h1;", 32, half_to_float),
    Case("cvt.rn.bf16.f32 %h1, %a; cvt.u32.u16 %d, %h1;", 32, lambda a, b, c: bfloat16(a)),
    Case("cvt.rn.f16x2.f32 %d, %a, %b;", 32, two_halves),
    Case("cvt.rna.tf32.f32 %d, %a;", 32, tf32),
    Case("cvt.f64.f32 %d, %a;", 32, lambda a, b, c: bits64(f32(a)), 64),
    Case("cvt.rz.f32.f64 %r, %a; cvt.u64.u32 %d, %r;", 64, lambda a, b, c: bits32(rounded(Fraction(f64(a)), "rz"))),
    Case("add.rn.f64 %d, %a, %b;", 64, lambda a, b, c: bits64(f64(a) + f64(b))),
    Case("div.rn.f64 %d, %a, %b;", 64, lambda a, b, c: bits64(f64(a) / f64(b))),
    Case("add.rn.f32x2 %d, %a, %b;", 64, two_floats(lambda x, y, z: float(np.float32(x) + np.float32(y)))),
    Case("sub.rn.f32x2 %d, %a, %b;", 64, two_floats(lambda x, y, z: float(np.float32(x) - np.float32(y)))),
    Case("mul.f32x2 %d, %a, %b;", 64, two_floats(lambda x, y, z: float(np.float32(x) * np.float32(y)))),
    Case("fma.rn.f32x2 %d, %a, %b, %c;", 64, two_floats(fused_floats)),
    Case("add.f16x2 %d, %a, %b;", 32, lambda a, b, c: pairwise(a, b, lambda x, y: x + y)),
    Case("fma.rn.f16x2 %d, %a, %b, %a;", 32, fused_halves),
    *(
        Case(f"cvt.u16.u32 %h1, %a; cvt.u16.u32 %h2, %b; fma.rn.f32.{ty} %d, %h1, %h2, %c;", 32, mixed("fma", ty))
        for ty in ("f16", "bf16")
    ),
    Case("cvt.u16.u32 %h1, %a; add.f32.f16 %d, %h1, %c;", 32, mixed("add", "f16")),
    Case("cvt.u16.u32 %h1, %a; sub.rz.f32.bf16 %d, %h1, %c;", 32, mixed("sub", "bf16", "rz")),
    Case(
        "mul.bf16x2 %d, %a, %b;",
        32,
        lambda a, b, c: sum(
            bfloat16(bits32(np.float32(f32((a >> s & 65535) << 16)) * np.float32(f32((b >> s & 65535) << 16)))) << s
            for s in (0, 16)
        ),
    ),
]


def flush(value: float) -> float:
    return math.copysign(0.0, value) if abs(value) < 2.0**-126 else value


def half(value: float) -> np.float16:
    with np.errstate(over="ignore"):
        return np.float16(np.float32(value))


def bfloat16(bits: int) -> int:
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF
    return masked(bits + 0x7FFF + (bits >> 16 & 1), 32) >> 16


def pairwise(a: int, b: int, operation: Callable[[Any, Any], Any]) -> int:
    out = 0
    with np.errstate(all="ignore"):
        for start in (0, 16):
            x, y = (np.uint16(each >> start & 65535).view(np.float16) for each in (a, b))
            out |= int(np.float16(operation(x, y)).view(np.uint16)) << start
    return out


def equal(case: Case, got: int, expected: int) -> bool:
    """Return whether two results of a floating-point case are equal; the payload of NaN is not compared."""
    kinds = case.text.split(" ")[0].split(".")
    if "f16x2" in kinds and kinds[0] != "cvt":
        one, other = (np.array([bits & 0xFFFF, bits >> 16], np.uint16).view(np.float16) for bits in (got, expected))
        return np.array_equal(one, other, equal_nan=True)
    if "f32x2" in kinds:
        floats, wanted = (np.array([bits], np.uint64).view(np.float32) for bits in (got, expected))
        signs = (np.signbit(floats) == np.signbit(wanted)) | np.isnan(floats)
        return np.array_equal(floats, wanted, equal_nan=True) and bool(signs.all())
    value = f32 if (case.result or case.bits) == 32 else f64
    return got == expected or (math.isnan(value(got)) and math.isnan(value(expected)))


def module(cases: Sequence[Case]) -> str:
    """Return a PTX module with a kernel ``cases`` that stores each case's result as 64 bits in out[case, thread]."""
    body = []
    for number, case in enumerate(cases):
        width = case.result or case.bits
        registers = (
            f".reg .b{case.bits} %a, %b, %c; .reg .b32 %t, %r; .reg .b{width} %d; .reg .pred %p, %q, %p0; "
            ".reg .b16 %h1, %h2;"
        )
        loads = " ".join(f"ld.global.b{case.bits} %{x}, [%x{i}];" for i, x in enumerate("abc"))
        body.append(
            f"{{ {registers} setp.ne.u32 %p0, 0, 0; {loads} {case.text} st.global.b{width} [%out+{number * 8}], %d; }}"
        )
    return f"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry cases(.param .u64 x, .param .u64 y, .param .u64 z, .param .u64 out) {{
  .reg .b64 %x<3>, %out, %at; .reg .b32 %tid;
  ld.param.u64 %x0, [x]; ld.param.u64 %x1, [y]; ld.param.u64 %x2, [z]; ld.param.u64 %out, [out];
  mov.u32 %tid, %tid.x; mul.wide.u32 %at, %tid, 8;
  add.u64 %x0, %x0, %at; add.u64 %x1, %x1, %at; add.u64 %x2, %x2, %at;
  mul.wide.u32 %at, %tid, {8 * len(cases)}; add.u64 %out, %out, %at;
  {" ".join(body)}
  ret;
}}
"""


def samples(rng: np.random.Generator, count: int, floats: bool) -> npt.NDArray[np.uint64]:
    """Return operands as 64 bits, [3, count]: edge cases of integers or floats, and random numbers."""
    edges = np.array([0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**64 - 1, 1 << 63], np.uint64)
    if floats:
        values = [
            0.0,
            -0.0,
            1.0,
            -1.5,
            0.5,
            2.5,
            3e38,
            -3e38,
            1e-40,
            -1e-45,
            np.inf,
            -np.inf,
            np.nan,
            65519.0,
            1e10,
            2**31,
        ]
        single = np.array(values, np.float32).view(np.uint32).astype(np.uint64)
        double = np.array(values, np.float64).view(np.uint64)
        edges = np.where(rng.random(single.size) < 0.5, single, double & np.uint64(~0xFFFFFFFF & 2**64 - 1) | single)
    words = rng.integers(0, 2**64, (3, count), np.uint64)
    if floats:
        near = rng.normal(0, 10.0 ** rng.integers(-3, 4, (3, count))).astype(np.float32).view(np.uint32)
        words = words & np.uint64(0xFFFFFFFF00000000) | near.astype(np.uint64)
    picks = rng.integers(0, edges.size, words.shape)
    return np.where(rng.random(words.shape) < 0.4, edges[picks], words)
