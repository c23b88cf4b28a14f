"""Emulation of ``mma`` and ``ldmatrix``: a lane gets the elements of other lanes by shuffles, and multiplies them by
FMAs.

`ort_cuda_plugin.compiler.intrinsics.matrix_intrinsics` describes which lane holds which elements of the matrices.
"""

from __future__ import annotations

import itertools
import re

DEPTHS = {"f16": 16, "bf16": 16, "tf32": 8, "i8": 32, "u8": 32}
"""Size of k in one ``mma`` instruction, by operand type."""
INTEGERS = {"i8": "s8", "u8": "u8"}
"""Operand types with integer accumulators, mapped to PTX's type of operand a. Operand b is int8 (s8)."""


def _types(kind: str) -> str:
    """Return the types of d, a, b and c in the name of the PTX instruction."""
    return f"s32.{INTEGERS[kind]}.s8.s32" if kind in INTEGERS else f"f32.{kind}.{kind}.f32"


PRODUCTS = {
    kind: f"mma.sync.aligned.m16n8k{depth}.row.col.{_types(kind)} "
    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    for kind, depth in DEPTHS.items()
}
"""The PTX text of the ``mma`` instruction, by operand type."""
ROUND_TF32 = "cvt.rna.tf32.f32 $0, $1;"
PAIRS = {kind: f"cvt.rn.{kind}x2.f32 $0, $1, $2;" for kind in ("f16", "bf16")}
"""PTX text that rounds two float32 numbers to a pair of 16-bit floats; the first one becomes the upper half."""
SHARED_ADDRESS = "cvta.to.shared.u64 $0, $1;"
LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];"
LOAD_TRANSPOSED = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];"
COPY = "cp.async.cg.shared.global [$0], [$1], 16;"
COPY_CACHED = "cp.async.ca.shared.global [$0], [$1], 16;"
_where = (
    "{{ .reg .pred p; .reg .u32 s; setp.ne.u32 p, $3, 0; selp.u32 s, 16, 0, p;"
    " cp.async.{}.shared.global [$0], [$1], 16, s; }}"
)
COPY_WHERE, COPY_CACHED_WHERE = _where.format("cg"), _where.format("ca")
"""PTX text of an asynchronous copy of 16 bytes that writes zeros, and reads nothing, if the condition ($3) is 0.

The emulated device then reads the address in $2 instead.
"""
COPIED = "%ocp.copied"
"""Prefix of the names of values that an asynchronous copy's load uses or returns."""
COPY_COMMIT = "cp.async.commit_group;"
COPY_WAIT = ("cp.async.wait_group 0;", "cp.async.wait_group 1;")
ASSEMBLY = {
    **{code: f"ptx.matrix.{kind}" for kind, code in PRODUCTS.items()},
    ROUND_TF32: "ptx.cvt.rna.tf32.f32",
    **{code: f"ptx.pair.{kind}" for kind, code in PAIRS.items()},
    SHARED_ADDRESS: "ptx.shared_address",
    LOAD: "ptx.load_matrices",
    LOAD_TRANSPOSED: "ptx.load_matrices_transposed",
    COPY: "ptx.copy_async",
    COPY_CACHED: "ptx.copy_async",
    COPY_WHERE: "ptx.copy_async_where",
    COPY_CACHED_WHERE: "ptx.copy_async_where",
    COPY_COMMIT: "ptx.copy_async_commit",
    **{code: f"ptx.copy_async_wait_{left}" for left, code in enumerate(COPY_WAIT)},
}
"""For each inline PTX text: the name of the function that replaces it on the emulated device."""
_shuffle = "call i32 @ocp_emu_shfl(ptr %thread, i32 -1, i32 0, i32 {}, i32 {}, i32 31, ptr %predicate)"


def _sum(kind: str) -> str:
    """Return the LLVM type of an accumulator."""
    return "i32" if kind in INTEGERS else "float"


def _sums(kind: str) -> str:
    return f"{{{', '.join([_sum(kind)] * 4)}}}"


def _widened(kind: str, name: str, word: str, part: int, signed: bool) -> list[str]:
    """Return lines that convert one element of a 32-bit word (16-bit float, byte, or TF32) to the accumulator's type,
    as ``%name``.
    """
    if kind == "tf32":
        return [f"%{name}.w = and i32 {word}, -8192", f"%{name} = bitcast i32 %{name}.w to float"]
    if kind in INTEGERS:
        lines = [f"%{name}.s = lshr i32 {word}, {8 * part}", f"%{name}.t = trunc i32 %{name}.s to i8"]
        return [*lines, f"%{name} = {'sext' if signed else 'zext'} i8 %{name}.t to i32"]
    lines = [f"%{name}.s = lshr i32 {word}, {16 * part}"]
    if kind == "bf16":
        return [*lines, f"%{name}.w = shl i32 %{name}.s, 16", f"%{name} = bitcast i32 %{name}.w to float"]
    lines += [f"%{name}.t = trunc i32 %{name}.s to i16", f"%{name}.h = bitcast i16 %{name}.t to half"]
    return [*lines, f"%{name} = fpext half %{name}.h to float"]


