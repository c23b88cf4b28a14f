"""GEMM without tensor cores (SIMT): a tiled kernel, and `Product`, the base of all GEMM and GEMV kernels.

These kernels compute a[batch] @ b[batch] and apply an epilogue to each accumulator; `dispatch` adds their parameters.
The epilogue's coordinates are ``batch``, ``row`` and ``column``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...model.ir import DType
from ..codegen.block_mapping import batch_offsets, steps_of, tile_of_block
from ..codegen.epilogue import Epilogue
from ..codegen.fragment import Fragment, join
from ..codegen.simt_fragments import (
    Element,
    Operand,
    Tile,
    declare,
    pipeline_of,
    store_tile,
)
from ..codegen.source import register_type, text_property
from ..contraction.prologue import conversion_setup, type_names
from .low_rank import LowRankForm, low_rank_pipeline

# All tiles have 64 columns, so that only the number of rows decides which tile has the least padding.
TALL = Tile(128, 64, gap=4)
SQUARE = Tile(64, 64, gap=4)
FLAT = Tile(32, 64, thread_m=4, gap=4)
LONG = Tile(32, 64, thread_m=4, gap=2)
"""Tile for 8-byte elements: a larger one would need too many registers and too much shared memory."""


@dataclass(frozen=True)
class Product:
    """A GEMM or GEMV kernel.

    ``elements`` load the elements of a and b. ``a_contiguous`` ("m", "k" or "") and ``b_contiguous`` ("n", "k" or "")
    name the operands' axes of stride 1. The batch has ``batch_rank`` dimensions; a broadcast operand has batch strides
    of 0. ``index`` is the type of offsets in a matrix. ``low_rank`` describes a second product that the kernel adds,
    None without one; a kernel with a second product has no batches.
    """

    elements: tuple[Element, Element]
    epilogue: Epilogue
    a_contiguous: str = "k"
    b_contiguous: str = "n"
    batch_rank: int = 1
    index: DType = DType.INT32
    low_rank: LowRankForm | None = field(default=None, kw_only=True)

    @property
    def strides(self) -> tuple[str, ...]:
        """Names of the strides that are kernel parameters: a_m, a_k, b_k and b_n without those that are 1."""
        known = (f"a_{self.a_contiguous}", f"b_{self.b_contiguous}")
        return tuple(name for name in ("a_m", "a_k", "b_k", "b_n") if name not in known)

    @property
    def element(self) -> Element:
        """Loader of a, whose type determines that of the accumulators."""
        return self.elements[0]

    @property
    def types(self) -> str:
        """Operand types as the end of the kernel's name."""
        return type_names(*self.elements) + ("" if self.low_rank is None else "_low_rank")

    @property
    def index_type(self) -> str:
        return register_type(self.index)

    @property
    def resident(self) -> int:
        """Blocks that should fit on a multiprocessor at a time, for the compiler's register limit; 0 for any number."""
        return 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory per block."""
        return 0

    @property
    def name(self) -> str:
        raise NotImplementedError

    @text_property
    def body(self) -> str:
        raise NotImplementedError

    def stride(self, name: str) -> str:
        return name if name in self.strides else "1"

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """Operands of a tiled kernel, whose batches begin at offsets ``a_base`` and ``b_base``."""
        a = ("a", "a", "row0", "m", "k_end", self.stride("a_m"), self.stride("a_k"), self.a_contiguous != "m")
        b = ("b", "b", "column0", "n", "k_end", self.stride("b_n"), self.stride("b_k"), self.b_contiguous == "k")
        return Operand(*a), Operand(*b)

    def tile_fragments(self, tile: Tile, a: Operand, b: Operand) -> list[Fragment]:
        """Return the fragments that compute the block's tile without tensor cores: accumulators, pipeline, epilogue."""
        accumulator = self.element.accumulator
        return [
            declare(tile, accumulator),
            pipeline_of(tile, accumulator, (a, b), self.elements, self.index_type),
            store_tile(tile, a.bound, b.bound, self.element, self.epilogue),
        ]


@dataclass(frozen=True)
class TiledProduct(Product):
    """SIMT GEMM kernel, one block per tile. The grid is (ceil(m/tile.m) * ceil(n/tile.n) * batches, 1, 1)."""

    tile: Tile = SQUARE

    @property
    def name(self) -> str:
        return f"matmul_{self.tile.name}_{self.types}"

    @text_property
    def body(self) -> str:
        tile = self.tile
        a, b = self.operands
        start = [steps_of(tile.k), batch_offsets("ab", "base", self.batch_rank)]
        fragments = self.tile_fragments(tile, a, b)
        if self.low_rank is None:
            fragments = [*start, *fragments]
        else:
            of_low_rank = low_rank_pipeline(self.low_rank, tile, self.element.accumulator)
            fragments = [fragments[0], *of_low_rank, *start, *fragments[1:]]
        return join([conversion_setup(*self.elements), tile_of_block(tile.m, tile.n), *fragments])
