"""Control flow, calls, and instructions that end a launch: sections 9.7.12 and 9.7.15 of the PTX ISA."""

from __future__ import annotations

from collections.abc import Sequence

from .builder import Builder, thread_function
from .instructions import check_modifiers, instruction
from .parser import Group, Instruction, Operand, Register, function_address, reachable


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
        raise ins.error("the list of branch targets is not declared by .branchtargets")
    cases = " ".join(f"i32 {index}, label {b.label(name)}" for index, name in enumerate(targets))
    b.end(f"switch i32 {b.value(ins.operands[0], 'u32')}, label {b.label(targets[0])} [ {cases} ]")


EXIT = thread_function("exit", "void")
"""The emulator's function that ends the calling thread, from any call depth."""


@instruction("9.7.12.5, 9.7.12.6", "ret", "exit")
def leave(b: Builder, ins: Instruction) -> None:
    check_modifiers(ins, frozenset(("uni",)))
    if ins.opcode == "exit" and not b.function.is_entry:
        b.call("void", EXIT)
        b.end("unreachable")
        return
    b.end("ret void")


@instruction("9.7.12.4", "call")
def call(b: Builder, ins: Instruction) -> None:
    """Call a device function by its name or its address. Results and parameters are passed by reference."""
    check_modifiers(ins, frozenset(("uni",)))
    operands = list(ins.operands)
    first = operands.pop(0)
    results: tuple[Operand, ...] = ()
    if isinstance(first, Group):
        results, first = first.items, operands.pop(0)
    callee = first
    arguments = operands[0].items if operands and isinstance(operands[0], Group) else ()
    if not isinstance(callee, Register):
        raise ins.error("expected the name of a function, or a register with its address")
    if callee.name not in b.module.functions:
        call_by_address(b, ins, callee, [*results, *arguments])
        return
    function = b.module.functions[callee.name]
    if not function.is_defined and callee.name not in EXTERNAL:
        raise ins.error(f"{callee.name} is declared, but not defined in this module")
    memory = []
    given_of = zip((*results, *arguments), (*function.results, *function.parameters), strict=True)
    for given, variable in given_of:
        if variable.space != "param" or not isinstance(given, Register) or given.name not in b.parameters:
            raise ins.error("only arguments and results of the state space .param are supported")
        memory.append(f"ptr {b.parameters[given.name]}")
    if not function.is_defined:
        EXTERNAL[callee.name](b, [each.removeprefix("ptr ") for each in memory])
        return
    b.emit(f'call void @"{callee.name}"({", ".join(memory)})')


def call_by_address(b: Builder, ins: Instruction, callee: Register, given: Sequence[Operand]) -> None:
    """Call the function whose address is in a register: a switch over functions whose parameters fit the call."""
    memory = [b.parameters.get(each.name, "") if isinstance(each, Register) else "" for each in given]
    if not all(memory):
        raise ins.error("only arguments and results of the state space .param are supported")
    sizes = {each.name: each.size for each in b.function.variables}
    wanted = [sizes.get(each.name) for each in given if isinstance(each, Register)]
    candidates = [
        function
        for function in reachable(b.module, b.function.name)
        if not function.is_entry
        and function.is_defined
        and [each.size for each in (*function.results, *function.parameters)] == wanted
    ]
    address = b.value(callee, "b64")
    labels = [b.name("callee") for _ in candidates]
    wrong, done = b.name("callee.none"), b.name("called")
    cases = " ".join(
        f"i64 {function_address(b.module, function.name)}, label {label}"
        for function, label in zip(candidates, labels, strict=True)
    )
    b.end(f"switch i64 {address}, label {wrong} [ {cases} ]")
    for function, label in zip(candidates, labels, strict=True):
        b.block(label)
        b.emit(f'call void @"{function.name}"({", ".join(f"ptr {each}" for each in memory)})')
        b.end(f"br label {done}")
    b.block(wrong)
    b.call(
        "void",
        TRAP,
        f"ptr {b.text(f'line {ins.line} of the PTX calls an address that is not a function of this prototype')}",
    )
    b.end("unreachable")
    b.block(done)


# ---- instructions that end a launch ----

TRAP = thread_function("trap", "void", "ptr")
ASSERT_FAIL = thread_function("assert_fail", "void", "ptr", "ptr", "i32", "ptr")


@instruction("9.7.15.1, 9.7.15.2", "trap", "brkpt")
def trap(b: Builder, ins: Instruction) -> None:
    """End the launch with an error that names the thread. A breakpoint does the same, since no debugger is attached."""
    b.call("void", TRAP, f"ptr {b.text(f'{ins.opcode} in line {ins.line} of the PTX')}")
    b.end("unreachable")


def fail_assertion(b: Builder, arguments: Sequence[str]) -> None:
    """Translate a call of ``__assertfail``.

    Its arguments are addresses of message and file, the line, the address of the function's name, and the size of a
    char in bytes. ``arguments`` has the address of each.
    """
    values = []
    for index, memory in enumerate(arguments[:4]):
        value = b.op(f"load {'i32' if index == 2 else 'i64'}, ptr {memory}")
        values.append(f"i32 {value}" if index == 2 else f"ptr {b.host_pointer(value, '')}")
    b.call("void", ASSERT_FAIL, *values)


PRINT = thread_function("printf", "i32", "ptr", "ptr")


def print_text(b: Builder, memory: Sequence[str]) -> None:
    """Translate a call of ``vprintf``, whose arguments are the address of the format and that of the values.

    ``memory`` has the addresses of the result and of both arguments.
    """
    result, *arguments = memory
    addresses = [b.op(f"load i64, ptr {each}") for each in arguments]
    count = b.call("i32", PRINT, *(f"ptr {b.host_pointer(each, '')}" for each in addresses))
    b.emit(f"store i32 {count}, ptr {result}")


def set_conditional(b: Builder, memory: Sequence[str]) -> None:
    """Translate a call of ``cudaGraphSetConditional``; ``memory`` has the addresses of the handle and the value."""
    handle, value = b.op(f"load i64, ptr {memory[0]}"), b.op(f"load i32, ptr {memory[1]}")
    b.call("void", "cudaGraphSetConditional", f"i64 {handle}", f"i32 {value}")


EXTERNAL = {"__assertfail": fail_assertion, "cudaGraphSetConditional": set_conditional, "vprintf": print_text}
"""Functions that the CUDA driver defines, with their translations."""
