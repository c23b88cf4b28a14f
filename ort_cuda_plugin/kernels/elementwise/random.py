"""Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011) as a scalar expression.

The bits of an element are a function of the seed, the number of the Run and the element's index. They depend neither on
the kernel nor on its grid, and no two elements of a node share bits, in one Run or in several.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...model.ir import Array, DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.lowering.context import Lowering
from ..codegen.plain_function import plain_kernel
from .index_map import IndexMap

if TYPE_CHECKING:
    from numba import uint64

    from ...compiler.intrinsics import Pointer, atomic_add_u64

Bits = tuple[Scalar, Scalar, Scalar, Scalar]
"""128 random bits as four uint32 Scalars."""

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


@plain_kernel
def _begin(run: Pointer[int], state: Pointer[int]) -> None:
    run[0] = state[0]
    run[1] = atomic_add_u64(state, 1, uint64(1))


def philox_4x32(counter: Sequence[Scalar], key: Sequence[Scalar]) -> Bits:
    """Return Philox4x32-10 of a counter of four uint32 and a key of two uint32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        if number:
            k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
        a, b = (s.cast(c, DType.UINT64) * m for c, m in zip((c0, c2), _MULTIPLIERS, strict=True))
        c0, c1, c2, c3 = _high(b) ^ c1 ^ k0, _low(b), _high(a) ^ c3 ^ k1, _low(a)
    return c0, c1, c2, c3


def _low(x: Scalar) -> Scalar:
    return s.cast(x, DType.UINT32)


def _high(x: Scalar) -> Scalar:
    return s.cast(x >> 32, DType.UINT32)


class RandomRun:
    """Random bits of the node being lowered, different in every Run.

    A separate launch counts the Runs on the device, so that concurrent Runs, and replays of a CUDA graph, get different
    bits. Nodes with equal ``seed`` get equal bits in the first Runs of their sessions, in the second ones, and so on,
    as in ONNX Runtime. For a node without ``seed`` each session draws a seed; a plugin cannot read the seed of
    ``onnxruntime.set_seed``.
    """

    def __init__(self, ctx: Lowering, seed: float | None) -> None:
        """Record the launch that counts the Run. ``seed`` is the node's attribute, None if the node has none."""

        def initial() -> Array:
            # The key is a hash of the seed, so that similar seeds give unrelated keys.
            known = None if seed is None else hashlib.blake2b(repr(seed).encode(), digest_size=8).digest()
            key = secrets.token_bytes(8) if known is None else known
            return np.array([int.from_bytes(key, "little"), 0], np.uint64)

        state, run = ctx.state(initial), ctx.empty((2,), DType.UINT64)
        _begin.launch(ctx, "begin_random_run", 1, 1, run=run, state=state)
        self._key, self._number = (ctx.view(run, (), (), offset) for offset in range(2))

    def bits(self, maps: IndexMap, element: Scalar) -> Bits:
        """Return the random bits of the element at index ``element`` (int64) of the node's result."""
        key, number = maps.number(self._key), maps.number(self._number)
        element = s.cast(element, DType.UINT64)
        return philox_4x32((_low(element), _high(element), _low(number), _high(number)), (_low(key), _high(key)))


def uniform(bits: Bits, dtype: DType) -> Scalar:
    """Return a number in [0, 1): float32 with 24 random bits, or float64 with 53."""
    if dtype is DType.FLOAT64:
        return s.cast(_wide(bits[0], bits[1]) >> 11, dtype) * 2.0**-53
    return s.cast(bits[0] >> 8, dtype) * 2.0**-24


def normal(bits: Bits, dtype: DType) -> Scalar:
    """Return a standard normal float32 or float64, by the Box-Muller transform."""
    if dtype is DType.FLOAT64:
        radius = s.cast(_wide(bits[0], bits[1]) >> 11, dtype) * 2.0**-53 + 2.0**-54
        turn = s.cast(_wide(bits[2], bits[3]) >> 11, dtype) * 2.0**-53
    else:
        # Use all 32 bits for the radius: the smallest logarithm's argument limits the tails of the distribution.
        radius = s.cast(bits[0], dtype) * 2.0**-32 + 2.0**-33
        turn = s.cast(bits[1] >> 8, dtype) * 2.0**-24
    return s.sqrt(-2.0 * s.log(radius)) * s.cos(turn * (2 * math.pi))


def _wide(high: Scalar, low: Scalar) -> Scalar:
    return (s.cast(high, DType.UINT64) << 32) | s.cast(low, DType.UINT64)
