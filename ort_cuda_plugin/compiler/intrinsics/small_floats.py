"""Conversions between float32 and floats of 8 or fewer bits (storage types), as LLVM IR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

i8, i32, i64, f32, f64 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()


@dataclass(frozen=True)
class SmallFloat:
    """Format of a float with ``bits`` bits: a sign, an exponent with ``bias``, and ``mantissa`` bits.

    ``largest`` is the code of the largest number, ``overflow`` the code for numbers that are too large, ``nan`` the
    code for NaN. With ``infinity``, the code ``overflow`` is infinity. With ``nans``, the codes above the numbers are
    NaN. In ``unsigned_zero`` types the code that would be -0 is the only NaN.
    """

    mantissa: int
    bias: int
    largest: int
    overflow: int
    nan: int
    bits: int = 8
    infinity: bool = False
    nans: bool = True
    unsigned_zero: bool = False

    @property
    def shift(self) -> int:
        """Return the distance from the lowest mantissa bit of float32 to that of this type, in bits."""
        return 23 - self.mantissa

    @property
    def rebias(self) -> int:
        return (127 - self.bias) << 23

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    def decode(self, builder: ir.IRBuilder, args: Any) -> ir.Value:
        code = builder.zext(args[0], i32)
        magnitude = builder.and_(code, i32(self.sign - 1))
        normal = builder.add(builder.shl(magnitude, i32(self.shift)), i32(self.rebias))
        unit = f32(2.0 ** (1 - self.bias - self.mantissa))
        subnormal = builder.bitcast(builder.fmul(builder.uitofp(magnitude, f32), unit), i32)
        small = builder.icmp_unsigned("<", magnitude, i32(1 << self.mantissa))
        bits = builder.select(small, subnormal, normal)
        nan = i32(0x7FC00000)
        if self.unsigned_zero:
            bits = builder.select(builder.icmp_unsigned("==", code, i32(self.nan)), nan, bits)
        elif self.nans:
            if self.infinity:
                infinite = builder.icmp_unsigned("==", magnitude, i32(self.overflow))
                bits = builder.select(infinite, i32(0x7F800000), bits)
            last_number = self.overflow if self.infinity else self.largest
            bits = builder.select(builder.icmp_unsigned(">", magnitude, i32(last_number)), nan, bits)
        sign = builder.shl(builder.and_(code, i32(self.sign)), i32(32 - self.bits))
        return builder.bitcast(builder.or_(bits, sign), f32)

    def encode(self, builder: ir.IRBuilder, args: Any, saturate: bool) -> ir.Value:
        """Emit the conversion from float32, which rounds half to even.

        Numbers that are too large become ``largest`` with ``saturate``, else ``overflow``.
        """
        bits = builder.bitcast(args[0], i32)
        magnitude = builder.and_(bits, i32(0x7FFFFFFF))
        scaled = builder.sub(magnitude, i32(self.rebias))
        odd = builder.and_(builder.lshr(scaled, i32(self.shift)), i32(1))
        rounded = builder.add(builder.add(scaled, i32((1 << (self.shift - 1)) - 1)), odd)
        normal = builder.lshr(rounded, i32(self.shift))
        # Adding 2**23 rounds to an integer, which is then in the low bits of the float.
        factor, magic = f32(2.0 ** (self.bias - 1 + self.mantissa)), f32(2.0**23)
        total = builder.fadd(builder.fmul(builder.bitcast(magnitude, f32), factor), magic)
        subnormal = builder.and_(builder.bitcast(total, i32), i32(0xFF))
        small = builder.icmp_unsigned("<", magnitude, i32((128 - self.bias) << 23))
        code = builder.select(small, subnormal, normal)
        sign = builder.and_(builder.lshr(bits, i32(32 - self.bits)), i32(self.sign))
        too_large = builder.icmp_unsigned(">", code, i32(self.largest))
        code = builder.select(too_large, i32(self.largest if saturate else self.overflow), code)
        code = builder.select(_is_nan(builder, magnitude), i32(self.nan), code)
        if self.unsigned_zero:
            sign = builder.select(builder.icmp_unsigned("==", code, i32(0)), i32(0), sign)
        return builder.trunc(builder.or_(code, sign), i8)


SMALL_FLOATS = {
    "f8e4m3fn": SmallFloat(3, 7, 0x7E, 0x7F, 0x7F),
    "f8e4m3fnuz": SmallFloat(3, 8, 0x7F, 0x80, 0x80, unsigned_zero=True),
    "f8e5m2": SmallFloat(2, 15, 0x7B, 0x7C, 0x7E, infinity=True),
    "f8e5m2fnuz": SmallFloat(2, 16, 0x7F, 0x80, 0x80, unsigned_zero=True),
    "f4e2m1": SmallFloat(1, 1, 0x7, 0x7, 0x0, bits=4, nans=False),
}


def _is_nan(builder: ir.IRBuilder, magnitude: ir.Value) -> ir.Value:
    return builder.icmp_unsigned(">", magnitude, i32(0x7F800000))


def decode_e8m0(builder: ir.IRBuilder, args: Any) -> ir.Value:
    """Emit 2**(code - 127); NaN for the code 255."""
    code = builder.zext(args[0], i32)
    bits = builder.select(builder.icmp_unsigned("==", code, i32(0)), i32(0x00400000), builder.shl(code, i32(23)))
    return builder.bitcast(builder.select(builder.icmp_unsigned("==", code, i32(255)), i32(0x7FC00000), bits), f32)


def encode_e8m0(builder: ir.IRBuilder, args: Any, mode: str, saturate: bool) -> ir.Value:
    """Emit the code of the magnitude, rounded to a power of two.

    ``mode`` is "up", "down" or "nearest" (ties round up). Numbers out of range get the nearest code with ``saturate``,
    else the code of NaN.
    """
    magnitude = builder.and_(builder.bitcast(args[0], i32), i32(0x7FFFFFFF))
    exponent, fraction = builder.lshr(magnitude, i32(23)), builder.and_(magnitude, i32(0x7FFFFF))
    # The code 0 is 2**-127, a subnormal number of float32. The exponent field of subnormals does not say which power of
    # two is nearest, so they need other thresholds.
    subnormal = builder.icmp_unsigned("==", exponent, i32(0))
    least = {"up": (0x400001, 1), "nearest": (0x600000, 0x400000)}
    code = exponent
    if mode in least:
        below, above = least[mode]
        threshold = builder.select(subnormal, i32(below), i32(above))
        code = builder.add(code, builder.zext(builder.icmp_unsigned(">=", fraction, threshold), i32))
    code = builder.select(builder.icmp_unsigned(">", code, i32(254)), i32(254 if saturate else 255), code)
    if not saturate:
        code = builder.select(builder.icmp_unsigned("<", magnitude, i32(0x400000)), i32(255), code)
    return builder.trunc(builder.select(_is_nan(builder, magnitude), i32(255), code), i8)


def float64_to_float32_odd(builder: ir.IRBuilder, args: Any) -> ir.Value:
    """Emit rounding to odd: inexact results get an odd mantissa, so that a second rounding to fewer bits is correct."""
    x = args[0]
    nearest = builder.fptrunc(x, f32)
    bits = builder.bitcast(nearest, i32)
    below = i64(0x7FFFFFFFFFFFFFFF)
    size = builder.and_(builder.bitcast(x, i64), below)
    rounded = builder.and_(builder.bitcast(builder.fpext(nearest, f64), i64), below)
    truncated = builder.sub(bits, builder.zext(builder.icmp_unsigned(">", rounded, size), i32))
    exact = builder.or_(builder.icmp_unsigned("==", rounded, size), builder.fcmp_unordered("uno", x, x))
    return builder.bitcast(builder.select(exact, bits, builder.or_(truncated, i32(1))), f32)
