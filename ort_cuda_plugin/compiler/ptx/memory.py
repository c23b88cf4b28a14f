"""Data movement: mov, loads, stores, address conversions, asynchronous copies, atomics and fences.

Sections 9.7.9 and 9.7.13 of the PTX ISA define these instructions. `threads` has the other instructions of 9.7.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .builder import Builder, bits_of, is_float, is_signed, llvm_type, thread_function
from .floats import joined, of_half, split
from .instructions import check_modifiers, instruction, type_of
from .parser import Address, Group, Immediate, Instruction, Operand, Register

SPACES = ("global", "shared", "local", "param", "const")
ORDERS = {
    "relaxed": "monotonic",
    "acquire": "acquire",
    "release": "release",
    "acq_rel": "acq_rel",
    "volatile": "volatile",
}
CACHES = frozenset(
    (
        *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak", "L1::evict_normal", "L1::evict_unchanged"),
        *("L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::64B", "L2::128B", "L2::256B", "L2::cache_hint"),
        *("shared::cta", "cta", "gpu", "sys", "cluster", "noftz", "unified", "u64"),
    )
)
"""Modifiers that do not change results on the emulated device: cache operations, and scopes, since all threads see one
memory order. The checking mode takes note of ``.nc`` and ``.cta``.
"""
ACCESS = frozenset((*SPACES, *ORDERS, *CACHES, "v2", "v4", "v8"))


def space_of(ins: Instruction) -> str:
    """Return the state space among the modifiers; "" for generic addresses."""
    for modifier in ins.modifiers:
        if modifier.split("::")[0] in SPACES:
            return modifier.split("::")[0]
    return ""


def ordering(ins: Instruction) -> str:
    return next((ORDERS[each] for each in ins.modifiers if each in ORDERS), "")


def memory_type(ty: str, count: int) -> str:
    element = llvm_type(ty)
    return element if count == 1 else f"<{count} x {element}>"


@instruction("9.7.9.3", "mov")
def move(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset(("v2", "v4")))
    ty = type_of(ins)
    d, x = ins.operands
    b.set(d, b.value(x, ty), ty)


@dataclass(frozen=True)
class Access:
    """A load or store. ``items`` are registers or values of PTX type ``type``; in memory they are one value of LLVM
    type ``kind``, with ``size`` bytes.
    """

    items: tuple[Operand, ...]
    type: str
    kind: str
    size: int
    pointer: str
    order: str


def access(b: Builder, ins: Instruction, data: Operand, address: Operand) -> Access:
    check_modifiers(ins, ACCESS)
    ty = type_of(ins)
    items = data.items if isinstance(data, Group) else (data,)
    size = bits_of(ty) // 8 * len(items)
    pointer = b.pointer(address, space_of(ins))
    check_access(b, ins, pointer, size, STORE if ins.opcode == "st" else LOAD)
    return Access(items, ty, memory_type(ty, len(items)), size, pointer, ordering(ins))


CHECK = thread_function("check_access", "void", "ptr", "i32", "i32")
LOAD, STORE, ATOMIC = 1, 2, 3
"""The emulator's numbers for types of accesses."""
STRONG, ACQUIRES, RELEASES, READ_ONLY, OF_BLOCK = 4, 8, 16, 32, 64
"""The emulator's flags for accesses, see ``csrc_shim/emulator/blocks/global_order.h``."""


def check_access(b: Builder, ins: Instruction, pointer: str, size: int, kind: int) -> None:
    """In checking mode, emit a check before an access: its alignment, and its order with other accesses of the launch.

    A load with any memory order, and every atomic, counts as an acquire: code that waits for a flag often has a fence
    only before it sets the flag.
    """
    if not b.module.check:
        return
    what = kind
    if kind == ATOMIC or ordering(ins) or ins.has("mmio"):
        what |= STRONG | (ACQUIRES if kind != STORE else 0)
    if ins.has("release", "acq_rel"):
        what |= RELEASES
    what |= READ_ONLY if ins.has("nc") else 0
    what |= OF_BLOCK if ins.has("cta") else 0
    b.call("void", CHECK, f"ptr {pointer}", f"i32 {size}", f"i32 {what}")


@instruction("9.7.9.8, 9.7.9.9", "ld", "ldu")
def load(b: Builder, ins: Instruction) -> None:
    x = access(b, ins, ins.operands[0], ins.operands[1])
    kind = x.kind
    if x.order == "volatile":
        value = b.op(f"load volatile {kind}, ptr {x.pointer}, align {x.size}")
    elif x.order and len(x.items) == 1:
        integer = f"i{8 * x.size}"
        value = b.op(f"load atomic {integer}, ptr {x.pointer} {x.order}, align {x.size}")
        value = b.convert_bits(value, integer, kind)
    else:
        value = b.op(f"load {kind}, ptr {x.pointer}, align {x.size}")
    for index, item in enumerate(x.items):
        b.set(item, b.op(f"extractelement {kind} {value}, i32 {index}") if len(x.items) > 1 else value, x.type)


