"""Reference interpreter of plans in plain Python: runs kernels from their source text, with NumPy arrays as memory.

It is slow and simple on purpose, because it defines the meaning of a plan.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.plan.format import Param, ParamKind, Plan, RecordKind, Ref, RefKind
from ort_cuda_plugin.program.expressions.operations import ExprOp
from ort_cuda_plugin.program.expressions.symbolic import Atom, Dim, evaluators


class PlanMismatch(Exception):
    """A guard of the plan does not hold."""


class RunError(Exception):
    """An assertion of the plan failed."""


def evaluate(dim: Dim, values: Mapping[int, int]) -> int:
    """Return the value of ``dim`` if symbol number n has the value ``values[n]``; a reference for the C evaluator.

    Raises KeyError for a symbol without a value, and ZeroDivisionError.
    """
    if isinstance(dim, int):
        return dim
    total = dim.const
    for monomial, coefficient in dim.terms:
        for atom in monomial:
            coefficient *= _evaluate_atom(atom, values)
        total += coefficient
    return total


def _evaluate_atom(atom: Atom, values: Mapping[int, int]) -> int:
    if atom.op is None:
        number = atom.args[0]
        assert isinstance(number, int)
        return values[number]
    return evaluators[atom.op](*(evaluate(arg, values) for arg in atom.args))


def evaluate_registers(plan: Plan, registers: dict[int, int], segment: int = 0) -> None:
    """Evaluate the expressions of a segment, and add their results to ``registers``."""
    for expr in plan.exprs:
        if expr.segment != segment:
            continue
        assert expr.dst not in registers
        operands = [registers[r] for r in (expr.a, expr.b, expr.c)[: OPERANDS.get(expr.op, 2)]]
        assert max((expr.a, expr.b, expr.c)[: len(operands)], default=-1) < expr.dst
        registers[expr.dst] = expr.imm if expr.op is ExprOp.CONST else evaluators[expr.op](*operands)


OPERANDS = {ExprOp.CONST: 0, ExprOp.SELECT: 3}


class _Coordinates:
    def __init__(self, x: int, y: int, z: int) -> None:
        self.x, self.y, self.z = x, y, z


class _Cuda:
    """A replacement for ``numba.cuda`` in simple kernels, for one thread."""

    def __init__(self, block: tuple[int, ...], dims: tuple[int, ...], thread: tuple[int, ...]) -> None:
        self.blockIdx, self.blockDim = _Coordinates(*block), _Coordinates(*dims)
        self.threadIdx = _Coordinates(*thread)

    def grid(self, dimensions: int) -> int:
        assert dimensions == 1
        return self.blockIdx.x * self.blockDim.x + self.threadIdx.x


def run_plan(
    plan: Plan,
    kernels: Sequence[KernelSpec],
    weights: Sequence[np.ndarray],
    inputs: Sequence[np.ndarray],
    host_inputs: Sequence[int] = (),
) -> list[np.ndarray]:
    """Run a plan with the cluster's kernels and weights; return its outputs. Raises PlanMismatch or RunError."""
    known = [dim for array in inputs for dim in array.shape]
    for index in host_inputs:
        assert plan.inputs[index].host_register == len(known)
        known.extend(int(x) for x in inputs[index].reshape(-1))
    for array, declared in zip(inputs, plan.inputs, strict=True):
        assert array.ndim == declared.rank
    registers = dict(enumerate(known))
    outputs: dict[int, np.ndarray] = {}
    scratch: dict[int, np.ndarray] = {}
    memory: dict[RefKind, Any] = {
        RefKind.INPUT: [_bytes(array) for array in inputs],
        RefKind.OUTPUT: {},
        RefKind.WEIGHT: [_bytes(np.ascontiguousarray(weights[index])) for index in plan.weights],
        RefKind.BUFFER: scratch,
    }
    for segment in range(plan.num_segments):
        for read in plan.readbacks:
            if read.segment == segment:
                start = 0 if read.byte_offset_register is None else registers[read.byte_offset_register]
                dtype = DType(read.dtype).numpy
                elements = memory[read.ref.kind][read.ref.index][start : start + read.count * dtype.itemsize].view(
                    dtype
                )
                registers.update({read.dst + i: int(x) for i, x in enumerate(elements)})
        evaluate_registers(plan, registers, segment)
        if segment == 0 and not all(registers[guard] for guard in plan.guards):
            raise PlanMismatch
        for check in plan.asserts:
            if check.segment == segment and not registers[check.register]:
                raise RunError(f"{plan.nodes[check.node]}: {check.message}")
        for index, output in enumerate(plan.outputs):
            if output.segment == segment:
                outputs[index] = np.full([registers[dim] for dim in output.dims], 77, DType(output.dtype).numpy)
                memory[RefKind.OUTPUT][index] = _bytes(outputs[index])
        for index, buffer in enumerate(plan.buffers):
            if buffer.segment == segment:
                scratch[index] = np.full(registers[buffer.size_register], 0xCD, np.uint8)
        _run_segment(plan, segment, kernels, registers, memory)
    assert len(registers) == plan.num_registers
    return [outputs[index] for index in range(len(plan.outputs))]


def _run_segment(
    plan: Plan,
    segment: int,
    kernels: Sequence[KernelSpec],
    registers: Mapping[int, int],
    memory: Mapping[RefKind, Any],
) -> None:
    for position, record in enumerate(plan.records):
        if record.segment != segment:
            continue
        for param in record.params:
            if param.ref is not None and param.ref.kind is RefKind.BUFFER:
                lifetime = plan.buffers[param.ref.index]
                assert lifetime.first_record <= position <= lifetime.last_record

        def address(param: Param) -> np.ndarray:
            assert isinstance(param.ref, Ref)
            start = param.imm + (0 if param.register is None else registers[param.register])
            tensor: np.ndarray = memory[param.ref.kind][param.ref.index]
            return tensor[start:]

        def number(param: Param) -> int:
            return param.imm if param.register is None else registers[param.register]

        if record.kind is RecordKind.COPY:
            destination, source, count = record.params
            address(destination)[: number(count)] = address(source)[: number(count)]
        elif record.kind is RecordKind.MEMSET:
            destination, byte, count = record.params
            address(destination)[: number(count)] = number(byte)
        else:
            assert record.kind is RecordKind.LAUNCH
            spec = kernels[plan.kernels[record.index]]
            args: list[Any] = []
            for kind, param in zip(spec.signature, record.params, strict=True):
                if param.kind is ParamKind.POINTER:
                    dtype = next(d for d in DType if d.short == kind[1:]).numpy
                    view = address(param)
                    args.append(view[: len(view) // dtype.itemsize * dtype.itemsize].view(dtype))
                elif param.kind is ParamKind.F32:
                    args.append(struct.unpack("<f", struct.pack("<I", param.imm))[0])
                else:
                    args.append(number(param))
            _launch(spec, [registers[r] for r in record.grid], record.block, args)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _launch(spec: KernelSpec, grid: Sequence[int], block: tuple[int, int, int], args: Sequence[Any]) -> None:
    code = compile(spec.source, spec.name, "exec")
    for place in itertools.product(*(range(dim) for dim in grid)):
        for thread in itertools.product(*(range(dim) for dim in block)):
            names: dict[str, Any] = {"cuda": _Cuda(place, block, thread), "math": math}
            exec(code, names)
            names["kernel"](*args)
