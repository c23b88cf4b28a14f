"""Products of small matrices on the emulated device: lanes get what others hold by shuffles, and multiply.

The form of `ort_cuda_plugin.compiler.matrix_intrinsics`, whose comment says which lane holds what.
"""

from __future__ import annotations

KINDS = ("f16", "bf16")
PRODUCT = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
    "{{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"
)
"""What a GPU does instead, of numbers of a kind."""
SUMS = "{float, float, float, float}"
_shuffle = "call i32 @ocp_emu_shfl(ptr %thread, i32 -1, i32 0, i32 {}, i32 {}, i32 31, ptr %predicate)"


def _widened(kind: str, name: str, word: str, high: bool) -> list[str]:
    """Lines that make the float ``%name`` of a half of a word."""
    lines = [f"%{name}.s = lshr i32 {word}, {16 if high else 0}"]
    if kind == "bf16":
        return [*lines, f"%{name}.w = shl i32 %{name}.s, 16", f"%{name} = bitcast i32 %{name}.w to float"]
    lines += [f"%{name}.t = trunc i32 %{name}.s to i16", f"%{name}.h = bitcast i16 %{name}.t to half"]
    return [*lines, f"%{name} = fpext half %{name}.h to float"]


def _product(kind: str) -> str:
    lines = [
        "%predicate = alloca i32",
        "%row = and i32 %lane, 28",
        "%t = and i32 %lane, 3",
        "%even = shl i32 %t, 3",
        "%odd = or i32 %even, 4",
    ]
    # The words of a row of a, and of a column of b, stand in four lanes.
    for s in range(4):
        for line, base in (("row", "%row"), ("even", "%even"), ("odd", "%odd")):
            lines.append(f"%from.{line}.{s} = or i32 {base}, {s}")
        words = [*((f"a{i}", "row") for i in range(4)), *((f"b{i}", line) for line in ("even", "odd") for i in (0, 1))]
        for name, line in words:
            word = f"{name}.{line}.{s}"
            lines.append(f"%{word} = {_shuffle.format(f'%{name}', f'%from.{line}.{s}')}")
            for high in (False, True):
                lines += _widened(kind, f"{word}.{int(high)}", f"%{word}", high)
    for number, (rows, line) in enumerate(((0, "even"), (0, "odd"), (1, "even"), (1, "odd"))):
        total = f"%c{number}"
        # a0 and a1 have the first eight columns of the two rows, a2 and a3 the last; b0 and b1 the rows of those.
        for part in (0, 1):
            for s in range(4):
                for high in (False, True):
                    a, b = f"%a{rows + 2 * part}.row.{s}.{int(high)}", f"%b{part}.{line}.{s}.{int(high)}"
                    name = f"%c{number}.{part}.{s}.{int(high)}"
                    lines += [f"{name}.p = fmul float {a}, {b}", f"{name} = fadd float {total}, {name}.p"]
                    total = name
        before = "undef" if number == 0 else f"%r{number - 1}"
        lines.append(f"%r{number} = insertvalue {SUMS} {before}, float {total}, {number}")
    words_of = ", ".join(f"i32 %{name}" for name in ("a0", "a1", "a2", "a3", "b0", "b1"))
    sums_of = ", ".join(f"float %c{i}" for i in range(4))
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"\ndefine internal {SUMS} @ocp.matrix.{kind}(ptr %thread, i32 %lane, {words_of}, {sums_of}) noinline {{\n"
        f"{body}\n  ret {SUMS} %r3\n}}\n"
    )


DEFINITIONS = {f"ocp.matrix.{kind}": _product(kind) for kind in KINDS}
SWITCHING_CALLS = {
    f"ptx.matrix.{kind}": f"call {{{{float, float, float, float}}}} @ocp.matrix.{kind}"
    "(ptr %ocp.thread, i32 %ocp.laneid, {})"
    for kind in KINDS
}