@instruction("9.7.9.11", "st")
def store(b: Builder, ins: Instruction) -> None:
    x = access(b, ins, ins.operands[1], ins.operands[0])
    values = [b.value(item, x.type) for item in x.items]
    if x.order not in ("", "volatile") and len(values) == 1:
        integer = f"i{8 * x.size}"
        value = b.convert_bits(values[0], x.kind, integer)
        b.emit(f"store atomic {integer} {value}, ptr {x.pointer} {x.order}, align {x.size}")
        return
    value = values[0] if len(values) == 1 else "poison"
    for index, each in enumerate(values if len(values) > 1 else ()):
        value = b.op(f"insertelement {x.kind} {value}, {llvm_type(x.type)} {each}, i32 {index}")
    volatile = "volatile " if x.order == "volatile" else ""
    b.emit(f"store {volatile}{x.kind} {value}, ptr {x.pointer}, align {x.size}")


@instruction("9.7.9.15 to 9.7.9.17", "prefetch", "prefetchu", "applypriority", "discard", "createpolicy")
def hint(b: Builder, ins: Instruction) -> None:
    """Ignore a cache hint. createpolicy returns the policy 0; discard is refused, since it leaves memory undefined."""
    if ins.opcode == "discard":
        raise ins.error("discard is not supported, because it leaves undefined contents in memory")
    if ins.opcode == "createpolicy":
        b.set(ins.operands[0], "0", "b64")


@instruction("9.7.9.18", "isspacep")
def is_in_space(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset((*SPACES, *CACHES)))
    address, space = b.value(ins.operands[1], "u64"), space_of(ins)
    inside = {each: in_window(b, address, each) for each in ("shared", "local") if each != "local" or b.local_bytes}
    if space == "global":
        apart = [b.op(f"xor i1 {flag}, true") for flag in inside.values()]
        value = apart[0] if len(apart) == 1 else b.op(f"and i1 {apart[0]}, {apart[1]}")
    elif space in ("shared", "local"):
        value = inside.get(space, "false")
    else:
        raise ins.error("isspacep is supported for .global, .shared and .local only")
    b.set(ins.operands[0], value, "pred")


def in_window(b: Builder, address: str, space: str) -> str:
    """Return whether a generic address is in the block's shared or in the function's local memory (``space``)."""
    start = b.device_address(b.host_pointer("0", space))
    size = SHARED_WINDOW if space == "shared" else b.local_bytes
    return b.op(f"icmp ult i64 {b.op(f'sub i64 {address}, {start}')}, {size}")


SHARED_WINDOW = 1 << 18
"""Bytes after the start of a block's shared memory that count as shared; a block can have at most 228 KiB."""


@instruction("9.7.9.20", "cvta")
def convert_address(b: Builder, ins: Instruction) -> None:
    """Translate cvta: convert an address in a state space to a generic one, or, with ``.to``, back."""
    check_modifiers(ins, frozenset((*SPACES, *CACHES, "to")))
    ty, space = type_of(ins) if ins.has("u32") else "u64", space_of(ins)
    source = ins.operands[1]
    if isinstance(source, Address):
        address = b.symbol(source.base, source.offset)
    else:
        address = b.value(source, ty)
        address = b.convert_bits(address, llvm_type(ty), "i64")
    if space in ("shared", "local"):
        if ins.has("to"):
            start = b.device_address(b.host_pointer("0", space))
            address = b.op(f"sub i64 {address}, {start}")
        else:
            address = b.device_address(b.host_pointer(address, space))
    b.set(ins.operands[0], b.convert_bits(address, "i64", llvm_type(ty)), ty)


# ---- asynchronous copies ----


COPY_BEGUN = thread_function("copy_begun", "void", "ptr", "i32")
COPY_COMMIT = thread_function("copy_commit", "void", "i32")
COPY_WAIT = thread_function("copy_wait", "void", "i32")


