"""Executes calls of vendor libraries in NumPy, by the contract in csrc_shim/vendor/problem.h."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ort_cuda_plugin.program.steps.libraries import CONV, MATMUL, LibraryProblem, ProblemFlags
from programs.convolutions import convolution
from programs.values import Array


@dataclass(frozen=True)
class Memory:
    """A pointer argument: the elements of a buffer, and the pointer's ``offset`` in elements."""

    flat: Array
    offset: int

    def seen(self, shape: Sequence[int], strides: Sequence[int]) -> Array:
        """Return a strided view of the float64 elements. Raises IndexError if it exceeds the buffer."""
        if 0 in shape:
            return np.empty(shape)
        last = self.offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if last >= self.flat.size:
            raise IndexError(f"a library call reads element {last} of {self.flat.size}")
        return np.lib.stride_tricks.as_strided(
            self.flat[self.offset :], shape, [stride * self.flat.itemsize for stride in strides]
        )


def call(problem: LibraryProblem, pointers: Sequence[Memory], values: Sequence[int]) -> Array:
    """Execute a call; return the new contents of the buffer of the first pointer, the output."""
    out = Memory(pointers[0].flat.copy(), pointers[0].offset)
    arguments = list(pointers[1:-1])  # the last pointer is the workspace
    numbers = list(values[:-1])
    kinds = {MATMUL: _product, CONV: _convolution}
    kinds.get(problem.kind, _attention)(problem, out, arguments, numbers)
    return out.flat


def _dense(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _activated(problem: LibraryProblem, x: Array) -> Array:
    flags = problem.flags
    if flags & ProblemFlags.RELU:
        return np.asarray(np.maximum(x, 0))
    if flags & ProblemFlags.RELU6:
        return np.asarray(np.clip(x, 0, 6))
    if flags & ProblemFlags.SWISH:
        return np.asarray(x / (1 + np.exp(-x)))
    if flags & ProblemFlags.GELU:
        return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
    return x


def _product(problem: LibraryProblem, out: Memory, arguments: list[Memory], numbers: list[int]) -> None:
    m, n, k, lead_a, lead_b, lead_out, batches, batch_a, batch_b, batch_out = numbers
    flags = problem.flags
    along_a = (1, lead_a) if flags & ProblemFlags.A_TRANSPOSED else (lead_a, 1)
    along_b = (1, lead_b) if flags & ProblemFlags.B_TRANSPOSED else (lead_b, 1)
    a = arguments.pop(0).seen((batches, m, k), (batch_a, *along_a))
    b = arguments.pop(0).seen((batches, k, n), (batch_b, *along_b))
    sums = problem.alpha * np.matmul(a, b)
    bias = arguments.pop(0).seen((n,), (1,)) if flags & ProblemFlags.BIAS else 0.0
    if flags & ProblemFlags.RESIDUAL:
        sums = sums + problem.beta * arguments.pop(0).seen((batches, m, n), (m * n, n, 1))
    out.seen((batches, m, n), (batch_out, lead_out, 1))[...] = _activated(problem, sums + bias)


def _convolution(problem: LibraryProblem, out: Memory, arguments: list[Memory], numbers: list[int]) -> None:
    images, channels, rows, groups, apart, *rest = numbers
    per_axis = np.array(rest, np.int64).reshape(problem.rank, 7).T.tolist()
    size, kernel, places, steps, dilations, begin, _ = per_axis
    flags, last = problem.flags, bool(problem.flags & ProblemFlags.CHANNELS_LAST)

    def strides(shape: Sequence[int]) -> list[int]:
        if not last:
            return _dense(shape)
        moved = _dense([shape[0], *shape[2:], shape[1]])
        return [moved[0], 1, *moved[1:-1]]

    def seen(memory: Memory, *shape: int) -> Array:
        return memory.seen(shape, strides(shape))

    x = seen(arguments.pop(0), images, channels, *size)
    w = seen(arguments.pop(0), rows, channels // groups, *kernel)
    sums = convolution(x, w, groups, places, kernel, steps, dilations, begin, begin)
    if flags & ProblemFlags.BIAS:
        sums = sums + arguments.pop(0).seen((rows,), (1,)).reshape(rows, *[1] * problem.rank)
    shape = (images, rows, *places)
    if flags & ProblemFlags.RESIDUAL:
        sums = sums + problem.beta * seen(arguments.pop(0), *shape)
    own_strides = strides(shape)
    if last:
        inner = _dense(places)
        own_strides = [apart * math.prod(places), 1, *(stride * apart for stride in inner)]
    else:
        own_strides[0] = apart
    out.seen(shape, own_strides)[...] = _activated(problem, problem.alpha * sums)


def _attention(problem: LibraryProblem, out: Memory, arguments: list[Memory], numbers: list[int]) -> None:
    batches, heads, m, n, width, value_width, *strides = numbers
    q = arguments.pop(0).seen((batches, heads, m, width), (*strides[0:3], 1))
    k = arguments.pop(0).seen((batches, heads, n, width), (*strides[3:6], 1))
    v = arguments.pop(0).seen((batches, heads, n, value_width), (*strides[6:9], 1))
    scores = problem.alpha * np.matmul(q, k.swapaxes(-1, -2))
    if problem.flags & ProblemFlags.BIAS:
        scores = scores + arguments.pop(0).seen((batches, heads, m, n), strides[12:16])
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    result = np.matmul(powers / powers.sum(-1, keepdims=True), v)
    out.seen((batches, heads, m, value_width), (*strides[9:12], 1))[...] = result
