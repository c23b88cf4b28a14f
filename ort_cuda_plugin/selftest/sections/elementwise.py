"""Checks of elementwise operators: each element type, sizes just below and above vector loads, broadcasting."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Case

EXACT = ("Abs", "Neg", "Relu", "Sign", "Floor", "Ceil", "Round", "Identity")
FUNCTIONS = ("Exp", "Erf", "Tanh", "Sigmoid", "Softplus", "Sin", "Cos", "Atan", "Gelu", "Elu", "Selu", "HardSwish")
OF_POSITIVE = ("Log", "Sqrt", "Reciprocal")
BINARY = ("Add", "Sub", "Mul", "Max", "Min")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
SIZES = (1, 7, 255, 1028, 4097)


def cases(is_quick: bool) -> Iterator[Case]:
    """Yield the cases of elementwise operators."""
    for type_name in ("float", "float16") if is_quick else ("float", "float16", "bfloat16", "double"):
        for size in (7, 1028) if is_quick else SIZES:
            yield _unary(f"exact functions of {size}", EXACT, type_name, size, True)
            yield _unary(f"functions of {size}", FUNCTIONS, type_name, size, False)
            yield _binary(f"arithmetic of {size}", BINARY, type_name, f"[{size}]", f"[{size}]", f"[{size}]")
        yield _positive(type_name)
        yield _binary("arithmetic with a row", BINARY, type_name, "[33, 65]", "[65]", "[33, 65]")
        yield _binary("arithmetic with a column", BINARY, type_name, "[33, 65]", "[33, 1]", "[33, 65]")
        yield _comparisons(type_name)
    for type_name in ("int32", "int64", "uint8") if is_quick else INTEGERS:
        yield _binary("arithmetic of integers", ("Add", "Sub", "Mul"), type_name, "[3, 67]", "[67]", "[3, 67]")
    yield from _casts(is_quick)
    yield Case(
        "logic, bool",
        "(bool[5, 33] a, bool[33] b) => (bool[5, 33] And, bool[5, 33] Or, bool[5, 33] Xor, bool[5, 33] Not) "
        "{ And = And(a, b) Or = Or(a, b) Xor = Xor(a, b) Not = Not(a) }",
        "bool",
        by_output=True,
    )


def _unary(name: str, operators: tuple[str, ...], type_name: str, size: int, is_exact: bool) -> Case:
    results = ", ".join(f"{{T}}[{size}] {operator}" for operator in operators)
    nodes = " ".join(f"{operator} = {operator}(x)" for operator in operators)
    text = f"({{T}}[{size}] x) => ({results}) {{ {nodes} }}"
    return Case(f"{name}, {type_name}", text, type_name, is_exact=is_exact, by_output=True)


def _positive(type_name: str) -> Case:
    results = ", ".join(f"{{T}}[300] {operator}" for operator in OF_POSITIVE)
    nodes = " ".join(f"{operator} = {operator}(x)" for operator in OF_POSITIVE)
    text = f"({{T}}[300] x) => ({results}) {{ {nodes} }}"
    name = f"functions of positive numbers, {type_name}"
    return Case(name, text, type_name, ranges={"x": (1, 200)}, is_exact=False, by_output=True)


def _binary(name: str, operators: tuple[str, ...], type_name: str, a: str, b: str, y: str) -> Case:
    results = ", ".join(f"{{T}}{y} {operator}" for operator in operators)
    nodes = " ".join(f"{operator} = {operator}(a, b)" for operator in operators)
    text = f"({{T}}{a} a, {{T}}{b} b) => ({results}) {{ {nodes} }}"
    return Case(f"{name}, {type_name}", text, type_name, by_output=True)


def _comparisons(type_name: str) -> Case:
    operators = ("Less", "Greater", "Equal", "LessOrEqual", "GreaterOrEqual")
    results = ", ".join(f"bool[40, 9] {operator}" for operator in operators)
    nodes = " ".join(f"{operator} = {operator}(a, b)" for operator in operators)
    text = f"({{T}}[40, 9] a, {{T}}[9] b) => ({results}, {{T}}[40, 9] Where) {{ {nodes} Where = Where(Less, a, b) }}"
    return Case(f"comparisons, {type_name}", text, type_name, by_output=True)


def _casts(is_quick: bool) -> Iterator[Case]:
    numbers = {"float": 1, "float16": 10, "bfloat16": 16, "double": 11, "int8": 3, "int32": 6, "int64": 7}
    for source in ("float", "int32") if is_quick else numbers:
        results = ", ".join(f"{name}[67] to_{name}" for name in numbers)
        nodes = " ".join(f"to_{name} = Cast<to = {number}>(x)" for name, number in numbers.items())
        text = f"({source}[67] x) => ({results}) {{ {nodes} }}"
        yield Case(f"casts of {source}", text, source, operators=("Cast",))
