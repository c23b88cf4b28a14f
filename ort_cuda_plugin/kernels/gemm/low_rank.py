"""Low-rank products in GEMM kernels: a second product whose terms the kernel adds to its accumulators (LoRA).

The kernel reads a [m, rank] and b [rank, n] beside its own operands, so that the result of the second product is never
stored. A tiled kernel computes the second product first: it can then scale the accumulators before the first product
adds to them. A GEMV kernel adds the second product last. The rank is a kernel parameter, and may be 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...model.ir import DType
from ...program.steps.steps import LowRank
from ..codegen.fragment import Fragment
from ..codegen.simt_fragments import Element, Operand, Tile, log2, pipeline_of
from ..codegen.source import Parameters, load_text, register_type


@dataclass(frozen=True)
class LowRankForm:
    """The properties of a low-rank product on which the source of a kernel depends.

    ``storage`` is the operands' type. ``a_contiguous`` ("m", "k" or "") and ``b_contiguous`` ("n", "k" or "") name
    the operands' axes of stride 1. ``scale`` is the type of the scale in memory, None without a scale. ``index`` is the
    type of offsets in an operand.
    """

    storage: str
    a_contiguous: str
    b_contiguous: str
    scale: DType | None
    index: DType

    @property
    def index_type(self) -> str:
        return register_type(self.index)

    @property
    def scale_value(self) -> str:
        """Return the source of the scale in the type of the accumulators; "" without a scale."""
        if self.scale is None:
            return ""
        return f"{Element(self.storage).accumulator}({load_text('low_scale', '0', self.scale)})"

    def stride(self, name: str) -> str:
        """Return the source of stride ``name``: "a_m", "a_k", "b_k" or "b_n"."""
        return "1" if name in (f"a_{self.a_contiguous}", f"b_{self.b_contiguous}") else f"low_{name}"

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """Return the operands for fragments of tiled kernels. They begin at offsets ``a_base`` and ``b_base``."""
        a = ("a", "low_a", "row0", "m", "rank", self.stride("a_m"), self.stride("a_k"), self.a_contiguous != "m")
        b = ("b", "low_b", "column0", "n", "rank", self.stride("b_n"), self.stride("b_k"), self.b_contiguous == "k")
        return Operand(*a), Operand(*b)

    def added(self, total: str, row: str, column: str) -> list[str]:
        """Return lines that add the product's element (``row``, ``column``) to variable ``total``."""
        element, index = Element(self.storage), self.index_type
        x = f"int64({index}({row} * {self.stride('a_m')})) + int64({index}(low_k * {self.stride('a_k')}))"
        y = f"int64({index}({column} * {self.stride('b_n')})) + int64({index}(low_k * {self.stride('b_k')}))"
        term = f"{element.load('low_a', x)} * {element.load('low_b', y)}"
        return [
            f"low_total = {element.accumulator}(0)",
            "for low_k in range(rank):",
            f"    low_total = low_total + {term}",
            f"{total} = {total} + low_total{f' * {self.scale_value}' if self.scale else ''}",
        ]


@dataclass(frozen=True)
class ScaledElement(Element):
    """Loader of an element that multiplies it by source ``scale``."""

    scale: str = ""

    def load(self, pointer: str, index: str, outer: str = "", inner: str = "") -> str:
        return f"({super().load(pointer, index, outer, inner)} * {self.scale})"


def low_rank_form(low: LowRank, contiguous: tuple[str, str], index: DType) -> tuple[LowRankForm, Parameters]:
    """Return the `LowRankForm` of a product whose operands are ``contiguous`` along these axes, and its parameters."""
    form = LowRankForm(low.a.dtype.short, *contiguous, None if low.scale is None else low.scale.dtype, index)
    parameters = Parameters()
    parameters.tensors(low_a=low.a, low_b=low.b)
    parameters.integer(low.a.shape[-1], DType.INT32, "rank")
    strides = (*low.a.strides[-2:], *low.b.strides[-2:])
    for name, stride in zip(("a_m", "a_k", "b_k", "b_n"), strides, strict=True):
        if form.stride(name) != "1":
            parameters.integer(stride, index, f"low_{name}")
    parameters.tensors(low_scale=low.scale)
    return form, parameters


def low_rank_start(depth: int) -> list[str]:
    """Return lines that prepare a pipeline over the rank in k steps of ``depth`` elements: offsets and ``steps``."""
    return [
        "a_base = int64(0)",
        "b_base = int64(0)",
        f"steps = int32((rank + {depth - 1}) >> {log2(depth)})",
    ]


def low_rank_pipeline(form: LowRankForm, tile: Tile, accumulator: str) -> list[Fragment]:
    """Return the fragments that add the low-rank product to the accumulators of a SIMT tile."""
    plain = Element(form.storage)
    elements = ScaledElement(form.storage, form.scale_value) if form.scale else plain, plain
    start = Fragment("low_rank_start", "\n".join(low_rank_start(tile.k)), "a_base b_base steps")
    return [start, pipeline_of(tile, accumulator, form.operands, elements, form.index_type)]
