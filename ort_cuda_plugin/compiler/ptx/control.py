"""Control flow, barriers, and what lanes of a warp do together: sections 9.7.12 to 9.7.15 of the PTX ISA."""

from __future__ import annotations

from .builder import Builder
from .instructions import check_modifiers, instruction
from .parser import Group, Immediate, Instruction, Operand, Register


def label_of(b: Builder, ins: Instruction, operand: Operand) -> str:
    if not isinstance(operand, Register):
        raise ins.error("expected a label")
    return b.label(operand.name)


@instruction("9.7.12.2, 9.7.12.3", "bra", "brx")
def branch(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset(("uni", "idx")))
    if ins.opcode == "bra":
        b.end(f"br label {label_of(b, ins, ins.operands[0])}")
        return
    table = ins.operands[1]
    targets = b.function.tables.get(table.name) if isinstance(table, Register) else None
    if not targets:
        raise ins.error("the list of targets is not declared with .branchtargets")
    cases = " ".join(f"i32 {index}, label {b.label(name)}" for index, name in enumerate(targets))
    b.end(f"switch i32 {b.value(ins.operands[0], 'u32')}, label {b.label(targets[0])} [ {cases} ]")


@instruction("9.7.12.5, 9.7.12.6", "ret", "exit")
def leave(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset(("uni",)))
    if ins.opcode == "exit" and not b.function.is_entry:
        raise ins.error("exit in a device function is not supported")
    b.end("ret void")


@instruction("9.7.12.4", "call")
def call(b: Builder, ins: Instruction) -> None:
    """Call a device function: results and parameters are passed by the address of their memory."""
    check_modifiers(ins, frozenset(("uni",)))
    operands = list(ins.operands)
    first = operands.pop(0)
    results: tuple[Operand, ...] = ()
    if isinstance(first, Group):
        results, first = first.items, operands.pop(0)
    callee = first
    arguments = operands[0].items if operands and isinstance(operands[0], Group) else ()
    if not isinstance(callee, Register) or callee.name not in b.module.functions:
        raise ins.error("only calls of functions by name are supported")
    function = b.module.functions[callee.name]
    if not function.is_defined:
        raise ins.error(f"{callee.name} is declared, but not defined in this module")
    memory = []
    given_of = zip((*results, *arguments), (*function.results, *function.parameters), strict=True)
    for given, variable in given_of:
        if variable.space != "param" or not isinstance(given, Register) or given.name not in b.parameters:
            raise ins.error("only arguments of the state space .param are supported")
        memory.append(f"ptr {b.parameters[given.name]}")
    b.emit(f'call void @"{callee.name}"({", ".join(memory)})')


# ---- barriers ----


@instruction("9.7.13.1", "bar", "barrier")
def barrier(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset(("sync", "warp", "aligned", "cta")))
    if ins.has("warp"):
        b.call("void", "nvvm.bar.warp.sync", f"i32 {b.value(ins.operands[0], 'b32')}")
        return
    number = ins.operands[0] if ins.operands else Immediate(0)
    if not isinstance(number, Immediate) or number.bits != 0 or len(ins.operands) > 1 or not ins.has("sync"):
        raise ins.error("only the barrier 0 of all threads is supported")
    b.call("void", "nvvm.barrier0")


@instruction("9.7.15.3, 9.7.15.4", "nanosleep", "pmevent")
def sleep(b: Builder, ins: Instruction) -> None:
    if ins.opcode == "nanosleep":
        b.call("void", "ptx.nanosleep", f"i32 {b.value(ins.operands[0], 'u32')}")


# ---- warps ----

SHUFFLES = {"idx": 0, "up": 1, "down": 2, "bfly": 3}
VOTES = {"all": 0, "any": 1, "uni": 2, "ballot": 3}


