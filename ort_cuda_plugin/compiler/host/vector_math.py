"""float32 functions for the emulated device without branches or calls, so that LLVM can vectorize loops that use them.

These are the functions in which kernels of neural networks spend their time; all others call the C library (`math`).
Errors are at most 2 units in the last place; infinities, NaN and subnormal numbers are handled. Minimax coefficients
are from Cephes (S. L. Moshier; exp, log, tanh) and N. Juffa's erf.
"""

from __future__ import annotations

import struct


def constant(value: float) -> str:
    """Return a float32 constant in LLVM's syntax: the hexadecimal bits of the double that has the same value."""
    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"


class Body:
    """Builds the instructions of one function of float ``%x``. Each method emits an instruction, and returns its
    result's name.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def emit(self, text: str) -> str:
        name = f"%v{len(self.lines)}"
        self.lines.append(f"  {name} = {text}")
        return name

    def operand(self, value: str | float) -> str:
        return value if isinstance(value, str) else constant(value)

    def binary(self, operation: str, a: str | float, b: str | float) -> str:
        return self.emit(f"{operation} float {self.operand(a)}, {self.operand(b)}")

    def fma(self, a: str | float, b: str | float, c: str | float) -> str:
        arguments = ", ".join(f"float {self.operand(value)}" for value in (a, b, c))
        return self.emit(f"call float @llvm.fmuladd.f32({arguments})")

    def polynomial(self, x: str, *coefficients: float) -> str:
        """Evaluate a polynomial by Horner's scheme, highest power first."""
        result = constant(coefficients[0])
        for coefficient in coefficients[1:]:
            result = self.fma(result, x, coefficient)
        return result

    def select(self, condition: str, a: str | float, b: str | float) -> str:
        return self.emit(f"select i1 {condition}, float {self.operand(a)}, float {self.operand(b)}")

    def compare(self, predicate: str, a: str | float, b: str | float) -> str:
        return self.emit(f"fcmp {predicate} float {self.operand(a)}, {self.operand(b)}")

    def call(self, name: str, *arguments: str) -> str:
        return self.emit(f"call float @{name}({', '.join('float ' + argument for argument in arguments)})")

    def integer(self, text: str) -> str:
        return self.emit(text)

    def bits(self, x: str) -> str:
        return self.emit(f"bitcast float {x} to i32")

    def from_bits(self, i: str) -> str:
        return self.emit(f"bitcast i32 {i} to float")

    def power_of_two(self, exponent: str) -> str:
        biased = self.emit(f"add i32 {exponent}, 127")
        return self.from_bits(self.emit(f"shl i32 {biased}, 23"))

    def function(self, name: str, result: str) -> str:
        lines = "\n".join(self.lines)
        return f"define internal float @{name}(float %x) alwaysinline nounwind {{\n{lines}\n  ret float {result}\n}}\n"


round_bias = 12582912.0  # 1.5 * 2**23: adding it leaves the rounded integer in the low bits
ln2_high, ln2_low = 0.693359375, -2.12194440e-4


