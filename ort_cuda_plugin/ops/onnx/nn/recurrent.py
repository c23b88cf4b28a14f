"""RNN, GRU and LSTM: gates as scalar expressions, one launch for all time steps of a direction or of both directions.

``output_sequence`` of versions before 7 is redundant: the node's outputs show whether Y is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....kernels.rnn.rnn_cell import Cell, Direction, Gates, Sequences
from ....kernels.rnn.rnn_per_sequence import run_cells
from ....program.expressions import scalar as s
from ....program.expressions.scalar import Scalar
from ....program.expressions.symbolic import Dim, hint
from ....program.lowering.context import Lowering, Tensor
from ....program.lowering.multiply import multiply
from ....program.lowering.views import part, permute
from ... import requirements as require
from ...registry import FLOATS, INT32, T1, T, attributes_of, op
from ..math.activation import elu, leaky_relu, softplus
from ..tensor.indexing import select_index

Activation = Callable[[Scalar], Scalar]

_TYPES = {"T": FLOATS, "T1": INT32}

_ACTIVATIONS: dict[str, tuple[Callable[..., Scalar], tuple[float, ...]]] = {
    "relu": (lambda x: s.maximum(x, 0.0), ()),
    "tanh": (s.tanh, ()),
    "sigmoid": (s.sigmoid, ()),
    "softsign": (lambda x: x / (1.0 + s.absolute(x)), ()),
    "softplus": (softplus, ()),
    "leakyrelu": (leaky_relu, (0.01,)),
    "thresholdedrelu": (lambda x, alpha: s.where(x > alpha, x, 0.0), (1.0,)),
    "elu": (elu, (1.0,)),
    "affine": (lambda x, alpha, beta: alpha * x + beta, (1.0, 0.0)),
    "scaledtanh": (lambda x, alpha, beta: alpha * s.tanh(beta * x), (1.0, 1.0)),
    "hardsigmoid": (lambda x, alpha, beta: s.maximum(0.0, s.minimum(1.0, alpha * x + beta)), (0.2, 0.5)),
}
"""Activations ``function(x, alpha, beta)``, with the defaults of the parameters that they have."""


def _activations(
    names: Sequence[str], alphas: Sequence[float] | None, betas: Sequence[float] | None, clips: Sequence[float | None]
) -> list[Activation]:
    """Return the activations by name; each consumes its parameters from the front of ``alphas`` and ``betas``."""
    given = iter(alphas or ()), iter(betas or ())

    def of(name: str, clip: float | None) -> Activation:
        require.supported(name.lower() in _ACTIVATIONS, "attribute", "activations", repr(name), ", ".join(_ACTIVATIONS))
        function, defaults = _ACTIVATIONS[name.lower()]
        parameters = [next(values, default) for values, default in zip(given, defaults, strict=False)]
        if clip is None:
            return lambda x: function(x, *parameters)
        return lambda x: function(s.minimum(s.maximum(x, -clip), clip), *parameters)

    return [of(name, clip) for name, clip in zip(names, clips, strict=True)]


def per_direction(
    defaults: Sequence[str], *, activation_alpha: tuple[float, ...] | None = None,
    activation_beta: tuple[float, ...] | None = None, activations: tuple[str, ...] | None = None,
    clip: float | None = None, direction: str = "forward", hidden_size: int | None = None,
) -> tuple[list[tuple[list[Activation], bool]], bool]:  # fmt: skip
    """Return (activations, runs backward) of each direction, and whether all directions have the same activations.

    ``hidden_size`` is redundant: the weights have it in their shape.
    """
    # "foward": the schema of GRU-1 misspells its default.
    backward = {"forward": [False], "foward": [False], "reverse": [True], "bidirectional": [False, True]}.get(direction)
    if backward is None:
        raise require.violation("direction", "be one of 'forward', 'reverse', 'bidirectional'", repr(direction))
    names = activations or [*defaults] * len(backward)
    size = len(defaults)
    # RNN's default value of ``activations`` has two entries, even for one direction.
    expected = f"have at least {size * len(backward)} entries, {size} for each direction"
    require.that(len(names) >= size * len(backward), "activations", expected, list(names))
    # ONNX Runtime clips the inputs of gates, but not the cell state, the input of LSTM's third activation.
    clips = [clip if number % size < 2 else None for number in range(len(names))]
    functions = _activations(names, activation_alpha, activation_beta, clips)
    half = len(activations or ()) // 2
    uniform = not activation_alpha and not activation_beta and (activations or ())[:half] == (activations or ())[half:]
    return [(functions[at * size : (at + 1) * size], reverse) for at, reverse in enumerate(backward)], uniform


def _run(
    ctx: Lowering, cells: Sequence[tuple[Cell, bool, Sequence[tuple[Scalar, Tensor]]]],
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None, lengths: Tensor | None,
    initial_h: Tensor | None, initial_c: Tensor | None, layout: int, uniform: bool, peepholes: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return Y, Y_h and, for LSTM, Y_c. With ``uniform`` all directions have the same activations."""
    require.rank(3, X=x, W=w, R=r)
    require.one_of((0, 1), layout=layout)
    count, size = len(cells), r.shape[2]
    if layout:
        x = permute(ctx, x, (1, 0, 2))
    steps, batch, depth = x.shape
    rows = cells[0][0].gates * size
    state_shape = (batch, count, size) if layout else (count, batch, size)
    expected: list[tuple[str, Tensor | None, tuple[Dim, ...]]] = [
        ("W", w, (count, rows, depth)),
        ("R", r, (count, rows, size)),
        ("B", b, (count, 2 * rows)),
        ("sequence_lens", lengths, (batch,)),
        ("initial_h", initial_h, state_shape),
        ("initial_c", initial_c, state_shape),
        ("P", peepholes, (count, 3 * size)),
    ]
    for name, tensor, shape in expected:
        require.shape(ctx, shape, **{name: tensor})

    direction_axis = 1 if layout else 0
    y = ctx.empty((batch, steps, count, size) if layout else (steps, count, batch, size), x.dtype)
    last_h = ctx.empty(state_shape, x.dtype)
    last_c = ctx.empty(state_shape, x.dtype) if cells[0][0].has_state else None
    directions = []
    for number, (cell, backward, parameters) in enumerate(cells):

        def own(tensor: Tensor | None, axis: int = 0, number: int = number) -> Tensor | None:
            return None if tensor is None else select_index(ctx, tensor, axis, number)

        outputs = select_index(ctx, y, 2 if layout else 1, number)
        if layout:
            outputs = permute(ctx, outputs, (1, 0, 2))
        weights = permute(ctx, select_index(ctx, w, 0, number), (1, 0))
        bias = own(b)
        given = Sequences(
            inputs=_products(ctx, x, weights),
            weights=permute(ctx, select_index(ctx, r, 0, number), (1, 0)),
            biases=None if bias is None else part(ctx, bias, 0, 0, rows),
            recurrent_biases=None if bias is None else part(ctx, bias, 0, rows, rows),
            lengths=lengths,
            hidden=own(initial_h, direction_axis),
            state=own(initial_c, direction_axis),
        )
        final_c = own(last_c, direction_axis)
        final_h = select_index(ctx, last_h, direction_axis, number)
        directions.append(Direction(cell, given, parameters, outputs, final_h, final_c, backward))
    run_cells(ctx, directions, same_cell=uniform)
    return (y, last_h) if last_c is None else (y, last_h, last_c)