@instruction("9.7.9.6", "shfl")
def shuffle(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset((*SHUFFLES, "sync")))
    if not ins.has("sync"):
        raise ins.error("shfl without .sync was removed from PTX")
    mode = next(SHUFFLES[each] for each in ins.modifiers if each in SHUFFLES)
    d, x, lane, clamp, mask = ins.operands
    pair = b.call(
        "{i32, i1}",
        "nvvm.shfl.sync.i32",
        f"i32 {b.value(mask, 'b32')}",
        f"i32 {mode}",
        *(f"i32 {b.value(each, 'b32')}" for each in (x, lane, clamp)),
    )
    if isinstance(d, Group) and d.kind == "|":
        b.set(d.items[1], b.op(f"extractvalue {{i32, i1}} {pair}, 1"), "pred")
        d = d.items[0]
    b.set(d, b.op(f"extractvalue {{i32, i1}} {pair}, 0"), "b32")


@instruction("9.7.13.10", "vote")
def vote(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset((*VOTES, "sync")))
    mode = next(VOTES[each] for each in ins.modifiers if each in VOTES)
    d, predicate, mask = ins.operands
    pair = b.call(
        "{i32, i1}",
        "nvvm.vote.sync",
        f"i32 {b.value(mask, 'b32')}",
        f"i32 {mode}",
        f"i1 {b.value(predicate, 'pred')}",
    )
    if ins.has("ballot"):
        b.set(d, b.op(f"extractvalue {{i32, i1}} {pair}, 0"), "b32")
    else:
        b.set(d, b.op(f"extractvalue {{i32, i1}} {pair}, 1"), "pred")


@instruction("9.7.13.12", "activemask")
def active_mask(b: Builder, ins: Instruction) -> None:
    raise ins.error("activemask is not supported: its result depends on how a GPU schedules lanes. Pass a mask")


# ---- matrices ----

MMA = {
    "m16n8k16.f32.f16.f16.f32": "f16",
    "m16n8k16.f32.bf16.bf16.f32": "bf16",
    "m16n8k8.f32.tf32.tf32.f32": "tf32",
    "m16n8k32.s32.s8.s8.s32": "i8",
    "m16n8k32.s32.u8.s8.s32": "u8",
}


@instruction("9.7.14.5", "mma")
def multiply_matrices(b: Builder, ins: Instruction) -> None:
    shape = next((each for each in ins.modifiers if each[0] == "m" and each[1].isdigit()), "")
    types = tuple(each for each in ins.modifiers if each in ("f32", "f16", "bf16", "tf32", "s32", "s8", "u8"))
    kind = (
        MMA.get(".".join((shape, *types))) if ins.has("row") and ins.has("col") and not ins.has("satfinite") else None
    )
    if kind is None:
        raise ins.error("this shape and these types are not supported")
    d, a, c, e = ins.operands
    if not all(isinstance(each, Group) for each in ins.operands):
        raise ins.error("the operands are groups of registers")
    total = "i32" if kind in ("i8", "u8") else "float"
    ty = "b32" if total == "i32" else "f32"
    words = [f"i32 {b.value(item, 'b32')}" for each in (a, c) for item in each.items]  # type: ignore[union-attr]
    sums = [f"{total} {b.value(item, ty)}" for item in e.items]  # type: ignore[union-attr]
    result = f"{{{', '.join([total] * 4)}}}"
    value = b.call(result, f"ptx.matrix.{kind}", *words, *sums)
    for index, item in enumerate(d.items):  # type: ignore[union-attr]
        b.set(item, b.op(f"extractvalue {result} {value}, {index}"), ty)


@instruction("9.7.14.5.15", "ldmatrix")
def load_matrices(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset(("sync", "aligned", "m8n8", "x4", "x2", "x1", "trans", "shared", "shared::cta")))
    d = ins.operands[0]
    if not isinstance(d, Group) or not ins.has("x4") or not ins.has("m8n8"):
        raise ins.error("only four matrices of 8 x 8 are supported")
    pointer = b.pointer(ins.operands[1], "shared")
    address = b.op(f"ptrtoint ptr {pointer} to i64")
    name = "ptx.load_matrices_transposed" if ins.has("trans") else "ptx.load_matrices"
    result = "{i32, i32, i32, i32}"
    value = b.call(result, name, f"i64 {address}")
    for index, item in enumerate(d.items):
        b.set(item, b.op(f"extractvalue {result} {value}, {index}"), "b32")


@instruction("9.7.15.1", "trap", "brkpt")
def trap(b: Builder, ins: Instruction) -> None:
    raise ins.error(f"{ins.opcode} is not supported")
