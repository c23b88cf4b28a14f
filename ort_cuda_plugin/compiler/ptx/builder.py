"""Builder of LLVM IR for one PTX function: registers, values of PTX types, addresses of state spaces, basic blocks.

A PTX register is an alloca, which LLVM turns into SSA values. Its bits have no type: an operand is read as the type
that the instruction names. Addresses are integers, as in PTX::

    .global, .const, generic   device addresses; the host's alias of device memory is at a constant distance from them
    .shared                    offsets in the block's shared memory
    .local                     offsets in the function's local memory
    .param                     a parameter's own memory; only ``[name+offset]``

`Builder` raises PtxError for operands that it does not support.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..host import intrinsics
from .parser import (
    Address,
    Function,
    Group,
    Immediate,
    Instruction,
    Label,
    Module,
    Operand,
    PtxError,
    Register,
    Variable,
    function_address,
)

FLOATS = {"f16": "half", "f32": "float", "f64": "double"}
SPECIAL = {
    f"%{name.removeprefix('nvvm.read.ptx.sreg.').removeprefix('ptx.')}": name for name in intrinsics.register_values
}
"""Special registers in the thread record, by PTX name: the functions that `host.ir.kernel_module` replaces by their
values.
"""
ALIAS = "ocp_emu_alias"
"""The emulator's global variable with the distance from a device address to the host's alias of the same byte."""
SHARED_BASE = "ptx.shared."
"""Function that returns the address of the block's shared memory; ``ptx.shared.NAME`` returns the address of an array
in it.
"""


def thread_function(name: str, result: str, *types: str) -> str:
    """Register ``ocp_emu_NAME``, a function of the emulator that needs the calling thread, in the tables of
    `host.intrinsics`.

    ``types`` are the parameter types after the thread. Returns the name by which generated code calls the function;
    `host.ir.kernel_module` adds the thread to the arguments.
    """
    symbol = f"ocp_emu_{name}"
    given = ", {}" if types else ""
    intrinsics.switching_calls[f"ptx.{name}"] = f"call {result} @{symbol}(ptr %ocp.thread{given})"
    intrinsics.declarations[symbol] = f"declare {result} @{symbol}({', '.join(('ptr', *types))}) nounwind"
    return f"ptx.{name}"


def host_function(symbol: str, result: str, *types: str) -> str:
    """Register a function of the emulator in the tables of `host.intrinsics`, and return its name.

    The function has no parameter for the calling thread.
    """
    intrinsics.declarations[symbol] = f"declare {result} @{symbol}({', '.join(types)}) nounwind"
    return symbol


CLOCK = host_function("ocp_emu_clock", "i64")
CLOCKS = ("%globaltimer", "%globaltimer_lo", "%clock64", "%clock")
"""Special registers with a time. All are nanoseconds of the host, even those that count cycles on a GPU."""
LOCAL = thread_function("local_begin", "ptr", "ptr", "i32")


def bits_of(ty: str) -> int:
    """Return the number of bits of a scalar PTX type."""
    if ty == "pred":
        return 1
    if ty == "f32x2":
        return 64
    digits = ty.lstrip("busfe")
    return 32 if ty.endswith("16x2") or ty == "tf32" else 16 if ty == "bf16" else int(digits)


def llvm_type(ty: str) -> str:
    """Return the LLVM type for values of a PTX type; bfloat16, TF32 and packed types are integers."""
    return FLOATS.get(ty) or f"i{bits_of(ty)}"


def is_float(ty: str) -> bool:
    return ty in FLOATS


def is_signed(ty: str) -> bool:
    return ty[0] == "s"


@dataclass
class Builder:
    """Builds the text of one function; with ``contract``, multiplications and additions may fuse as in ptxas."""

    module: Module
    function: Function
    contract: bool
    shared: dict[str, int]
    lines: list[str] = field(default_factory=list)
    declarations: set[str] = field(default_factory=set)
    globals: set[str] = field(default_factory=set)
    count: int = 0
    is_open: bool = True
    local_offsets: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0
    parameters: dict[str, str] = field(default_factory=dict)
    current: Instruction | None = None
    scratches: dict[str, int] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    labels: frozenset[str] = frozenset()

    # ---- text ----

    def error(self, reason: str) -> PtxError:
        if self.current is not None:
            return self.current.error(reason)
        return PtxError(self.function.line, self.function.name, reason)

    def emit(self, text: str) -> None:
        if not self.is_open:  # code after a branch that has no label, so it is never executed
            self.block(self.name("dead"))
        self.lines.append(f"  {text}")

    def name(self, hint: str = "v") -> str:
        self.count += 1
        return f"%{hint}.{self.count}"

    def op(self, text: str, hint: str = "v") -> str:
        """Emit an instruction with a result, and return the result's name."""
        name = self.name(hint)
        self.emit(f"{name} = {text}")
        return name

    def block(self, label: str) -> None:
        """Begin the basic block ``label``; an open block before it falls through to it."""
        if self.is_open:
            self.lines.append(f"  br label {label}")
        self.lines.append(f"{label[1:]}:")
        self.is_open = True

    def label(self, name: str) -> str:
        """Return the basic block of a PTX label. Raises PtxError if the function has no such label."""
        if not self.labels:
            self.labels = frozenset(item.name for item in self.function.body if isinstance(item, Label))
        if name not in self.labels:
            raise self.error(f"the label {name} is not in the function {self.function.name}")
        return f'%"{name}"'

    def end(self, text: str) -> None:
        """Emit the terminator of the current basic block."""
        self.emit(text)
        self.is_open = False

    def call(self, result: str, name: str, *arguments: str) -> str:
        """Emit a call of an external function. Return the name of its result, "" for a void function."""
        types = ", ".join(argument.rsplit(" ", 1)[0] for argument in arguments)
        self.declarations.add(f"declare {result} @{name}({types})")
        text = f"call {result} @{name}({', '.join(arguments)})"
        if result != "void":
            return self.op(text)
        self.emit(text)
        return ""

    def scratch(self, role: str, size: int) -> str:
        """Return the address of at least ``size`` bytes in the function's frame, which pass values to the emulator."""
        self.scratches[role] = max(size, self.scratches.get(role, 0))
        return f"%scratch.{role}"

    def text(self, content: str) -> str:
        """Return the name of a constant that contains ``content`` and a null byte."""
        data = "".join(f"\\{byte:02x}" for byte in (*content.encode(), 0))
        name = f'@"{self.function.name}.text{len(self.texts)}"'
        self.texts.append(f'{name} = internal constant [{len(content.encode()) + 1} x i8] c"{data}"')
        return name

    def finished(self) -> list[str]:
        """Return the lines of the function. Its entry block has the memory that `scratch` returned."""
        memory = [f"  %scratch.{role} = alloca [{size} x i8], align 8" for role, size in self.scratches.items()]
        return [self.lines[0], *memory, *self.lines[1:]]

    # ---- registers ----

    def slot(self, register: str) -> str:
        return f'%"r.{register}"'

    def declared_type(self, register: str) -> str:
        ty = self.function.registers.get(register)
        if ty is None:
            raise self.error(f"{register} is not declared")
        return ty

    def storage(self, ty: str) -> str:
        return f"i{max(8, bits_of(ty))}" if ty != "pred" else "i1"

    def convert_bits(self, value: str, source: str, target: str, signed: bool = False) -> str:
        """Return the bits of ``value`` (LLVM type ``source``) as ``target``, truncated or extended as an integer."""
        if source == target:
            return value
        widths = {"half": 16, "float": 32, "double": 64}
        a, b = (widths.get(ty) or int(ty[1:]) for ty in (source, target))
        if source[0] != "i":
            value = self.op(f"bitcast {source} {value} to i{a}")
        if a > b:
            value = self.op(f"trunc i{a} {value} to i{b}")
        elif a < b:
            value = self.op(f"{'sext' if signed else 'zext'} i{a} {value} to i{b}")
        return self.op(f"bitcast i{b} {value} to {target}") if target[0] != "i" else value

    def constant(self, operand: Immediate, ty: str) -> str:
        """Return a number as a value of PTX type ``ty``."""
        target, bits = llvm_type(ty), operand.bits
        if operand.width:
            if is_float(ty) and bits_of(ty) != operand.width:
                source = FLOATS[f"f{operand.width}"]
                value = self.op(f"bitcast i{operand.width} {bits} to {source}")
                return self.op(f"{'fpext' if operand.width == 32 else 'fptrunc'} {source} {value} to {target}")
            return self.convert_bits(str(bits), f"i{operand.width}", target)
        if ty == "pred":
            return "true" if bits else "false"
        masked = bits & (1 << bits_of(ty)) - 1
        return self.op(f"bitcast i{bits_of(ty)} {masked} to {target}") if is_float(ty) else str(masked)

    def value(self, operand: Operand, ty: str) -> str:
        """Return an operand's value, read as PTX type ``ty``."""
        target = llvm_type(ty)
        if isinstance(operand, Immediate):
            return self.constant(operand, ty)
        if isinstance(operand, Address):
            return self.convert_bits(self.symbol(operand.base, operand.offset), "i64", target)
        if isinstance(operand, Group):
            return self.packed(operand, target)
        if operand.name in self.function.registers:
            storage = self.storage(self.function.registers[operand.name])
            value = self.op(f"load {storage}, ptr {self.slot(operand.name)}", "r")
            value = self.convert_bits(value, storage, target, is_signed(ty))
            return self.op(f"xor i1 {value}, true") if operand.negated else value
        if operand.name == "WARP_SZ":
            return "32"
        if operand.name[0] == "%":
            return special_value(self, operand.name, target)
        return self.convert_bits(self.symbol(operand.name, 0), "i64", target)

    def packed(self, group: Group, target: str) -> str:
        """Return the elements of a group as one value of LLVM type ``target``, the first element in the lowest bits."""
        total = {"half": 16, "float": 32, "double": 64}.get(target) or int(target[1:])
        width = total // len(group.items)
        result = "0"
        for index, item in enumerate(group.items):
            part = self.convert_bits(self.value(item, f"b{width}"), f"i{width}", f"i{total}")
            part = self.op(f"shl i{total} {part}, {index * width}") if index else part
            result = self.op(f"or i{total} {result}, {part}")
        return self.convert_bits(result, f"i{total}", target)

    def set(self, operand: Operand, value: str, ty: str) -> None:
        """Write a value of PTX type ``ty`` to a register, or to the elements of a group; ``_`` discards it."""
        source = llvm_type(ty)
        if isinstance(operand, Group) and operand.kind == "{":
            total = bits_of(ty)
            width = total // len(operand.items)
            whole = self.convert_bits(value, source, f"i{total}")
            for index, item in enumerate(operand.items):
                part = self.op(f"lshr i{total} {whole}, {index * width}") if index else whole
                self.set(item, self.convert_bits(part, f"i{total}", f"i{width}"), f"b{width}")
            return
        if not isinstance(operand, Register):
            raise self.error("the destination is not a register")
        if operand.name == "_":
            return
        storage = self.storage(self.declared_type(operand.name))
        value = self.convert_bits(value, source, storage, is_signed(ty))
        self.emit(f"store {storage} {value}, ptr {self.slot(operand.name)}")

    # ---- addresses ----

    def symbol(self, name: str, offset: int) -> str:
        """Return the address of a variable or function in its state space, plus ``offset``, as i64."""
        if name in self.shared:
            return str(self.shared[name] + offset)
        if name in self.local_offsets:
            return str(self.local_offsets[name] + offset)
        if name in self.module.functions:
            return str(function_address(self.module, name))
        if name in self.parameters:
            address = self.device_address(self.parameters[name])
        elif name in self.module.variables:
            if self.module.variables[name].linkage == ".extern":
                raise self.error(f"{name} is declared, but no module defines it")
            self.globals.add(name)
            address = self.device_address(f'@"{name}"')
        else:
            raise self.error(f"{name} is not declared")
        return self.op(f"add i64 {address}, {offset}") if offset else address

    def space_of(self, name: str) -> str:
        """Return the state space of a variable; "" for other names."""
        for variable in self.function.variables:
            if variable.name == name:
                return variable.space
        if name in self.parameters:
            return "param"
        return self.module.variables[name].space if name in self.module.variables else ""

    def offset_of(self, address: Address) -> str:
        """Return the value of an address operand in its state space, as i64."""
        base = address.base
        if base == "":
            return str(address.offset)
        if base in self.function.registers:
            storage = self.storage(self.function.registers[base])
            value = self.convert_bits(self.op(f"load {storage}, ptr {self.slot(base)}", "r"), storage, "i64")
            return self.op(f"add i64 {value}, {address.offset}") if address.offset else value
        return self.symbol(base, address.offset)

    def pointer(self, operand: Operand, space: str) -> str:
        """Return the host pointer for an address operand in state space ``space`` ("": generic)."""
        if not isinstance(operand, Address):
            raise self.error("expected an address in brackets")
        if space == "param":
            base = self.parameters.get(operand.base)
            if base is None:
                raise self.error(f"{operand.base} is not a parameter")
            return self.op(f"getelementptr i8, ptr {base}, i64 {operand.offset}") if operand.offset else base
        space = self.space_of(operand.base) or space if space == "" else space
        return self.host_pointer(self.offset_of(operand), space)

    def host_pointer(self, address: str, space: str) -> str:
        """Return the host pointer for an address in a state space."""
        if space == "shared":
            return self.op(f"getelementptr i8, ptr {self.call('ptr', SHARED_BASE)}, i64 {address}")
        if space == "local":
            return self.op(f"getelementptr i8, ptr %local, i64 {address}")
        return self.op(f"inttoptr i64 {self.op(f'add i64 {address}, %alias')} to ptr")

    def device_address(self, pointer: str) -> str:
        """Return the generic PTX address of a host pointer, as i64."""
        return self.op(f"sub i64 {self.op(f'ptrtoint ptr {pointer} to i64')}, %alias")

    # ---- the function's own memory ----

    def lay_out_locals(self) -> int:
        """Assign offsets to the variables in the function's local memory; return their total size in bytes."""
        size = 0
        for variable in self.function.variables:
            if variable.space == "local":
                size = -(-size // variable.alignment) * variable.alignment
                self.local_offsets[variable.name] = size
                size += variable.size
        return size

    def open(self) -> None:
        """Emit the entry block: memory for registers, local variables and parameters.

        For a kernel, the arguments %a0, %a1, ... are its parameters. For a device function, they are addresses of its
        results and parameters in the caller's memory.
        """
        function = self.function
        self.lines.append("entry:")
        for name, ty in function.registers.items():
            self.emit(f"{self.slot(name)} = alloca {self.storage(ty)}")
        self.emit("%carry = alloca i1")
        self.emit(f"%alias = load i64, ptr @{ALIAS}, !invariant.load !{{}}")
        if size := self.lay_out_locals():
            self.local_bytes = size
            if self.module.check:  # a second half of equal size records which local bytes have been written
                self.emit(f"%local.memory = alloca [{2 * size} x i8], align 16")
                local = self.call("ptr", LOCAL, "ptr %local.memory", f"i32 {size}")
                self.emit(f"%local = getelementptr i8, ptr {local}, i64 0")
            else:
                self.emit(f"%local = alloca [{size} x i8], align 16")
        for variable in function.variables:
            if variable.space == "param":
                self.allocate_parameter(variable)
        if not function.is_entry:
            given = (*function.results, *function.parameters)
            self.parameters |= {variable.name: f"%a{index}" for index, variable in enumerate(given)}
            return
        for variable in function.arguments:
            self.allocate_parameter(variable)
        for index, variable in enumerate(function.parameters):
            ty, value = parameter_type(variable), f"%a{index}"
            if ty == "ptr":
                ty, value = "i64", self.device_address(value)
            memory = self.parameters[variable.whole or variable.name]
            if variable.offset:
                memory = self.op(f"getelementptr i8, ptr {memory}, i64 {variable.offset}")
            self.emit(f"store {ty} {value}, ptr {memory}")

    def allocate_parameter(self, variable: Variable) -> None:
        self.parameters[variable.name] = f'%"p.{variable.name}"'
        alignment = max(variable.alignment, 8)
        self.emit(f"{self.parameters[variable.name]} = alloca [{max(variable.size, 1)} x i8], align {alignment}")


# ---- special registers ----


def special_value(b: Builder, name: str, target: str) -> str:
    """Return the value of a special register as LLVM type ``target``."""
    if name in CLOCKS:
        return b.convert_bits(b.call("i64", CLOCK), "i64", target)
    return b.convert_bits(special(b, name), "i32", target)


def special(b: Builder, name: str) -> str:
    """Return the value of a 32-bit special register. Raises PtxError for an unknown register."""
    if name in SPECIAL:
        return b.call("i32", SPECIAL[name])
    if name in ("%warpid", "%nwarpid"):
        return warp_number(b, name)
    if name.startswith("%lanemask_"):
        return lane_mask(b, name.removeprefix("%lanemask_"))
    if name in ("%clusterid.x", "%cluster_ctarank", "%smid", "%gridid"):
        return "0"
    raise b.error(f"the special register {name} is not supported")


def warp_number(b: Builder, name: str) -> str:
    tid, ntid = ([special(b, f"%{kind}.{axis}") for axis in "xyz"] for kind in ("tid", "ntid"))
    if name == "%nwarpid":
        total = b.op(f"mul i32 {ntid[0]}, {b.op(f'mul i32 {ntid[1]}, {ntid[2]}')}")
        return b.op(f"lshr i32 {b.op(f'add i32 {total}, 31')}, 5")
    rows = b.op(f"add i32 {tid[1]}, {b.op(f'mul i32 {tid[2]}, {ntid[1]}')}")
    linear = b.op(f"add i32 {tid[0]}, {b.op(f'mul i32 {rows}, {ntid[0]}')}")
    return b.op(f"lshr i32 {linear}, 5")


def lane_mask(b: Builder, relation: str) -> str:
    """Return the mask of the lanes below (lt, le), equal to (eq) or above (gt, ge) this lane."""
    own = b.op(f"shl i32 1, {special(b, '%laneid')}")
    below = b.op(f"sub i32 {own}, 1")
    upto = b.op(f"or i32 {own}, {below}")
    masks = {"eq": lambda: own, "lt": lambda: below, "le": lambda: upto}
    masks |= {"gt": lambda: b.op(f"xor i32 {upto}, -1"), "ge": lambda: b.op(f"xor i32 {below}, -1")}
    if relation not in masks:
        raise b.error(f"the special register %lanemask_{relation} is not known")
    return masks[relation]()


def parameter_type(variable: Variable) -> str:
    """Return the LLVM type of a kernel's parameter."""
    return "ptr" if variable.is_pointer else llvm_type(variable.type)
