"""Barriers, shuffles, votes and reductions of the threads of a block or a warp, and nanosleep.

Sections 9.7.9.6, 9.7.13 and 9.7.15 of the PTX ISA define these instructions.
"""

from __future__ import annotations

from .builder import Builder, special, thread_function
from .instructions import check_modifiers, instruction, type_of
from .parser import Group, Immediate, Instruction, Operand

BARRIER = thread_function("numbered_barrier", "i32", "i32", "i32", "i32", "i32")
MATCH = thread_function("match", "i32", "i32", "i32", "i32")
REDUCE = thread_function("reduce", "i32", "i32", "i32", "i32")
MODES = {"sync": 0, "arrive": 1, "popc": 2, "and": 3, "or": 4}
"""The emulator's numbers for a barrier's variants: wait, arrive without waiting, or wait and reduce predicates."""
BARRIER_MODIFIERS = frozenset(("sync", "arrive", "red", "warp", "aligned", "cta", "popc", "and", "or"))


@instruction("9.7.13.1, 9.7.13.2", "bar", "barrier")
def barrier(b: Builder, ins: Instruction) -> None:
    """Translate bar and barrier, which wait for threads of the block or lanes of the warp.

    Barrier 0 of all threads has a separate, faster function in the emulator.
    """
    check_modifiers(ins, BARRIER_MODIFIERS)
    if ins.has("warp"):
        b.call("void", "nvvm.bar.warp.sync", f"i32 {b.value(ins.operands[0], 'b32')}")
        return
    operands = list(ins.operands)
    result = operands.pop(0) if ins.has("red") else None
    predicate = b.value(operands.pop(), "pred") if ins.has("red") else "false"
    number, *count = operands or [Immediate(0)]
    mode = next((MODES[each] for each in ("popc", "and", "or", "arrive", "sync") if ins.has(each)), None)
    if mode is None or len(count) > 1 or (ins.has("arrive") and not count):
        raise ins.error(
            "expected .sync, .arrive with a count of threads, or .red with an operation, and at most one count"
        )
    if mode == 0 and not count and number == Immediate(0):
        b.call("void", "nvvm.barrier0")
        return
    value = b.call(
        "i32",
        BARRIER,
        f"i32 {b.value(number, 'u32')}",
        f"i32 {b.value(count[0], 'u32') if count else 0}",
        f"i32 {mode}",
        f"i32 {b.op(f'zext i1 {predicate} to i32')}",
    )
    if result is not None and mode == MODES["popc"]:
        b.set(result, value, "u32")
    elif result is not None:
        b.set(result, b.op(f"icmp ne i32 {value}, 0"), "pred")


MBARRIER = thread_function("mbarrier", "i64", "ptr", "i32", "i64")
MBARRIER_MODIFIERS = frozenset(
    (
        *("init", "inval", "arrive", "arrive_drop", "test_wait", "try_wait", "parity", "shared", "shared::cta"),
        *("release", "acquire", "cta"),
    )
)


@instruction("9.7.13.16", "mbarrier")
def mbarrier(b: Builder, ins: Instruction) -> None:
    """Translate mbarrier: initialize it, arrive at it, or test whether a phase is complete. Transactions are not
    supported.
    """
    check_modifiers(ins, MBARRIER_MODIFIERS)
    operands = list(ins.operands)
    result = None if ins.has("init", "inval") else operands.pop(0)
    pointer = b.pointer(operands.pop(0), "shared" if ins.has("shared", "shared::cta") else "")
    if ins.has("inval"):
        return
    if ins.has("init", "test_wait", "try_wait"):
        given = b.value(operands[0], "u32" if ins.has("init", "parity") else "u64")
        given = given if not ins.has("init", "parity") else b.convert_bits(given, "i32", "i64")
    else:
        given = b.convert_bits(b.value(operands[0], "u32"), "i32", "i64") if operands else "1"
    names = ("init", "arrive", "arrive_drop")
    operation = next((names.index(each) for each in names if ins.has(each)), 4 if ins.has("parity") else 3)
    value = b.call("i64", MBARRIER, f"ptr {pointer}", f"i32 {operation}", f"i64 {given}")
    if result is not None and operation >= 3:
        b.set(result, b.op(f"icmp ne i64 {value}, 0"), "pred")
    elif result is not None:
        b.set(result, value, "b64")


@instruction("9.7.15.3, 9.7.15.4", "nanosleep", "pmevent")
def sleep(b: Builder, ins: Instruction) -> None:
    if ins.opcode == "nanosleep":
        b.call("void", "ptx.nanosleep", f"i32 {b.value(ins.operands[0], 'u32')}")


