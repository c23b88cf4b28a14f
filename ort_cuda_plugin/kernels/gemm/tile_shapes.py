"""GEMM tile shapes: for tensor cores, with sliced-K factors and bytes of shared memory, and for SIMT kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...model.ir import DType
from ...program.device import DeviceProperties
from ...program.expressions.symbolic import Dim, ceildiv, hint
from ..codegen.simt_fragments import Tile
from .gemm_simt import FLAT, LONG, SQUARE, TALL

STEP = 64
"""Bytes along k of the first operand that one k step multiplies; some sliced-K tiles have twice as many."""
BLOCK_BYTES = 99 << 10
"""Maximum shared memory per block on every supported GPU, in bytes."""
DECLARED_BYTES = 48 << 10
"""Maximum shared memory per block without cuFuncSetAttribute, in bytes."""
MOST_COPIES = 8
"""Maximum 16-byte copies of the first operand per thread and k step; each needs an address register."""
RESIDENT = 384
"""Resident threads per multiprocessor for which the compiler limits the registers of blocks without sliced-K.

With this limit a thread's accumulators still fit in its registers."""
SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "i8": 1, "u8": 1}
"""Bytes of an element in shared memory, by operand type of mma."""
INTEGERS = frozenset({"i8", "u8"})
"""Operand types of mma with int32 accumulators; the type of the second operand is always int8."""

SIMT_TILES = ((TALL, 1.0), (SQUARE, 1.1), (FLAT, 1.4))
"""SIMT tiles for GPUs, with their time per multiply-add relative to the first tile (estimates)."""
EMULATED_TILES = tuple(
    (Tile(m, 64, thread_m=16, thread_n=16, chunk=16), cost) for m, cost in ((64, 1.0), (32, 1.2), (16, 1.6))
)
"""SIMT tiles for the emulated device: few threads with much work each, since a barrier switches fibers."""


def simt_tiles(device: DeviceProperties) -> tuple[tuple[Tile, float], ...]:
    """Return the SIMT tiles of a device, with their relative time per multiply-add."""
    return EMULATED_TILES if device.emulated else SIMT_TILES


def choose_tile(device: DeviceProperties, rows: Dim, dtype: DType) -> Tile:
    """Return the SIMT tile with the least work, padding included, for ``rows`` rows. All tiles have the same width.

    8-byte types have a single tile. On the emulated device, a number of rows that may vary between Runs gets the medium
    tile, so that no Run compiles another kernel than session creation did.
    """
    if dtype.itemsize == 8:
        return replace(LONG, gap=0) if device.emulated else LONG
    if device.emulated and not isinstance(rows, int):
        return EMULATED_TILES[1][0]
    return min(simt_tiles(device), key=lambda entry: entry[1] * hint(ceildiv(rows, entry[0].m)) * entry[0].m)[0]


def stages_of(kind: str, tile: Tile) -> int:
    """Return the number of pipeline stages of a tensor-core kernel with this tile."""
    return 3 if tile.k * SIZES[kind] <= STEP else 2


def piece_of(kind: str) -> int:
    """Return the elements of a 16-byte chunk."""
    return 16 // SIZES[kind]


def matrix_tiles(kind: str) -> tuple[Tile, ...]:
    """Return the tensor-core tiles of blocks of four warps without sliced-K, the largest one first."""
    shapes = ((128, 8, 8), (64, 8, 4), (32, 4, 4), (16, 2, 4))
    return tuple(Tile(m, 64, STEP // SIZES[kind], thread_m=rows, thread_n=columns) for m, rows, columns in shapes)


@dataclass(frozen=True)
class TileConfig:
    """Tile of a warp group, and the number ``sliced_k`` of warp groups in a block, which split the k steps."""

    tile: Tile
    sliced_k: int

    @property
    def is_even(self) -> bool:
        """Whether m and n of the tile are powers of two. Other tiles need operands that are contiguous along k."""
        return all(size & (size - 1) == 0 for size in (self.tile.m, self.tile.n))

    @property
    def warps(self) -> int:
        """Warps per group."""
        return self.tile.threads // 32

    @property
    def resident(self) -> int:
        """Blocks whose registers should fit on a multiprocessor at a time."""
        return max(1, RESIDENT // self.tile.threads) if self.sliced_k == 1 else 1

    @property
    def warp_columns(self) -> int:
        return 1 if self.warps < 4 else 2 if self.tile.m >= 64 else 4

    @property
    def warp(self) -> tuple[int, int]:
        """Rows and columns of the result per warp."""
        return self.tile.m * self.warp_columns // self.warps, self.tile.n // self.warp_columns


def tile_configs(
    kind: str,
    compact: bool = False,
    *,
    along_k: bool = False,
    is_image: bool = False,
    capability: tuple[int, int] = (9, 0),
) -> tuple[TileConfig, ...]:
    """Return tiles with warp groups of one warp, which need no barriers along k, or of several, which share loads.

    The first tiles have k steps of 64 bytes, then of 128 bytes, and fit the shared memory of every GPU; ``compact``
    weights (float16 for TF32) need less shared memory. The other tiles must fit the shared memory of compute
    ``capability``:

    - tiles of two warps that each span all columns, which load less per multiplication;
    - tiles whose sizes are not powers of two, which reduce wave quantization, if both operands are contiguous
      ``along_k``;
    - large tiles for 16-bit types, unless the first operand is im2col patches (``is_image``).
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
    # The next three lists are not for im2col patches, whose addresses leave too few registers. Square and tall tiles
    # are for 16-bit types only.
    long = ((64, 48, 8, 12, (4, 8)),)
    square = ((128, 128, 16, 8, (1,)),)
    tall = ((192, 128, 16, 8, (1,)),)
    room = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(capability, 99) << 10
    sizes, found = operand_sizes(kind, compact), []
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


GAP = 8
"""Floats of padding between rows of accumulators in shared memory, to avoid bank conflicts."""


def operand_sizes(kind: str, compact: bool) -> tuple[int, int]:
    """Return the bytes per element of each operand in shared memory; ``compact`` weights are float16."""
    return SIZES[kind], 2 if compact else SIZES[kind]


def block_bytes(kind: str, sizes: tuple[int, int], tile: Tile, sliced_k: int) -> int:
    """Return the bytes of shared memory per block: the stages of all warp groups, reused for their accumulators.

    ``sizes`` are the bytes per element of both operands (`operand_sizes`).
    """
    stage = tile.k * (tile.m * sizes[0] + tile.n * sizes[1])
    return sliced_k * max(stages_of(kind, tile) * stage, tile.m * (tile.n + GAP) * 4)
