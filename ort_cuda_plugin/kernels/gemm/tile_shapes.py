"""Tiles of GEMMs: those of tensor cores with their sliced-K factors, those of other cores, and their shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...model.ir import DType
from ...program.device import DeviceProperties
from ...program.expressions.symbolic import Dim, ceildiv, hint
from ..codegen.simt_fragments import Tile
from .gemm_simt import FLAT, LONG, SQUARE, TALL

STEP = 64
"""Bytes along k of a step, of the first operand; some sliced-K tiles have steps of twice as many."""
BLOCK_BYTES = 99 << 10
"""Shared memory that a block may have on every supported GPU, in bytes."""
DECLARED_BYTES = 48 << 10
"""Shared memory that a launch gets without cuFuncSetAttribute, in bytes."""
MOST_COPIES = 8
"""Maximum 16-byte copies of the first operand by a thread in a step. Each keeps its address in registers."""
RESIDENT = 384
"""Threads of blocks without sliced-K that a multiprocessor should hold: with fewer, warps wait. So many leave
accumulators and operands in registers."""
SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "i8": 1, "u8": 1}
"""Bytes in shared memory of a number that is multiplied as a kind."""
INTEGERS = frozenset({"i8", "u8"})
"""Kinds whose sums are int32, and whose second operand is int8."""

SIMT_TILES = ((TALL, 1.0), (SQUARE, 1.1), (FLAT, 1.4))
"""Tiles without tensor cores, with the relative time of one multiply-add."""
EMULATED_TILES = tuple(
    (Tile(m, 64, thread_m=16, thread_n=16, chunk=16), cost) for m, cost in ((64, 1.0), (32, 1.2), (16, 1.6))
)
"""Tiles of the emulated device: few threads with much work, since each barrier is a fiber switch."""


def simt_tiles(device: DeviceProperties) -> tuple[tuple[Tile, float], ...]:
    """The tiles of a device without tensor cores, with the relative time of one multiply-add."""
    return EMULATED_TILES if device.emulated else SIMT_TILES


def choose_tile(device: DeviceProperties, rows: Dim, dtype: DType) -> Tile:
    """Return the tile with the least padded work for a result of so many rows. All are as wide."""
    if dtype.itemsize == 8:
        return replace(LONG, gap=0) if device.emulated else LONG
    return min(simt_tiles(device), key=lambda entry: entry[1] * hint(ceildiv(rows, entry[0].m)) * entry[0].m)[0]


def stages_of(kind: str, tile: Tile) -> int:
    """Tiles in shared memory at once."""
    return 3 if tile.k * SIZES[kind] <= STEP else 2


def piece_of(kind: str) -> int:
    """Numbers in 16 bytes."""
    return 16 // SIZES[kind]


def matrix_tiles(kind: str) -> tuple[Tile, ...]:
    """Tiles of blocks of four warps, the largest one first."""
    shapes = ((128, 8, 8), (64, 8, 4), (32, 4, 4), (16, 2, 4))
    return tuple(Tile(m, 64, STEP // SIZES[kind], thread_m=rows, thread_n=columns) for m, rows, columns in shapes)


@dataclass(frozen=True)
class TileConfig:
    """A tile of a group of warps, and the number of such groups in a block, which share the steps along k."""

    tile: Tile
    sliced_k: int

    @property
    def is_even(self) -> bool:
        """Whether the sizes of its tile are powers of two. Operands of others have rows along k."""
        return all(size & (size - 1) == 0 for size in (self.tile.m, self.tile.n))

    @property
    def warps(self) -> int:
        """Warps of a group."""
        return self.tile.threads // 32

    @property
    def resident(self) -> int:
        """Blocks for which a multiprocessor should have registers."""
        return max(1, RESIDENT // self.tile.threads) if self.sliced_k == 1 else 1

    @property
    def warp_columns(self) -> int:
        return 1 if self.warps < 4 else 2 if self.tile.m >= 64 else 4

    @property
    def warp(self) -> tuple[int, int]:
        """Rows and columns of a warp."""
        return self.tile.m * self.warp_columns // self.warps, self.tile.n // self.warp_columns


def tile_configs(
    kind: str,
    compact: bool = False,
    *,
    along_k: bool = False,
    is_image: bool = False,
    capability: tuple[int, int] = (9, 0),
) -> tuple[TileConfig, ...]:
    """Sliced-K tiles of groups of one warp, which waits for no other along k, and of more, which share what they load.

    First those with steps of 64 bytes, then those with steps of 128. A GPU's block has room for all of them;
    ``compact`` weights take less. At last those of two warps that have all columns of a tile, and load less for each
    multiplication, as far as blocks of a GPU of that compute ``capability`` have room. Tiles whose sizes are no powers
    of two fill multiprocessors that others leave empty; rows of both operands have to run ``along_k``. The first one
    may be patches of an image.
    """
    shapes = (
        (16, 16, 2, 4, (2, 4, 8)),
        (16, 32, 4, 4, (2, 4, 8)),
        (32, 16, 4, 4, (2, 4, 8)),
        (64, 16, 8, 4, (4,)),
        (32, 32, 8, 4, (2, 4, 8)),
        (64, 32, 8, 4, (2, 4)),
        (16, 64, 2, 4, (4,)),
        (32, 64, 4, 4, (2, 4)),
        (64, 64, 8, 4, (2, 4)),
        (128, 64, 8, 8, (1,)),
    )
    wide = ((128, 64, 8, 16, (2, 4)),)
    uneven = (
        (96, 64, 12, 8, (2, 4)),
        (96, 80, 12, 10, (2, 4)),
        (96, 96, 6, 12, (1, 2)),
        (128, 96, 8, 12, (1,)),
        (192, 96, 6, 12, (1,)),
        (64, 96, 8, 12, (2, 4)),
        (64, 80, 8, 10, (2, 4)),
        (48, 32, 6, 8, (4, 8)),
        (48, 48, 6, 12, (4, 8)),
        (192, 64, 16, 8, (2,)),
    )
    # For these, patches leave too few registers, and for the last two what is not of 16 bits.
    long = ((64, 48, 8, 12, (4, 8)),)
    square = ((128, 128, 16, 8, (1,)),)
    tall = ((192, 128, 16, 8, (1,)),)
    sizes, room, found = operand_sizes(kind, compact), most_shared_bytes(capability), []
    for given, steps, most in (
        (shapes, (1, 2), BLOCK_BYTES),
        (wide, (1,), room),
        (uneven if along_k else (), (1,), room),
        (square if SIZES[kind] == 2 and not is_image else (), (1,), room),
        (tall if along_k and SIZES[kind] == 2 and not is_image else (), (1,), room),
        (long if along_k and not is_image else (), (1,), room),
    ):
        for length in steps:
            for m, n, rows, columns, numbers in given:
                tile = Tile(m, n, length * STEP // SIZES[kind], thread_m=rows, thread_n=columns)
                if tile.m * tile.k * SIZES[kind] <= MOST_COPIES * 16 * tile.threads:
                    found += [
                        TileConfig(tile, count) for count in numbers if block_bytes(kind, sizes, tile, count) <= most
                    ]
    return tuple(found)


def most_shared_bytes(capability: tuple[int, int]) -> int:
    """That a block may have on a GPU of that compute capability."""
    return {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(capability, 99) << 10


GAP = 8
"""Floats between the rows of a result, so that warps store theirs without meeting in a bank."""


def operand_sizes(kind: str, compact: bool) -> tuple[int, int]:
    """Bytes in shared memory of numbers of both operands."""
    return SIZES[kind], 2 if compact else SIZES[kind]


def block_bytes(kind: str, sizes: tuple[int, int], tile: Tile, sliced_k: int) -> int:
    """Shared memory of a block: the stages of each group of warps, and then their accumulators."""
    stage = tile.k * (tile.m * sizes[0] + tile.n * sizes[1])
    return sliced_k * max(stages_of(kind, tile) * stage, tile.m * (tile.n + GAP) * 4)
