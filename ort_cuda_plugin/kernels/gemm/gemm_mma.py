"""Matrix products by tensor cores, for 16-bit and float32 operands on GPUs that have ``mma.sync`` (sm_80)."""

from __future__ import annotations

from dataclasses import dataclass

from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, divides, product
from ...program.lowering.context import DeviceProperties, Lowering, LoweringOptions, Tensor
from ...program.steps.steps import Map, Substitution, Sums
from ..codegen.block_mapping import batch_offsets, split_tile_of_block
from ..codegen.epilogue import VECTOR, Epilogue
from ..codegen.fragment import join
from ..codegen.simt_fragments import Element, Operand, Tile
from ..codegen.source import Parameters, text_property
from ..codegen.vectors import vector_store
from ..contraction.block_quantized import BlockElement
from ..contraction.prologue import conversion_setup
from .gemm_simt import Product
from .mma_fragments import MatrixTile
from .tile_shapes import TileConfig, matrix_tiles


def matrix_kind(ctx: Lowering, elements: tuple[Element, Element]) -> str:
    """The type that tensor cores multiply, "" where they cannot do the product.

    Codes of few bits become numbers of the other operand's type.
    """
    a, b = elements
    return kind_of(ctx.device, ctx.options, a.storage) if b.storage == a.storage or isinstance(b, BlockElement) else ""


def kind_of(device: DeviceProperties, options: LoweringOptions, storage: str) -> str:
    """As what the device's tensor cores multiply elements of a storage type, a kind of `matrix_tiles`; else ""."""
    if device.emulated or device.compute_capability < (8, 0):
        return ""
    if storage == "f32":
        return "tf32" if options.use_tf32 and device.tf32 else ""
    return storage if storage in ("f16", "bf16") else ""


def multiplies_integers(device: DeviceProperties) -> bool:
    """Whether the device's tensor cores multiply bytes for our kernels."""
    return not device.emulated and device.compute_capability >= (8, 0)


@dataclass(frozen=True)
class MatrixProduct(Product):
    """One block per tile of out and part of k: the grid is (tiles along n * along m * ``splits`` * batches, 1, 1).

    With several parts the epilogue is `parts_epilogue`.
    """

    tile: Tile = matrix_tiles("f16")[0]
    kind: str = "f16"
    splits: int = 1
    teams: int = 1

    @property
    def resident(self) -> int:
        return TileConfig(self.tile, self.teams).resident

    @property
    def threads(self) -> int:
        return self.tile.threads * self.teams

    @property
    def shared_bytes(self) -> int:
        return self._matrices.shared_bytes

    @property
    def name(self) -> str:
        types = self.types.replace("f32", "tf32", 1) if self.kind == "tf32" else self.types
        return f"matmul_mma{form_name(self.splits, self.teams)}_{self.tile.name}_{types}"

    @text_property
    def body(self) -> str:
        matrices = self._matrices
        return join(
            [
                conversion_setup(*self.elements),
                split_tile_of_block(self.tile, matrices.depth, self.splits, "batch"),
                batch_offsets("ab", "base", self.batch_rank),
                matrices.fragment("m", "n", self.epilogue),
            ]
        )

    @property
    def _matrices(self) -> MatrixTile:
        a = Operand("a", "a", "row0", "m", "k_end", self.stride("a_m"), self.stride("a_k"), self.a_contiguous == "k")
        b = Operand("b", "b", "column0", "n", "k_end", self.stride("b_n"), self.stride("b_k"), self.b_contiguous == "k")
        return MatrixTile(self.tile, self.kind, a, b, self.elements, self.index_type, self.teams)


def form_name(splits: int, teams: int) -> str:
    """Part of a kernel's name."""
    return f"{'_split' if splits > 1 else ''}{f'_teams{teams}' if teams > 1 else ''}"


def parts_epilogue(parts: Tensor, columns: Dim) -> tuple[Epilogue, Parameters]:
    """Stores the sums of each part of k in ``parts`` [splits, rows of all batches, columns], of the sums' type.

    They are ``columns`` for each group of columns.
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
    """The step that adds the parts of `parts_epilogue`, in order, and computes the epilogue of ``step``."""
    size = product(step.shape)
    views = [ctx.view(parts, step.shape, None, parts.offset + number * size) for number in range(splits)]
    leaves = [Scalar(parts.dtype, "leaf") for _ in views]
    total = leaves[0]
    for leaf in leaves[1:]:
        total = total + leaf
    changed = Substitution({step.total: total})
    outputs = tuple((changed(value), y) for value, y in step.outputs)
    return Map(step.nodes, step.shape, (*step.inputs, *zip(leaves, views, strict=True)), outputs)
