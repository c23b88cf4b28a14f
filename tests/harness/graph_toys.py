"""Toy operators in a domain of their own, and a builder of graphs of them, for tests of graph code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.model.ir import Array, AttrValue, Constant, DType, Graph, Node, Value
from ort_cuda_plugin.ops.registry import op
from ort_cuda_plugin.program.expressions.symbolic import Dim, ceildiv, eq, floordiv, product, select
from ort_cuda_plugin.program.lowering.context import Int32, Int64, Lowering, Tensor
from ort_cuda_plugin.program.lowering.host import HostArray, on_host
from ort_cuda_plugin.program.lowering.shapes import broadcast_shapes, broadcast_strides

DOMAIN = "graph.test"


def strided_map(ctx: Lowering, expression: str, *inputs: Tensor) -> Tensor:
    """Lower the elementwise ``expression`` of a and b, over inputs that are broadcast: on the host if possible."""
    shape = broadcast_shapes(ctx, *(x.shape for x in inputs))
    function = eval("lambda a, b=0: " + expression)

    def on_symbols(*arrays: HostArray) -> HostArray:
        return np.asarray(function(*np.broadcast_arrays(*arrays)), dtype=object)

    return on_host(
        ctx, on_symbols, inputs, shape, inputs[0].dtype, lambda: launch_strided_map(ctx, expression, inputs, shape)
    )


def launch_strided_map(ctx: Lowering, expression: str, inputs: Sequence[Tensor], shape: Sequence[Dim]) -> Tensor:
    out = ctx.empty(shape, inputs[0].dtype)
    rank = len(shape)
    letters = "ab"[: len(inputs)]
    parameters = [f"p{x}" for x in letters] + ["out", "n"] + [f"d{i}" for i in range(rank)]
    parameters += [f"{x}{i}" for x in letters for i in range(rank)]
    lines = [f"def kernel({', '.join(parameters)}):", "    i = cuda.grid(1)", "    if i < n:", "        rest = i"]
    lines += [f"        k{x} = 0" for x in letters]
    for axis in reversed(range(rank)):
        lines += [f"        k{x} += rest % d{axis} * {x}{axis}" for x in letters] + [f"        rest = rest // d{axis}"]
    lines += [f"        {x} = p{x}[k{x}]" for x in letters] + [f"        out[i] = {expression}"]
    index = ctx.index_dtype(out.size)
    scalar = Int32 if index == "i32" else Int64
    signature = tuple(f"*{x.dtype.short}" for x in (*inputs, out)) + (index,) * (1 + rank + rank * len(inputs))
    spec = KernelSpec("strided_map", signature, source="\n".join(lines) + "\n", launch_bounds=4)
    strides = [stride for x in inputs for stride in broadcast_strides(x, shape)]
    numbers: list[Int32 | Int64] = [scalar(number) for number in (out.size, *shape, *strides)]
    ctx.launch(spec, (ceildiv(out.size, 4), 1, 1), (4, 1, 1), [*inputs, out, *numbers], writes=[out])
    return out


@op("Add", domain=DOMAIN)
def add(ctx: Lowering, a: Tensor, b: Tensor) -> Tensor:
    return strided_map(ctx, "a + b", a, b)


@op("Mul", domain=DOMAIN)
def mul(ctx: Lowering, a: Tensor, b: Tensor) -> Tensor:
    return strided_map(ctx, "a * b", a, b)


@op("Transpose", domain=DOMAIN)
def transpose(ctx: Lowering, x: Tensor) -> Tensor:
    return ctx.view(x, x.shape[::-1], x.strides[::-1], x.offset)


@op("Shape", domain=DOMAIN)
def shape_of(ctx: Lowering, x: Tensor) -> Tensor:
    return ctx.host_tensor(x.shape, (x.rank,), DType.INT64)


@op("Row", domain=DOMAIN)
def row(ctx: Lowering, x: Tensor, *, index: int) -> Tensor:
    return ctx.view(x, x.shape[1:], x.strides[1:], x.offset + index * x.strides[0])


@op("Reshape", domain=DOMAIN)
def reshape(ctx: Lowering, x: Tensor, shape: Tensor) -> Tensor:
    dims = ctx.host_values(shape, "shape")
    known = product(dims)  # negative if one dimension is -1
    dims = tuple(select(eq(dim, -1), floordiv(x.size, -1 * known), dim) for dim in dims)
    ctx.require(eq(product(dims), x.size), "the number of elements changes")
    x = ctx.contiguous(x)
    return ctx.view(x, dims, None, x.offset)


@op("Zeros", domain=DOMAIN)
def zeros(ctx: Lowering, x: Tensor) -> Tensor:
    out = ctx.empty(x.shape, x.dtype)
    ctx.memset(out, 0)
    return out


@op("Negative", domain=DOMAIN)
def negative(ctx: Lowering, x: Tensor) -> Tensor:
    """Return -x, always computed on the device: a shape that depends on it needs a read-back."""
    return launch_strided_map(ctx, "-a", [x], x.shape)


@op("Pick", domain=DOMAIN)
def pick(ctx: Lowering, x: Tensor) -> Tensor:
    """Return x + 1 for one row, x * 2 for more. A guard decides, so each needs a plan variant."""
    few = ctx.guard(eq(x.shape[0], 1))
    return strided_map(ctx, "a + a * 0 + 1" if few else "a * 2", x)


class Builder:
    """Builds a graph of toy operators."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inputs: list[Value] = []

    def input(self, name: str, *shape: int | str | None, dtype: DType = DType.FLOAT32) -> Value:
        self.inputs.append(Value(name, dtype, shape))
        return self.inputs[-1]

    @staticmethod
    def constant(array: Array) -> Value:
        dtype = DType.from_numpy(array.dtype)
        return Value("constant", dtype, array.shape, Constant(dtype, array.shape, lambda: array))

    def node(self, op_type: str, *inputs: Value, dtype: DType = DType.FLOAT32, **attributes: AttrValue) -> Value:
        output = Value(f"v{len(self.nodes)}", dtype, None)
        self.nodes.append(
            Node(f"{op_type}_{len(self.nodes)}", op_type, DOMAIN, 1, inputs, (output,), attributes, len(self.nodes))
        )
        return output

    def graph(self, *outputs: Value) -> Graph:
        return Graph("toy", self.nodes, self.inputs, list(outputs))