def exponential(b: Body, x: str) -> str:
    """Emit exp(x) = 2**n * exp(r), where n is the integer nearest to x / ln 2.

    2**n is applied in two factors, since it may be subnormal.
    """
    x = b.select(b.compare("ogt", x, 89.0), 89.0, x)
    x = b.select(b.compare("olt", x, -104.0), -104.0, x)
    biased = b.fma(x, 1.44269504088896341, round_bias)
    n = b.binary("fsub", biased, round_bias)
    r = b.fma(n, -ln2_low, b.fma(n, -ln2_high, x))
    p = b.polynomial(r, 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
    p = b.binary("fadd", b.fma(b.binary("fmul", r, r), p, r), 1.0)
    exponent = b.integer(f"sub i32 {b.bits(biased)}, {struct.unpack('<i', struct.pack('<f', round_bias))[0]}")
    half = b.integer(f"ashr i32 {exponent}, 1")
    rest = b.integer(f"sub i32 {exponent}, {half}")
    return b.binary("fmul", b.binary("fmul", p, b.power_of_two(half)), b.power_of_two(rest))


def exp(name: str = "__nv_expf") -> str:
    b = Body()
    return b.function(name, exponential(b, "%x"))


def log() -> str:
    """Return the IR of log(x) = n ln 2 + log(m), m in [sqrt(1/2), sqrt(2))."""
    b = Body()
    tiny = b.compare("olt", "%x", 2.0**-126)
    scaled = b.select(tiny, b.binary("fmul", "%x", 2.0**23), "%x")
    bits = b.bits(scaled)
    above = b.integer(f"sub i32 {bits}, {0x3F3504F3}")
    exponent = b.integer(f"ashr i32 {above}, 23")
    f = b.binary("fsub", b.from_bits(b.integer(f"sub i32 {bits}, {b.integer(f'shl i32 {exponent}, 23')}")), 1.0)
    n = b.binary("fsub", b.emit(f"sitofp i32 {exponent} to float"), b.select(tiny, 23.0, 0.0))
    # fmt: off
    p = b.polynomial(
        f, 7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
        2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    )
    # fmt: on
    square = b.binary("fmul", f, f)
    y = b.fma(n, ln2_low, b.binary("fmul", b.binary("fmul", p, f), square))
    y = b.binary("fadd", f, b.fma(square, -0.5, y))
    y = b.fma(n, ln2_high, y)
    y = b.select(b.compare("oeq", "%x", float("inf")), float("inf"), y)
    y = b.select(b.compare("oeq", "%x", 0.0), float("-inf"), y)
    y = b.select(b.compare("ult", "%x", 0.0), float("nan"), y)
    return b.function("__nv_logf", y)


def tanh() -> str:
    """Return the IR of tanh: an odd polynomial near 0, 1 - 2 / (exp(2 |x|) + 1) elsewhere."""
    b = Body()
    absolute = b.call("llvm.fabs.f32", "%x")
    square = b.binary("fmul", "%x", "%x")
    p = b.polynomial(
        square, -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1
    )
    near = b.fma(b.binary("fmul", square, p), "%x", "%x")
    power = exponential(b, b.binary("fmul", absolute, 2.0))
    far = b.binary("fsub", 1.0, b.binary("fdiv", 2.0, b.binary("fadd", power, 1.0)))
    far = b.call("llvm.copysign.f32", far, "%x")
    return b.function("__nv_tanhf", b.select(b.compare("olt", absolute, 0.625), near, far))


def erf() -> str:
    """Return the IR of erf: an odd polynomial near 0, 1 - exp of a polynomial in |x| elsewhere."""
    b = Body()
    t = b.call("llvm.fabs.f32", "%x")
    s = b.binary("fmul", "%x", "%x")
    upper = b.fma(-1.72853470e-5, t, 3.83197126e-4)
    r = b.fma(upper, s, b.fma(-3.88396438e-3, t, 2.42546219e-2))
    for coefficient in (-1.06777877e-1, -6.34846687e-1, -1.28717512e-1):
        r = b.fma(r, t, coefficient)
    r = b.fma(r, t, b.emit(f"fneg float {t}"))
    far = b.call("llvm.copysign.f32", b.binary("fsub", 1.0, exponential(b, r)), "%x")
    p = b.polynomial(s, -5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1)
    near = b.fma(p, "%x", "%x")
    large = b.compare("ogt", t, 4.0)
    far = b.select(large, b.call("llvm.copysign.f32", constant(1.0), "%x"), far)
    return b.function("__nv_erff", b.select(b.compare("ogt", t, 0.927734375), far, near))


definitions = {"__nv_expf": exp(), "__nv_logf": log(), "__nv_tanhf": tanh(), "__nv_erff": erf()}