def _products(ctx: Lowering, x: Tensor, weights: Tensor) -> Tensor:
    """Return x [steps, batch, depth] @ weights.

    The result has x's memory order: for a batch-major x (after a Transpose) all steps are one GEMM only in this order.
    The cell kernel reads step-major and batch-major results.
    """
    x = ctx.materialize(x)
    if hint(x.strides[0]) >= hint(x.strides[1]):
        return multiply(ctx, x, weights)
    return permute(ctx, multiply(ctx, permute(ctx, x, (1, 0, 2)), weights), (1, 0, 2))


@op("RNN", since=1, types=_TYPES)
@attributes_of(per_direction)
def rnn(
    ctx: Lowering,
    x: T,
    w: T,
    r: T,
    b: T | None = None,
    sequence_lens: T1 | None = None,
    initial_h: T | None = None,
    *,
    layout: int = 0,
    output_sequence: int = 0,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    def cell(f: Activation) -> Cell:
        return Cell(1, lambda inputs, sums, hidden, state: (f(inputs[0] + sums[0]), None))

    directions, uniform = per_direction(["Tanh"], **attributes)
    cells = [(cell(*functions), backward, ()) for functions, backward in directions]
    return _run(ctx, cells, x, w, r, b, sequence_lens, initial_h, None, layout, uniform)


def _gru_cell(f: Activation, g: Activation, linear_before_reset: int) -> Cell:
    """Return a GRU cell, with gates in the order update, reset, hidden."""

    def reset(inputs: Gates, sums: Gates) -> Scalar:
        return f(inputs[1] + sums[1])

    def update(inputs: Gates, sums: Gates, hidden: Scalar, state: Scalar | None) -> tuple[Scalar, None]:
        z = f(inputs[0] + sums[0])
        product = reset(inputs, sums) * sums[2] if linear_before_reset else sums[2]
        candidate = g(inputs[2] + product)
        return (1.0 - z) * candidate + z * hidden, None

    return Cell(3, update, reset=None if linear_before_reset else reset)


@op("GRU", since=1, types=_TYPES)
@attributes_of(per_direction)
def gru(
    ctx: Lowering,
    x: T,
    w: T,
    r: T,
    b: T | None = None,
    sequence_lens: T1 | None = None,
    initial_h: T | None = None,
    *,
    layout: int = 0,
    linear_before_reset: int = 0,
    output_sequence: int = 0,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    directions, uniform = per_direction(["Sigmoid", "Tanh"], **attributes)
    cells = [(_gru_cell(f, g, linear_before_reset), backward, ()) for (f, g), backward in directions]
    return _run(ctx, cells, x, w, r, b, sequence_lens, initial_h, None, layout, uniform)


def _lstm_cell(f: Activation, g: Activation, h: Activation, peepholes: Sequence[Scalar], input_forget: int) -> Cell:
    """Return an LSTM cell, with gates in the order input, output, forget, cell.

    ``peepholes`` are the peephole weights of the first three gates; empty: the cell has no peepholes.
    """

    def update(inputs: Gates, sums: Gates, hidden: Scalar, state: Scalar | None) -> tuple[Scalar, Scalar]:
        assert state is not None

        def peeped(gate: int, seen: Scalar) -> Scalar:
            value = inputs[gate] + sums[gate]
            return value + peepholes[gate] * seen if peepholes else value

        i = f(peeped(0, state))
        forget = 1.0 - i if input_forget else f(peeped(2, state))
        after = forget * state + i * g(inputs[3] + sums[3])
        return f(peeped(1, after)) * h(after), after

    return Cell(4, update, has_state=True)


@op("LSTM", since=1, types=_TYPES)
@attributes_of(per_direction)
def lstm(
    ctx: Lowering,
    x: T,
    w: T,
    r: T,
    b: T | None = None,
    sequence_lens: T1 | None = None,
    initial_h: T | None = None,
    initial_c: T | None = None,
    p: T | None = None,
    *,
    input_forget: int = 0,
    layout: int = 0,
    output_sequence: int = 0,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    compute, cells = s.accumulation_type(x.dtype), []
    directions, uniform = per_direction(["Sigmoid", "Tanh", "Tanh"], **attributes)
    for number, ((f, g, h), backward) in enumerate(directions):
        parameters: list[tuple[Scalar, Tensor]] = []
        if p is not None:
            row, size = select_index(ctx, p, 0, number), r.shape[2]
            parameters = [(Scalar(compute, "leaf"), part(ctx, row, 0, gate * size, size)) for gate in range(3)]
        cells.append((_lstm_cell(f, g, h, [leaf for leaf, _ in parameters], input_forget), backward, parameters))
    return _run(ctx, cells, x, w, r, b, sequence_lens, initial_h, initial_c, layout, uniform, p)