@instruction("9.7.9.25", "cp")
def copy(b: Builder, ins: Instruction) -> None:
    """Translate cp.async: copy at once. The checking mode records copies for which the thread has not yet waited.

    If the source size is smaller than the copy's size, the rest is filled with zeros.
    """
    if not ins.has("async") or ins.has("bulk", "mbarrier"):
        raise ins.error(
            "only the cp instructions cp.async, cp.async.commit_group, .wait_group and .wait_all are supported"
        )
    if ins.has("commit_group"):
        b.call("void", COPY_COMMIT, "i32 0")
        return
    if ins.has("wait_group", "wait_all"):
        left = b.value(ins.operands[0], "u32") if ins.has("wait_group") else "-1"
        b.call("void", COPY_WAIT, f"i32 {left}")
        return
    check_modifiers(ins, frozenset((*SPACES, *CACHES, "async")))
    destination, source, *rest = ins.operands
    size = b.constant(rest[0], "u32") if isinstance(rest[0], Immediate) else ""
    if size not in ("4", "8", "16"):
        raise ins.error("expected a size of 4, 8 or 16 bytes")
    given = rest[1] if len(rest) > 1 and not ins.has("L2::cache_hint") else rest[1] if len(rest) > 2 else None
    to, at = b.pointer(destination, "shared"), b.pointer(source, "global")
    check_access(b, ins, to, int(size), STORE)
    kind = {"4": "i32", "8": "i64", "16": "<4 x i32>"}[size]
    if given is None:
        value = b.op(f"load {kind}, ptr {at}, align {size}")
    elif isinstance(given, Register) and b.declared_type(given.name) == "pred":
        value = copied_where(b, kind, at, size, b.op(f"xor i1 {b.value(given, 'pred')}, true"))
    elif isinstance(given, Immediate) and given.bits == int(size):
        value = b.op(f"load {kind}, ptr {at}, align {size}")
    else:
        value = partly_copied(b, kind, at, size, b.value(given, "u32"))
    b.emit(f"store {kind} {value}, ptr {to}, align {size}")
    b.call("void", COPY_BEGUN, f"ptr {to}", f"i32 {size}")


def copied_where(b: Builder, kind: str, at: str, size: str, condition: str) -> str:
    """Return the value at address ``at`` if the condition holds; otherwise return zeros, without reading memory."""
    zero = "zeroinitializer" if kind[0] == "<" else "0"
    b.count += 1
    read, done, start = (f"%{name}.{b.count}" for name in ("copy.read", "copy.done", "copy.start"))
    b.block(start)
    b.end(f"br i1 {condition}, label {read}, label {done}")
    b.block(read)
    value = b.op(f"load {kind}, ptr {at}, align {size}")
    b.block(done)
    return b.op(f"phi {kind} [ {value}, {read} ], [ {zero}, {start} ]")


def partly_copied(b: Builder, kind: str, at: str, size: str, given: str) -> str:
    """Return the first ``given`` bytes at ``at``, followed by zeros; for 0 bytes, memory is not read."""
    some = b.op(f"icmp ne i32 {given}, 0")
    bits = int(size) * 8
    value = copied_where(b, kind, at, size, some)
    whole = b.op(f"bitcast {kind} {value} to i{bits}") if kind[0] == "<" else value
    all_bits = b.op(f"icmp uge i32 {given}, {size}")
    amount = b.convert_bits(b.op(f"shl i32 {given}, 3"), "i32", f"i{bits}")
    limited = b.op(f"select i1 {all_bits}, i{bits} 0, i{bits} {amount}")
    mask = b.op(f"sub i{bits} {b.op(f'shl i{bits} 1, {limited}')}, 1")
    mask = b.op(f"select i1 {all_bits}, i{bits} -1, i{bits} {mask}")
    kept = b.op(f"and i{bits} {whole}, {mask}")
    return b.op(f"bitcast i{bits} {kept} to {kind}") if kind[0] == "<" else kept


# ---- atomics ----

ATOMICS = {"and": "and", "or": "or", "xor": "xor", "exch": "xchg", "inc": "uinc_wrap", "dec": "udec_wrap"}
OPERATIONS = frozenset((*ATOMICS, "add", "min", "max", "cas"))


@instruction("9.7.13.14, 9.7.13.15", "atom", "red")
def atomic(b: Builder, ins: Instruction) -> None:
    """Translate atom and red: update memory atomically. A vector is updated element by element, as the ISA allows."""
    check_modifiers(ins, ACCESS | OPERATIONS)
    ty = type_of(ins)
    returns = ins.opcode == "atom"
    address, *values = ins.operands[1:] if returns else ins.operands
    pointer = b.pointer(address, space_of(ins))
    if not isinstance(values[0], Group):
        old, kind = atomic_update(b, ins, pointer, ty, values)
        if returns:
            b.set(ins.operands[0], old, kind)
        return
    results = ins.operands[0].items if returns and isinstance(ins.operands[0], Group) else ()
    for index, value in enumerate(values[0].items):
        at = b.op(f"getelementptr i8, ptr {pointer}, i64 {index * bits_of(ty) // 8}")
        old, kind = atomic_update(b, ins, at, ty, [value])
        if results:
            b.set(results[index], old, kind)


