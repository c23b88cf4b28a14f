"""Programs that calibrate the performance model of a device: launches, copies, arithmetic and GEMMs.

Each probe is a program without inputs, like the programs of the autotuner, so that the same function measures both.
`gpus.calibration` derives rates from the times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..gpus.calibration import LAUNCHES, OPERATIONS, Sizes, names, product_name
from ..model.ir import DType
from ..program.expressions.scalar import Scalar
from ..program.lowering.context import DeviceProperties, Lowering, LoweringOptions
from ..program.lowering.elementwise import elementwise
from ..program.lowering.multiply import multiply
from ..program.steps.concrete import Concrete
from ..program.steps.schedule import Engine, Schedule
from ..program.steps.steps import Contract
from ..program.steps.tensor import Buffer, BufferKind, Tensor
from .cluster import Variant
from .tuning import program_of

Record = Callable[[Lowering], None]
"""Records the steps of a probe."""


def probes(device: DeviceProperties, sizes: Sizes) -> dict[str, Variant]:
    """Return the programs of all probes that the device can run, by their names."""
    wanted = names(sizes)
    own = replace(device, libraries=frozenset())
    made: dict[str, Variant] = {}
    small = 64
    made[wanted["one"]] = _program(own, lambda ctx: _chain(ctx, small, 1))
    made[wanted["chain"]] = _program(own, lambda ctx: _chain(ctx, small, LAUNCHES))
    made[wanted["dram"]] = _program(own, lambda ctx: _chain(ctx, sizes.memory // 4, 1))
    made[wanted["l2"]] = _program(own, lambda ctx: _chain(ctx, sizes.cache // 4, LAUNCHES))
    made[wanted["issue"]] = _program(own, lambda ctx: _operations(ctx, sizes.elements))
    made[wanted["mma"]] = _program(own, lambda ctx: _product(ctx, ("f16", sizes.mma, sizes.mma, sizes.mma), 1))
    if "cublaslt" in device.libraries:
        for product in sizes.products:
            made[product_name(product)] = _program(device, partial(_product, product=product, launches=LAUNCHES))
    return made


def _program(device: DeviceProperties, record: Record) -> Variant:
    """Return the program with the steps that ``record`` records; each step becomes a launch or a library call."""
    ctx = Lowering(device, LoweringOptions())
    record(ctx)
    steps = list(ctx.trace.steps)
    if "cublaslt" in device.libraries:
        library = Schedule(Engine.LIBRARY)
        steps = [replace(step, schedule=library) if isinstance(step, Contract) else step for step in steps]
    return program_of(ctx, steps)


def _input(dtype: DType, *shape: int) -> Tensor:
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    return Concrete().tensor(Tensor(dtype, shape, Buffer(BufferKind.SCRATCH, nbytes)))


def _chain(ctx: Lowering, elements: int, launches: int) -> None:
    """Record ``launches`` launches over ``elements`` floats; each reads the result of the previous one."""
    x = _input(DType.FLOAT32, elements)
    for _ in range(launches):
        x = elementwise(ctx, lambda element: element * 0.5, x)


def _operations(ctx: Lowering, elements: int) -> None:
    def value(x: Scalar) -> Scalar:
        found = x
        for _ in range(OPERATIONS):
            found = found * x + x
        return found

    elementwise(ctx, value, _input(DType.FLOAT32, elements))


def _product(ctx: Lowering, product: tuple[str, int, int, int], launches: int) -> None:
    kind, m, n, k = product
    dtype = DType.FLOAT16 if kind == "f16" else DType.FLOAT32
    a, b = _input(dtype, m, k), _input(dtype, k, n)
    for _ in range(launches):
        multiply(ctx, a, b)
