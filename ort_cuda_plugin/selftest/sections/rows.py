"""Checks of reductions and normalizations: element types, lengths around a block, axes."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Case

EXACT = ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL1")
ROUNDED = ("ReduceMean", "ReduceL2", "ReduceLogSumExp", "ReduceProd", "ReduceLogSum")
LENGTHS = (1, 31, 255, 1025, 4099)
"""Row lengths: 1, and just below and above a warp, a block and several blocks."""
LONG = 70001
"""A row length for which several blocks reduce one row."""
TYPES = ("float", "float16", "bfloat16", "double")


def cases(is_quick: bool) -> Iterator[Case]:
    """Yield the cases of reductions and normalizations."""
    for type_name in ("float", "float16") if is_quick else TYPES:
        for length in (31, 1025) if is_quick else LENGTHS:
            yield from _reductions(type_name, (5, length), 1)
            yield from _normalizations(type_name, length)
        yield from _reductions(type_name, (3, 67, 20), 1)
        yield from _reductions(type_name, (2, LONG), 1)
        yield from _images(type_name)
    for type_name in ("int32", "int64"):
        shape = (4, 301)
        outputs = ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
        yield _reduce(f"reductions of integers, {type_name}", outputs, type_name, shape, 1, True)


def _reductions(type_name: str, shape: tuple[int, ...], axis: int) -> Iterator[Case]:
    sizes = "x".join(map(str, shape))
    exact = (*EXACT, "ArgMax", "ArgMin") if shape[-1] <= 500 else ("ReduceMax", "ReduceMin", "ArgMax", "ArgMin")
    yield _reduce(f"reductions of {sizes}, {type_name}", exact, type_name, shape, axis, True)
    rounded = tuple(name for name in ROUNDED if name not in ("ReduceProd", "ReduceLogSum"))
    yield _reduce(f"means and norms of {sizes}, {type_name}", rounded, type_name, shape, axis, False)


def _reduce(
    name: str, operators: tuple[str, ...], type_name: str, shape: tuple[int, ...], axis: int, is_exact: bool
) -> Case:
    left = [dim for position, dim in enumerate(shape) if position != axis]
    results, nodes = [], [f"axes = Constant<value_ints = [{axis}]>()"]
    for operator in operators:
        is_index = operator.startswith("Arg")
        results.append(f"{'int64' if is_index else '{T}'}{left} {operator}")
        arguments = f"<axis = {axis}, keepdims = 0>(x)" if is_index else "<keepdims = 0>(x, axes)"
        nodes.append(f"{operator} = {operator}{arguments}")
    text = f"({{T}}{list(shape)} x) => ({', '.join(results)}) {{ {' '.join(nodes)} }}"
    return Case(name, text, type_name, is_exact=is_exact, by_output=True)


def _normalizations(type_name: str, length: int) -> Iterator[Case]:
    shape = f"{{T}}[6, {length}]"
    nodes = {
        "Softmax": "Softmax<axis = -1>(x)",
        "LogSoftmax": "LogSoftmax<axis = -1>(x)",
        "LayerNormalization": "LayerNormalization<axis = -1>(x, scale, bias)",
        "RMSNormalization": "RMSNormalization<axis = -1>(x, scale)",
        "LpNormalization": "LpNormalization<axis = -1>(x)",
    }
    if type_name == "double":  # the CPU provider has no RMSNormalization kernel for double
        del nodes["RMSNormalization"]
    yield Case(
        f"normalizations of {length}, {type_name}",
        f"({shape} x, {{T}}[{length}] scale, {{T}}[{length}] bias) => "
        f"({', '.join(f'{shape} {name}' for name in nodes)}) "
        f"{{ {' '.join(f'{name} = {node}' for name, node in nodes.items())} }}",
        type_name,
        is_exact=False,
        by_output=True,
    )


def _images(type_name: str) -> Iterator[Case]:
    shape = "{T}[2, 12, 9, 7]"
    nodes = {
        "InstanceNormalization": "InstanceNormalization(x, scale, bias)",
        "GroupNormalization": "GroupNormalization<num_groups = 3>(x, scale, bias)",
        "BatchNormalization": "BatchNormalization(x, scale, bias, bias, positive)",
        "LRN": "LRN<size = 5>(x)",
    }
    yield Case(
        f"normalizations of images, {type_name}",
        f"({shape} x, {{T}}[12] scale, {{T}}[12] bias) => ({', '.join(f'{shape} {name}' for name in nodes)}) "
        f"{{ square = Mul(scale, scale) one = Constant<value_float = 1.0>() unit = CastLike(one, scale) "
        f"positive = Add(square, unit) {' '.join(f'{name} = {node}' for name, node in nodes.items())} }}",
        type_name,
        is_exact=False,
        by_output=True,
    )