def atomic_update(b: Builder, ins: Instruction, pointer: str, ty: str, values: Sequence[Operand]) -> tuple[str, str]:
    """Emit an atomic update of one element of memory; return (its old value, the PTX type of the value)."""
    operation = next((each for each in ins.modifiers if each in OPERATIONS), "")
    size = bits_of(ty) // 8
    check_access(b, ins, pointer, size, ATOMIC)
    order = {"acquire": "acquire", "release": "release", "acq_rel": "acq_rel"}.get(ordering(ins), "monotonic")
    if operation == "cas":
        kind = f"b{bits_of(ty)}"
        expected, desired = (b.value(each, kind) for each in values)
        return exchanged(b, pointer, f"i{bits_of(ty)}", expected, desired, order, size)[0], kind
    if ty in ("f16", "bf16", "f16x2", "bf16x2"):
        if operation not in ("add", "min", "max"):
            raise ins.error(f"the operation {operation!r} is not supported for .{ty}")
        return updated_halves(b, pointer, operation, ty, b.value(values[0], f"b{bits_of(ty)}"), order), f"b{8 * size}"
    name = atomic_name(ins, operation, ty)
    value = b.value(values[0], ty)
    return b.op(f"atomicrmw {name} ptr {pointer}, {llvm_type(ty)} {value} {order}, align {size}"), ty


def exchanged(
    b: Builder, pointer: str, integer: str, expected: str, desired: str, order: str, size: int
) -> tuple[str, str]:
    """Emit a compare-and-swap; return (the old value, whether it equals the expected one)."""
    failure = "acquire" if order in ("acquire", "acq_rel") else "monotonic"
    pair = b.op(f"cmpxchg ptr {pointer}, {integer} {expected}, {integer} {desired} {order} {failure}, align {size}")
    return tuple(b.op(f"extractvalue {{ {integer}, i1 }} {pair}, {index}") for index in (0, 1))  # type: ignore[return-value]


def updated_halves(b: Builder, pointer: str, operation: str, ty: str, value: str, order: str) -> str:
    """Emit an atomic update of one or two 16-bit numbers, as a loop of compare-and-swap; return the old value."""
    size = bits_of(ty) // 8
    integer = f"i{8 * size}"

    def compute(width: str, pair: Sequence[str]) -> str:
        if operation == "add":
            return b.op(f"fadd {width} {pair[0]}, {pair[1]}")
        relation = "olt" if operation == "min" else "ogt"
        chosen = b.op(f"fcmp {relation} {width} {pair[0]}, {pair[1]}")
        return b.op(f"select i1 {chosen}, {width} {pair[0]}, {width} {pair[1]}")

    first = b.op(f"load atomic {integer}, ptr {pointer} monotonic, align {size}")
    b.count += 1
    start, loop, done = (f"%{name}.{b.count}" for name in ("update.start", "update", "update.done"))
    b.block(start)
    b.block(loop)
    old, last = b.name(), b.name()
    b.emit(f"{old} = phi {integer} [ {first}, {start} ], [ {last}, {loop} ]")
    if ty.endswith("x2"):
        pairs = [split(b, each) for each in (old, value)]
        new = joined(b, *(of_half(b, ty[:-2], [pair[index] for pair in pairs], compute) for index in (0, 1)))
    else:
        new = of_half(b, ty, [old, value], compute)
    found, succeeded = exchanged(b, pointer, integer, old, new, order, size)
    b.emit(f"{last} = add {integer} {found}, 0")
    b.end(f"br i1 {succeeded}, label {done}, label {loop}")
    b.block(done)
    return old


def atomic_name(ins: Instruction, operation: str, ty: str) -> str:
    """Return LLVM's name of an atomic operation for a PTX type."""
    if operation == "add":
        return "fadd" if is_float(ty) else "add"
    if operation in ("min", "max"):
        return operation if is_signed(ty) else f"u{operation}"
    if operation not in ATOMICS:
        raise ins.error(f"the operation {operation!r} is not supported")
    return ATOMICS[operation]


FENCE = thread_function("fence", "void", "i32")


@instruction("9.7.13.4, 9.7.13.5", "membar", "fence")
def fence(b: Builder, ins: Instruction) -> None:
    if ins.has("proxy", "mbarrier_init"):
        raise ins.error("fence.proxy and fence.mbarrier_init are not supported")
    if b.module.check:
        b.call("void", FENCE, f"i32 {OF_BLOCK if ins.has('cta') else 0}")
    b.emit("fence seq_cst")
