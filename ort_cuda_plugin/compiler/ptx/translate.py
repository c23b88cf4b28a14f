"""Translation of a PTX module to LLVM IR, in the form that `compiler.host.ir.prepare_module` returns.

The result is one LLVM module with the kernel and the device functions that it calls. Operations that need the thread
or its block are calls of functions named ``nvvm.*`` or ``ptx.*``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from . import control, floats, integers, matrices, memory, threads
from .builder import ALIAS, Builder, parameter_type
from .instructions import RULES
from .parser import Function, Instruction, Label, Module, PtxError, Variable, function_address, reachable

SUBJECTS = (integers, floats, memory, control, threads, matrices)
"""The modules that fill the table `RULES`."""


def lay_out_shared(module: Module) -> tuple[dict[str, int], int]:
    """Return (offset of each shared array, total bytes of the arrays whose size the module declares)."""
    offsets: dict[str, int] = {}
    size = 0
    variables = [*module.variables.values(), *(v for f in module.functions.values() for v in f.variables)]
    shared = [variable for variable in variables if variable.space == "shared"]
    for variable in shared:
        if variable.count:
            alignment = max(variable.alignment, 16)
            size = -(-size // alignment) * alignment
            offsets[variable.name] = size
            size += variable.size
    size = -(-size // 16) * 16
    return offsets | {variable.name: size for variable in shared if not variable.count}, size


def translate_function(module: Module, function: Function, shared: dict[str, int], contract: bool) -> Builder:
    """Return the builder with the text of one function. Raises PtxError."""
    builder = Builder(module, function, contract, shared)
    builder.open()
    for item in function.body:
        if isinstance(item, Label):
            builder.block(f'%"{item.name}"')
        else:
            translate_instruction(builder, item)
    if builder.is_open:
        builder.end("ret void")
    return builder


def translate_instruction(builder: Builder, ins: Instruction) -> None:
    rule = RULES.get(ins.opcode)
    if rule is None:
        raise ins.error(f"the instruction {ins.opcode} is not supported")
    builder.current = ins
    after = ""
    if ins.guard is not None:
        condition = builder.value(ins.guard, "pred")
        then, after = builder.name("then"), builder.name("after")
        if ins.opcode == "bra":
            target = control.label_of(builder, ins, ins.operands[0])
            builder.end(f"br i1 {condition}, label {target}, label {after}")
            builder.block(after)
            return
        builder.end(f"br i1 {condition}, label {then}, label {after}")
        builder.block(then)
    try:
        rule.translate(builder, ins)
    except PtxError:
        raise
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise ins.error(
            f"the operands or the modifiers do not fit {ins.opcode}, or the emulated device does not support them"
        ) from error
    if after:
        builder.block(after)
    builder.current = None


def function_text(builder: Builder) -> str:
    function = builder.function
    if function.is_entry:
        parameters = [f"{parameter_type(v)} %a{index}" for index, v in enumerate(function.parameters)]
    else:
        parameters = [f"ptr %a{index}" for index in range(len(function.results) + len(function.parameters))]
    head = f'define void @"{function.name}"({", ".join(parameters)}) {{'
    return "\n".join([head, *builder.finished(), "}"])


def variable_text(module: Module, variable: Variable) -> str:
    """Return the LLVM definition of a module's variable in global or constant memory.

    Kernels that are linked into one object share the variable. Raises PtxError for a variable's address in an
    initializer.
    """
    data = bytearray(variable.size)
    width = variable.size // max(variable.count, 1)
    for index, value in enumerate(variable.initial):
        if not isinstance(value, int):
            if value[0] not in module.functions:
                raise PtxError(variable.line, variable.name, "addresses of variables in initializers are not supported")
            value = function_address(module, value[0])
        data[index * width : (index + 1) * width] = (value & (1 << 8 * width) - 1).to_bytes(width, "little")
    text = "".join(f"\\{byte:02x}" for byte in data)
    return f'@"{variable.name}" = linkonce_odr global [{len(data)} x i8] c"{text}", align {variable.alignment}'


def llvm_module(module: Module, kernel: str, pointers: Sequence[bool] = (), contract: bool = True) -> tuple[str, int]:
    """Translate a kernel of a module; return (LLVM IR, bytes of shared memory that the module declares).

    ``pointers`` says for each parameter whether it is a device address, since the attribute ``.ptr`` is optional. With
    ``contract``, multiplications without a rounding modifier may fuse with additions, as in ptxas. Raises PtxError.
    """
    if kernel not in module.functions or not module.functions[kernel].is_entry:
        raise PtxError(1, kernel, "the module has no kernel of this name")
    entry = module.functions[kernel]
    for index, is_pointer in enumerate(pointers):
        entry.parameters[index] = replace(entry.parameters[index], is_pointer=is_pointer)
    shared, static_bytes = lay_out_shared(module)
    functions = reachable(module, kernel)
    builders = [translate_function(module, function, shared, contract) for function in functions]
    declarations = sorted(set().union(*(builder.declarations for builder in builders)))
    used = set().union(*(builder.globals for builder in builders))
    variables = [variable_text(module, variable) for name, variable in module.variables.items() if name in used]
    variables += [text for builder in builders for text in builder.texts]
    variables.append(f"@{ALIAS} = external global i64")
    return "\n".join([*variables, *map(function_text, builders), *declarations]) + "\n", static_bytes
