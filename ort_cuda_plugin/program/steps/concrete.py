"""Copies of steps with the sizes of one Run as constants, as separate programs that the autotuner times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from ...model.ir import Constant, DType
from ..expressions.symbolic import Dim, hint
from .steps import Attend, Convolve, Map
from .tensor import Buffer, BufferKind, Tensor

_FILLING = 0x3C
"""Fill byte of float tensors. A float of any width with only this byte is positive and below 2, so no sum overflows."""


class Concrete:
    """Copies steps. The copies have constant sizes, and share no memory with the originals except constants.

    `own_memory` gives the copies STATE memory with arbitrary contents, so that a program of copies needs no inputs.
    """

    def __init__(self) -> None:
        self._buffers: dict[Buffer, Buffer] = {}
        self._floats: set[Buffer] = set()

    def step(self, step: Map) -> Map:
        """Return a copy of the step, with the sizes that the plan is built for."""
        return _sized(step.map_tensors(self.tensor))

    def tensor(self, x: Tensor) -> Tensor:
        """Return a copy of the tensor, with the sizes that the plan is built for."""
        return Tensor(x.dtype, _hints(x.shape), self._buffer(x), strides=_hints(x.strides), offset=hint(x.offset))

    def own_memory(self, intermediates: bool = True) -> None:
        """Turn the memory of the copies into STATE memory.

        Without ``intermediates`` SCRATCH memory stays what it is, as in a whole program. Passes must have run before:
        they distinguish inputs, intermediates and results by the kind of their memory.
        """
        for buffer in self._buffers.values():
            if buffer.kind is BufferKind.HOST or (buffer.kind is BufferKind.SCRATCH and not intermediates):
                continue
            nbytes = hint(buffer.nbytes)
            fill = partial(np.full, nbytes, _FILLING if buffer in self._floats else 0, np.uint8)
            buffer.state = Constant(DType.UINT8, (nbytes,), fill, is_initializer=False, is_state=True)
            buffer.kind = BufferKind.STATE

    def _buffer(self, x: Tensor) -> Buffer:
        buffer = x.buffer
        if buffer.kind is BufferKind.WEIGHT and buffer.data is not None:
            return buffer
        if buffer not in self._buffers:
            host = None if buffer.host is None else _hints(buffer.host)
            kind = buffer.kind if host is None else BufferKind.HOST
            new = self._buffers[buffer] = Buffer(kind, hint(buffer.nbytes), index=buffer.index, host=host)
            if x.dtype.is_float:
                self._floats.add(new)
        return self._buffers[buffer]


def _sized(step: Map) -> Map:
    """Return the step with constant sizes in fields other than tensors."""
    changed = replace(step, shape=_hints(step.shape))
    if isinstance(changed, Attend):
        return replace(changed, parts=tuple(map(_sized, changed.parts)))
    if isinstance(changed, Convolve):
        w = changed.windows
        sizes = {name: _hints(getattr(w, name)) for name in ("size", "kernel", "begin", "end")}
        return replace(changed, windows=replace(w, **sizes))
    return changed


def _hints(dims: Iterable[Dim]) -> tuple[int, ...]:
    return tuple(map(hint, dims))
