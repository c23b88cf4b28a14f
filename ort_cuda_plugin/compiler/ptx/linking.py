"""Linker of PTX modules: returns one module with the functions and variables of several, as cuLinkComplete does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from .parser import (
    Address,
    Function,
    Group,
    Label,
    Module,
    Operand,
    PtxError,
    Register,
    Variable,
    function_names,
    reachable,
    type_bytes,
)
from .translate import lay_out_shared

Symbol = TypeVar("Symbol", Function, Variable)


def link(modules: Sequence[Module]) -> Module:
    """Return one module with the functions and variables of all modules.

    A declaration (``.extern``) refers to the definition in another module, and a definition replaces a weak one. A name
    without a linking directive is private to its module, and is renamed if another module has the same name. Raises
    PtxError for a name with two definitions.
    """
    linked = Module(modules[0].target, modules[0].check)
    for index, module in enumerate(modules):
        names = {name: f"{name}$module{index}" for name in private_names(module) if is_taken(linked, name)}
        for function in module.functions.values():
            add(linked.functions, renamed_function(function, names))
        for variable in module.variables.values():
            add(linked.variables, renamed_variable(variable, names))
    return linked


def private_names(module: Module) -> list[str]:
    """Return the names that are private to the module. A kernel's name is never private, since applications use it."""
    functions = [each.name for each in module.functions.values() if not each.linkage and not each.is_entry]
    return functions + [each.name for each in module.variables.values() if not each.linkage]


def is_taken(module: Module, name: str) -> bool:
    return name in module.functions or name in module.variables


def is_declaration(symbol: Function | Variable) -> bool:
    """Return whether a symbol is only declared: it has no body, or no memory of its own.

    Dynamic shared memory is declared in each module.
    """
    if isinstance(symbol, Function):
        return not symbol.is_defined
    return symbol.linkage in (".extern", ".common")


def add(symbols: dict[str, Symbol], symbol: Symbol) -> None:
    known = symbols.get(symbol.name)
    if known is None or is_declaration(known) or (known.linkage == ".weak" and not is_declaration(symbol)):
        symbols[symbol.name] = symbol
    elif not is_declaration(symbol) and symbol.linkage != ".weak":
        raise PtxError(symbol.line, symbol.name, "two modules define this symbol. Make one definition .weak or .extern")


# ---- renaming of private names ----


def renamed_function(function: Function, names: Mapping[str, str]) -> Function:
    """Return the function with module symbols renamed as in ``names``, except those that its own names hide."""
    own = {*function.registers, *(each.name for each in (*function.variables, *function.parameters, *function.results))}
    names = {old: new for old, new in names.items() if old not in own}
    body = [
        item
        if isinstance(item, Label)
        else replace(item, operands=tuple(renamed_operand(each, names) for each in item.operands))
        for item in function.body
    ]
    return replace(function, name=names.get(function.name, function.name), body=body)


def renamed_operand(operand: Operand, names: Mapping[str, str]) -> Operand:
    if isinstance(operand, Register):
        return replace(operand, name=names.get(operand.name, operand.name))
    if isinstance(operand, Address):
        return replace(operand, base=names.get(operand.base, operand.base))
    if isinstance(operand, Group):
        return replace(operand, items=tuple(renamed_operand(each, names) for each in operand.items))
    return operand


def renamed_variable(variable: Variable, names: Mapping[str, str]) -> Variable:
    initial = tuple(
        (names.get(each[0], each[0]), each[1]) if isinstance(each, tuple) else each for each in variable.initial
    )
    return replace(variable, name=names.get(variable.name, variable.name), initial=initial)


# ---- what a kernel uses ----


def with_shared_variables(module: Module, kernel: str) -> Module:
    """Return the module with only those kernels that share global variables with ``kernel``, directly or indirectly.

    All device functions stay.
    """
    used = {
        name: {used for each in reachable(module, name) for used in function_names(each)}
        & {each.name for each in module.variables.values() if each.space == "global"}
        for name, function in module.functions.items()
        if function.is_entry
    }
    chosen, variables = {kernel}, used[kernel]
    while more := {name for name in used.keys() - chosen if used[name] & variables}:
        chosen |= more
        variables = variables.union(*(used[name] for name in more))
    kept = {name: each for name, each in module.functions.items() if not each.is_entry or name in chosen}
    return replace(module, functions=kept)


def declared_resources(module: Module, kernel: str) -> tuple[int, int, int]:
    """Return the (32-bit words of registers, bytes of shared memory, bytes of local memory) that a kernel declares."""
    function = module.functions[kernel]
    words = sum(-(-type_bytes(ty) // 4) for ty in function.registers.values() if ty != "pred")
    local = sum(each.size for each in function.variables if each.space == "local")
    return words, lay_out_shared(module)[1], local
