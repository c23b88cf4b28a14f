"""Tensor-core GEMM for float16, bfloat16, float32 (TF32) and 8-bit integers, on GPUs of sm_80 or later."""

from __future__ import annotations

from dataclasses import dataclass

from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, divides, product
from ...program.lowering.context import DeviceProperties, Lowering, LoweringOptions, Tensor
from ...program.steps.steps import Map, Substitution, Sums
from ..codegen.block_mapping import batch_offsets, split_tile_of_block
from ..codegen.epilogue import VECTOR, Epilogue
from ..codegen.fragment import Fragment, join
from ..codegen.simt_fragments import Element, Tile
from ..codegen.source import Parameters, text_property
from ..codegen.vectors import vector_store
from ..contraction.block_quantized import BlockElement
from ..contraction.prologue import conversion_setup
from .gemm_simt import Product
from .mma_fragments import MatrixTile
from .tile_shapes import TileConfig, matrix_tiles


def matrix_kind(ctx: Lowering, elements: tuple[Element, Element]) -> str:
    """Return the mma operand type for these operands, "" if there is none. A block-quantized b is converted to it."""
    a, b = elements
    return kind_of(ctx.device, ctx.options, a.storage) if b.storage == a.storage or isinstance(b, BlockElement) else ""


def kind_of(device: DeviceProperties, options: LoweringOptions, storage: str) -> str:
    """Return the mma operand type (a key of `SIZES`) for elements of type ``storage``, "" if there is none."""
    if device.emulated or device.compute_capability < (8, 0):
        return ""
    if storage == "f32":
        return "tf32" if options.use_tf32 and device.tf32 else ""
    return storage if storage in ("f16", "bf16") else ""


def multiplies_integers(device: DeviceProperties) -> bool:
    """Tell whether the device's tensor cores can run the plugin's kernels for 8-bit integers."""
    return not device.emulated and device.compute_capability >= (8, 0)


@dataclass(frozen=True)
class MatrixProduct(Product):
    """Tensor-core GEMM kernel. The grid is (tiles along n * tiles along m * ``splits`` * batches, 1, 1).

    With several splits of k the epilogue is `parts_epilogue`. ``kind`` is the mma operand type.
    """

    tile: Tile = matrix_tiles("f16")[0]
    kind: str = "f16"
    splits: int = 1
    sliced_k: int = 1

    @property
    def resident(self) -> int:
        return TileConfig(self.tile, self.sliced_k).resident

    @property
    def threads(self) -> int:
        return self.tile.threads * self.sliced_k

    @property
    def shared_bytes(self) -> int:
        return self._matrices.shared_bytes

    @property
    def name(self) -> str:
        types = self.types.replace("f32", "tf32", 1) if self.kind == "tf32" else self.types
        return f"matmul_mma{form_name(self.splits, self.sliced_k)}_{self.tile.name}_{types}"

    @text_property
    def body(self) -> str:
        matrices = self._matrices
        start: list[Fragment] = []
        if self.low_rank is None:
            tile = matrices.fragment("m", "n", self.epilogue)
        else:
            elements, index = (Element(self.low_rank.storage),) * 2, self.low_rank.index_type
            low = MatrixTile(self.tile, self.kind, *self.low_rank.operands, elements, index, self.sliced_k)
            first, tile = matrices.after_low_rank(low, self.low_rank.scale_value, self.epilogue)
            start = [first]
        return join(
            [
                conversion_setup(*self.elements),
                split_tile_of_block(self.tile, matrices.depth, self.splits, "batch"),
                *start,
                batch_offsets("ab", "base", self.batch_rank),
                tile,
            ]
        )

    @property
    def _matrices(self) -> MatrixTile:
        return MatrixTile(self.tile, self.kind, *self.operands, self.elements, self.index_type, self.sliced_k)


def form_name(splits: int, sliced_k: int) -> str:
    """Return the part of a kernel's name that tells of split-K and sliced-K."""
    return f"{'_split' if splits > 1 else ''}{f'_teams{sliced_k}' if sliced_k > 1 else ''}"


def parts_epilogue(parts: Tensor, columns: Dim) -> tuple[Epilogue, Parameters]:
    """Return an epilogue that stores split-K accumulators in ``parts`` [splits, rows of all batches, columns].

    ``columns`` is the number of columns, or of a convolution's output channels per group. If `VECTOR` divides it, the
    stores are vectorized.
    """
    parameters = Parameters()
    parameters.tensor(parts, "parts", written=True)
    parameters.integer(product(parts.shape[1:]), name="part_size")
    start = "part_at# = int64(part) * part_size + (int64(batch) * int64(m) + int64(row#)) * int64(n)"
    at = "part_at# + int64(column@)"
    if not divides(VECTOR, columns):
        return Epilogue((start,), (), (f"parts[{at}] = total@#",)), parameters
    lanes = (f"lanes@# = lanes_of(parts, {VECTOR})",)
    store = vector_store("lanes@#", "parts", at, "True", VECTOR)
    stored = Epilogue((start,), ("lanes@#[$] = total@#_$",), (store,), element_loads=lanes, width=VECTOR)
    return stored, parameters


def sum_of_parts(ctx: Lowering, step: Sums, parts: Tensor, splits: int) -> Map:
    """Return the split-K reduction: a Map that adds the splits in order and computes the epilogue of ``step``."""
    size = product(step.shape)
    views = [ctx.view(parts, step.shape, None, parts.offset + number * size) for number in range(splits)]
    leaves = [Scalar(parts.dtype, "leaf") for _ in views]
    total = leaves[0]
    for leaf in leaves[1:]:
        total = total + leaf
    changed = Substitution({step.total: total})
    outputs = tuple((changed(value), y) for value, y in step.outputs)
    return Map(step.nodes, step.shape, (*step.inputs, *zip(leaves, views, strict=True)), outputs)
