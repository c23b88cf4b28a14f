"""PTX with calls (through function pointers, printf, exit in a function), and arithmetic with directed rounding."""

from __future__ import annotations

from fractions import Fraction
from math import isqrt, nextafter

import numpy as np
import pytest

from foreign_compilers import FOLDER
from ort_cuda_plugin import emulator

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
REGISTERS = ".reg .b64 %x, %a, %f; .reg .b32 %t, %r; .reg .pred %p;"
START = "ld.param.u64 %x, [x]; mov.u32 %t, %tid.x; mul.wide.u32 %a, %t, 4; add.u64 %x, %x, %a;"
FUNCTION = ".func (.param .b32 result) {}(.param .b32 given)"


def kernel(body: str, before: str = "") -> emulator.PtxModule:
    return emulator.load(f"{HEAD}{before}\n.visible .entry k(.param .u64 x) {{ {REGISTERS} {START}\n{body}\nret; }}")


def defined(name: str, instruction: str) -> str:
    body = f".reg .b32 %r; ld.param.b32 %r, [given]; {instruction} st.param.b32 [result], %r; ret;"
    return f"{FUNCTION.format(name)} {{ {body} }}\n"


def call_through(address: str) -> str:
    return (
        f"{{ .param .b32 in; .param .b32 out; st.param.b32 [in], %t; {address}"
        "shape: .callprototype (.param .b32 _) _ (.param .b32 _);"
        "call (out), %f, (in), shape; ld.param.b32 %r, [out]; } st.global.u32 [%x], %r;"
    )


def test_functions_are_called_by_their_address() -> None:
    functions = defined("more", "add.u32 %r, %r, 7;") + defined("twice", "add.u32 %r, %r, %r;")
    chosen = "setp.lt.u32 %p, %t, 2; mov.u64 %f, more; mov.u64 %a, twice; selp.b64 %f, %f, %a, %p;"
    x = np.zeros(4, np.uint32)
    kernel(call_through(chosen), functions).launch("k", 1, 4, (x,))
    np.testing.assert_array_equal(x, [7, 8, 4, 6])
    table = ".global .align 8 .u64 table[2] = {more, generic(twice)};\n"
    read = "and.b32 %r, %t, 1; mul.wide.u32 %a, %r, 8; mov.u64 %f, table; add.u64 %f, %f, %a; ld.global.u64 %f, [%f];"
    kernel(call_through(read), functions + table).launch("k", 1, 4, (x,))
    np.testing.assert_array_equal(x, [7, 2, 9, 6])
    with pytest.raises(
        emulator.EmulatorError, match=r"trap: .*calls an address that is not a function of this " r"prototype"
    ):
        kernel(call_through("mov.u64 %f, 0;"), functions).launch("k", 1, 1, (x,))


def test_exit_in_a_function_ends_the_thread() -> None:
    leave = defined("leave", "{ .reg .pred %p; setp.gt.u32 %p, %r, 1; @%p exit; }")
    body = "{ .param .b32 in; .param .b32 out; st.param.b32 [in], %t; call (out), leave, (in); } st.global.u32 [%x], 1;"
    x = np.zeros(4, np.uint32)
    kernel(body, leave).launch("k", 1, 4, (x,))
    np.testing.assert_array_equal(x, [1, 1, 0, 0])


def test_printf_writes_to_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    text = b"%3d|%-4u|%c|%%|%.*f|%s|%llx|%5.1e\n\0"
    declared = (
        ".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);\n"
        f".global .align 1 .b8 text[{len(text)}] = {{{', '.join(map(str, text))}}};\n"
        ".global .align 1 .b8 name[4] = {97, 98, 99, 0};\n"
    )
    body = (
        "{ .local .align 8 .b8 values[56]; .param .b64 f; .param .b64 a; .param .b32 r; .reg .f64 %d;"
        "st.local.s32 [values], -5; st.local.u32 [values+4], 7; st.local.u32 [values+8], 90;"
        "st.local.u32 [values+12], 2;"
        "mov.f64 %d, 0d3FF8000000000000; st.local.f64 [values+16], %d; mov.u64 %a, name; cvta.global.u64 %a, %a;"
        "st.local.u64 [values+24], %a; mov.u64 %a, 0x123456789abcdef0; st.local.u64 [values+32], %a;"
        "st.local.f64 [values+40], %d; mov.u64 %a, text; cvta.global.u64 %a, %a; st.param.b64 [f], %a;"
        "cvta.local.u64 %a, values; st.param.b64 [a], %a; call (r), vprintf, (f, a); ld.param.b32 %r, [r]; }"
        "st.global.u32 [%x], %r;"
    )
    x = np.zeros(2, np.uint32)
    kernel(body, declared).launch("k", 1, 2, (x,))
    assert capfd.readouterr().out == " -5|7   |Z|%|1.50|abc|123456789abcdef0|1.5e+00\n" * 2
    np.testing.assert_array_equal(x, 8)


def rounded(exact: Fraction, mode: str) -> float:
    """Round an exact value to a double: toward 0 (rz), down (rm) or up (rp)."""
    near = float(exact)
    down = near if Fraction(near) <= exact else nextafter(near, -np.inf)
    up = near if Fraction(near) >= exact else nextafter(near, np.inf)
    return {"rm": down, "rp": up, "rz": down if exact > 0 else up}[mode]


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_doubles_round_in_each_direction(mode: str) -> None:
    instructions = (
        f"add.{mode}.f64 %d, %c, %b; st.global.f64 [%x+32], %d; sub.{mode}.f64 %d, %c, %b; st.global.f64 [%x+40], %d;"
        f"mul.{mode}.f64 %d, %c, %b; st.global.f64 [%x+48], %d;"
        f"fma.{mode}.f64 %d, %c, %b, %c; st.global.f64 [%x+56], %d;"
        f"div.{mode}.f64 %d, %c, %b; st.global.f64 [%x+64], %d; rcp.{mode}.f64 %d, %b; st.global.f64 [%x+72], %d;"
        f"sqrt.{mode}.f64 %d, %b; st.global.f64 [%x+80], %d;"
    )
    module = kernel(f".reg .f64 %b, %c, %d; ld.global.f64 %c, [%x]; ld.global.f64 %b, [%x+8]; {instructions}")
    for c, b in np.random.default_rng(2).standard_normal((20, 2)) * np.array([1.0, 1e-3]):
        x = np.array([c, abs(b), 0, 0, *[0] * 7])
        module.launch("k", 1, 1, (x,))
        p, q = Fraction(c), Fraction(abs(b))
        exact = [p + q, p - q, p * q, p * q + p, p / q, 1 / q]
        np.testing.assert_array_equal(x[4:10], [rounded(each, mode) for each in exact])
        root = Fraction(isqrt(int(q * 2**400)), 2**200)  # rounded down, by far less than the spacing of doubles
        assert x[10] == rounded(root + Fraction(1, 2**201), mode)


def test_a_kernel_of_the_cute_dsl_gives_numpys_results() -> None:
    x, y = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    size = np.int32(100)
    emulator.load(FOLDER / "cute_add.ptx").launch("cute_add", 2, 64, ((x, size), (y, size), 100))
    np.testing.assert_array_equal(y, 2 * x)