def _product(kind: str) -> str:
    parts = range(DEPTHS[kind] // 8)  # element indices in a 32-bit word
    ty, times, plus = (_sum(kind), "mul", "add") if kind in INTEGERS else (_sum(kind), "fmul", "fadd")
    lines = [
        "%predicate = alloca i32",
        "%row = and i32 %lane, 28",
        "%t = and i32 %lane, 3",
        "%even = shl i32 %t, 3",
        "%odd = or i32 %even, 4",
    ]
    # Four lanes hold the words of a row of a, and of a column of b; get them by shuffles.
    for s in range(4):
        for line, base in (("row", "%row"), ("even", "%even"), ("odd", "%odd")):
            lines.append(f"%from.{line}.{s} = or i32 {base}, {s}")
        words = [*((f"a{i}", "row") for i in range(4)), *((f"b{i}", line) for line in ("even", "odd") for i in (0, 1))]
        for name, line in words:
            word = f"{name}.{line}.{s}"
            lines.append(f"%{word} = {_shuffle.format(f'%{name}', f'%from.{line}.{s}')}")
            for part in parts:
                signed = kind == "i8" or name.startswith("b")
                lines += _widened(kind, f"{word}.{part}", f"%{word}", part, signed)
    for number, (rows, line) in enumerate(((0, "even"), (0, "odd"), (1, "even"), (1, "odd"))):
        total = f"%c{number}"
        # a0 and a1 hold the first half of the columns of two rows of a, a2 and a3 the second half; b0 and b1 hold the
        # halves of the rows of b that they are multiplied by.
        for half in (0, 1):
            for s in range(4):
                for part in parts:
                    a, b = f"%a{rows + 2 * half}.row.{s}.{part}", f"%b{half}.{line}.{s}.{part}"
                    name = f"%c{number}.{half}.{s}.{part}"
                    lines += [f"{name}.p = {times} {ty} {a}, {b}", f"{name} = {plus} {ty} {total}, {name}.p"]
                    total = name
        before = "undef" if number == 0 else f"%r{number - 1}"
        lines.append(f"%r{number} = insertvalue {_sums(kind)} {before}, {ty} {total}, {number}")
    words_of = ", ".join(f"i32 %{name}" for name in ("a0", "a1", "a2", "a3", "b0", "b1"))
    sums_of = ", ".join(f"{ty} %c{i}" for i in range(4))
    body = "\n".join(f"  {line}" for line in lines)
    given = f"ptr %thread, i32 %lane, {words_of}, {sums_of}"
    return (
        f"\ndefine internal {_sums(kind)} @ocp.matrix.{kind}({given}) noinline {{\n"
        f"{body}\n  ret {_sums(kind)} %r3\n}}\n"
    )


WORDS = "{i32, i32, i32, i32}"


def _load(transposed: bool) -> str:
    """Return a definition of ``ldmatrix``: each lane gets the addresses of its elements' rows by shuffles, and loads
    the elements.
    """
    lines = [
        "%predicate = alloca i32",
        "%low = trunc i64 %address to i32",
        "%shifted = lshr i64 %address, 32",
        "%high = trunc i64 %shifted to i32",
        "%g = lshr i32 %lane, 2",
        "%t = and i32 %lane, 3",
        "%t.even = shl i32 %t, 1",
        "%t.odd = or i32 %t.even, 1",
        f"%within.i = shl i32 {'%g, 1' if transposed else '%t, 2'}",
        "%within = zext i32 %within.i to i64",
    ]
    for i in range(4):
        rows = [(f"r{i}.0", "%t.even"), (f"r{i}.1", "%t.odd")] if transposed else [(f"r{i}.0", "%g")]
        for name, row in rows:
            lines.append(f"%{name}.from = or i32 {row}, {8 * i}")
            for half in ("low", "high"):
                lines.append(f"%{name}.{half} = {_shuffle.format(f'%{half}', f'%{name}.from')}")
                lines.append(f"%{name}.{half}.w = zext i32 %{name}.{half} to i64")
            lines += [
                f"%{name}.up = shl i64 %{name}.high.w, 32",
                f"%{name}.row = or i64 %{name}.up, %{name}.low.w",
                f"%{name}.at = add i64 %{name}.row, %within",
                f"%{name}.p = inttoptr i64 %{name}.at to ptr",
            ]
        if transposed:
            for name in (f"r{i}.0", f"r{i}.1"):
                lines += [f"%{name}.e = load i16, ptr %{name}.p", f"%{name}.x = zext i16 %{name}.e to i32"]
            lines += [f"%r{i}.s = shl i32 %r{i}.1.x, 16", f"%r{i} = or i32 %r{i}.0.x, %r{i}.s"]
        else:
            lines.append(f"%r{i} = load i32, ptr %r{i}.0.p")
        before = "undef" if i == 0 else f"%s{i - 1}"
        lines.append(f"%s{i} = insertvalue {WORDS} {before}, i32 %r{i}, {i}")
    body = "\n".join(f"  {line}" for line in lines)
    name = "ocp.load_matrices_transposed" if transposed else "ocp.load_matrices"
    head = f"define internal {WORDS} @{name}(ptr %thread, i32 %lane, i64 %address) noinline"
    return f"\n{head} {{\n{body}\n  ret {WORDS} %s3\n}}\n"


_value = r"(?:[a-z]+ )*([^ ,)]+)"
_accessing = re.compile(
    r"^(?P<line>[^\n]*call [^\n]*@ptx\.(?P<name>copy_async|copy_async_where|load_matrices(?:_transposed)?)"
    rf"\(i64 {_value}(?:, ptr {_value})?(?:, ptr {_value}, i32 {_value})?\)[^\n]*)$",
    re.MULTILINE,
)


def with_accesses(body: str) -> str:
    """Return the body with a load and a store for each asynchronous copy, which can be checked and counted.

    Each ``ldmatrix`` gets a load of the row at its address as well. The loaded value is unused, so LLVM removes the
    load.
    """
    number = itertools.count()

    def spread(match: re.Match[str]) -> str:
        line, _, address, source, instead, condition = match.groups()
        name = f"{COPIED if source else '%ocp.access'}.{next(number)}"
        pointer = f"{name}.p = inttoptr i64 {address} to ptr"
        if not source:
            return f"  {pointer}\n  {name} = load <4 x i32>, ptr {name}.p, align 16\n{line}"
        lines = [pointer, f"{name} = load <4 x i32>, ptr {source}, align 16"]
        if condition:
            lines = [
                pointer,
                f"{name}.c = icmp ne i32 {condition}, 0",
                f"{name}.s = select i1 {name}.c, ptr {source}, ptr {instead}",
                f"{name}.l = load <4 x i32>, ptr {name}.s, align 16",
                f"{name} = select i1 {name}.c, <4 x i32> {name}.l, <4 x i32> zeroinitializer",
            ]
        return "\n".join(f"  {text}" for text in (*lines, f"store <4 x i32> {name}, ptr {name}.p, align 16"))

    return _accessing.sub(spread, body)


DEFINITIONS = {
    **{f"ocp.matrix.{kind}": _product(kind) for kind in DEPTHS},
    "ocp.load_matrices": _load(False),
    "ocp.load_matrices_transposed": _load(True),
    "ptx.shared_address": """
define internal i64 @ptx.shared_address(ptr %x) alwaysinline {
  %r = ptrtoint ptr %x to i64
  ret i64 %r
}
""",
    # As on a GPU, infinities and NaN keep their upper bits.
    "ptx.cvt.rna.tf32.f32": """
define internal i32 @ptx.cvt.rna.tf32.f32(float %x) alwaysinline {
  %i = bitcast float %x to i32
  %size = and i32 %i, 2147483647
  %finite = icmp ult i32 %size, 2139095040
  %half = select i1 %finite, i32 4096, i32 0
  %up = add i32 %i, %half
  %r = and i32 %up, -8192
  ret i32 %r
}
""",
    **{
        f"ptx.pair.{kind}": f"""
define internal i32 @ptx.pair.{kind}(float %high, float %low) alwaysinline {{
  %h = call i16 @ptx.cvt.rn.{kind}.f32(float %high)
  %l = call i16 @ptx.cvt.rn.{kind}.f32(float %low)
  %h.w = zext i16 %h to i32
  %l.w = zext i16 %l to i32
  %h.s = shl i32 %h.w, 16
  %r = or i32 %h.s, %l.w
  ret i32 %r
}}
"""
        for kind in PAIRS
    },
    **{
        f"ptx.copy_async_{name}": f"""
define internal void @ptx.copy_async_{name}() alwaysinline {{
  ret void
}}
"""
        for name in ("commit", *(f"wait_{left}" for left in range(len(COPY_WAIT))))
    },
}
SWITCHING_CALLS = {
    **{
        f"ptx.matrix.{kind}": f"call {{{_sums(kind)}}} @ocp.matrix.{kind}(ptr %ocp.thread, i32 %ocp.laneid, {{}})"
        for kind in DEPTHS
    },
    **{
        f"ptx.{name}": f"call {{{{i32, i32, i32, i32}}}} @ocp.{name}(ptr %ocp.thread, i32 %ocp.laneid, {{}})"
        for name in ("load_matrices", "load_matrices_transposed")
    },
}