@instruction("9.7.13.13", "griddepcontrol")
def depend_on_grid(b: Builder, ins: Instruction) -> None:
    """Emit nothing: the emulated device runs the launches of a stream one after another."""
    check_modifiers(ins, frozenset(("launch_dependents", "wait")))


# ---- lanes of a warp ----

SHUFFLES = {"idx": 0, "up": 1, "down": 2, "bfly": 3}
VOTES = {"all": 0, "any": 1, "uni": 2, "ballot": 3}


def with_predicate(operand: Operand) -> tuple[Operand, Operand | None]:
    """Return (register, predicate) of a destination ``d|p``; the predicate is None for a destination without one."""
    if isinstance(operand, Group) and operand.kind == "|":
        return operand.items[0], operand.items[1]
    return operand, None


@instruction("9.7.9.6", "shfl")
def shuffle(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset((*SHUFFLES, "sync")))
    if not ins.has("sync"):
        raise ins.error("expected shfl.sync, because PTX no longer has shfl without .sync")
    mode = next(SHUFFLES[each] for each in ins.modifiers if each in SHUFFLES)
    d, x, lane, clamp, mask = ins.operands
    pair = b.call(
        "{i32, i1}",
        "nvvm.shfl.sync.i32",
        f"i32 {b.value(mask, 'b32')}",
        f"i32 {mode}",
        *(f"i32 {b.value(each, 'b32')}" for each in (x, lane, clamp)),
    )
    d, predicate = with_predicate(d)
    if predicate is not None:
        b.set(predicate, b.op(f"extractvalue {{i32, i1}} {pair}, 1"), "pred")
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


@instruction("9.7.13.11", "match")
def match(b: Builder, ins: Instruction) -> None:
    """Translate match.

    For ``.any``, the result is the mask of the lanes with the same value. For ``.all``, it is the mask of all lanes or
    0, and the predicate says whether all values are equal.
    """
    check_modifiers(ins, frozenset(("any", "all", "sync")))
    d, x, mask = ins.operands
    lanes, mode = b.value(mask, "b32"), int(ins.has("all"))
    words = [b.value(x, "b32")]
    if type_of(ins) == "b64":
        whole = b.value(x, "b64")
        words = [b.op(f"trunc i64 {part} to i32") for part in (whole, b.op(f"lshr i64 {whole}, 32"))]
    found = [b.call("i32", MATCH, f"i32 {lanes}", f"i32 {mode}", f"i32 {word}") for word in words]
    result = found[0] if len(found) == 1 else b.op(f"and i32 {found[0]}, {found[1]}")
    d, predicate = with_predicate(d)
    if predicate is not None:
        b.set(predicate, b.op(f"icmp ne i32 {result}, 0"), "pred")
    b.set(d, result, "b32")


REDUCTIONS = {
    "add": 0,
    "min.s32": 1,
    "max.s32": 2,
    "min.u32": 3,
    "max.u32": 4,
    "and": 5,
    "or": 6,
    "xor": 7,
}
"""The emulator's numbers for reductions."""


@instruction("9.7.13.14", "redux")
def reduce_lanes(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset(("sync", "add", "min", "max", "and", "or", "xor")))
    ty = type_of(ins)
    operation = next((each for each in ins.modifiers if each in ("add", "min", "max", "and", "or", "xor")), "")
    mode = REDUCTIONS.get(operation, REDUCTIONS.get(f"{operation}.{ty}"))
    if mode is None or ty not in ("u32", "s32", "b32"):
        raise ins.error(f"the reduction {operation!r} of .{ty} is not supported")
    d, x, mask = ins.operands
    b.set(d, b.call("i32", REDUCE, f"i32 {b.value(mask, 'b32')}", f"i32 {mode}", f"i32 {b.value(x, 'b32')}"), "b32")


@instruction("9.7.13.12", "activemask")
def active_mask(b: Builder, ins: Instruction) -> None:
    """Return a mask of this lane alone: the emulator runs each lane by itself, as a GPU may do as well."""
    b.set(ins.operands[0], b.op(f"shl i32 1, {special(b, '%laneid')}"), "b32")


@instruction("9.7.13.15", "elect")
def elect(b: Builder, ins: Instruction) -> None:
    """Translate elect, which elects the lowest lane of the mask."""
    check_modifiers(ins, frozenset(("sync",)))
    d, mask = ins.operands
    lanes = b.value(mask, "b32")
    b.call("void", "nvvm.bar.warp.sync", f"i32 {lanes}")
    leader = b.call("i32", "llvm.cttz.i32", f"i32 {lanes}", "i1 false")
    if not isinstance(d, Group):
        raise ins.error("expected the destination d|p: a register and a predicate")
    b.set(d.items[0], leader, "b32")
    b.set(d.items[1], b.op(f"icmp eq i32 {leader}, {special(b, '%laneid')}"), "pred")
