"""Schedules of FlashAttention: tensor cores or not, tile, and split-KV factor.

With more query rows per block, K and V are read less often from global memory; with more rows per warp, less often from
shared memory. With few rows in total, blocks are smaller, so that they occupy all multiprocessors, and the warps of a
block split its keys. Few rows with many keys use split-KV.
"""

from __future__ import annotations

from dataclasses import replace

from ..kernels.attention.flash import Reading
from ..kernels.attention.flash_mma_tiles import MATRIX_ROWS
from ..kernels.attention.flash_step import flash_call, flash_operands, share_keys
from ..kernels.attention.multi_pass import block_tile
from ..kernels.gemm.dispatch import contiguous_axis
from ..kernels.gemm.gemm_mma import kind_of
from ..kernels.library.library_attention import softmax_of, uncast
from ..model.ir import HALVES, DType, Unsupported
from ..program.expressions.symbolic import Dim, ceildiv, hint, le, lt, product
from ..program.lowering.context import Lowering, Tensor
from ..program.steps.quarantine import schedule_kinds
from ..program.steps.schedule import AttentionTile, Choice, Engine, Schedule
from ..program.steps.steps import Attend
from .reasons import by_rules

__all__ = [
    "FEW_ROWS",
    "SPLIT_KEYS",
    "flash_choice",
    "flash_wave",
    "has_tensor_cores_for",
    "has_tf32",
    "is_faster_as_flash",
    "small_tile",
]

MAX_SPLIT_KV = 32
SPLIT_KEYS = 128
"""Minimum keys per split of split-KV (estimate, not measured on a GPU)."""
MAX_KEY_GROWTH = 4
"""Limit of the keys that a plan serves, as a multiple of the keys that the next split-KV factor needs."""
BLOCKS_PER_MULTIPROCESSOR = 2
"""Blocks per multiprocessor from which the keys of blocks with at most 16 rows are not split. For blocks with more rows
the number is 1, for mma blocks of more than four warps 1/2."""
SHARED_SPLIT_KEYS = 512
"""Minimum keys per split for mma blocks of more than four warps, which split the keys among their warps as well. A
second launch costs several tiles' time."""
WARP, WARPS_PER_MULTIPROCESSOR = 32, 16
"""Threads per warp, and wanted blocks per multiprocessor for blocks of one warp. A split of such blocks may be half a
tile of keys, so that no block has two tiles if the number of tiles is just above a power of two."""
EMULATED_SPLIT_KEYS, EMULATED_MANY_BLOCKS = 512, 128
"""Minimum keys per split, and number of blocks from which keys are not split, on the emulated device."""
WIDEST, WIDEST_FLOAT32 = 128, 64
"""Maximum head size for which tiles fit in the shared memory of a block: for 16-bit types, and for float32."""
FEW_ROWS = 8
"""Maximum query rows per head for which attention is memory-bound."""
WARPS = 4
SMALL_WIDTH = 64
"""Maximum result columns for which a warp's registers hold the accumulators of 32 rows (two m16 mma operands)."""
MOST_WARP_KEYS = 32
"""Maximum keys per tile and warp for which the scores of a warp with 32 rows fit in registers."""


def _tile(m: int, keys: int, columns: int, warps: int = WARPS, warp_rows: int = MATRIX_ROWS) -> AttentionTile:
    return AttentionTile(m, keys, columns, 32 * warps, warp_rows=warp_rows, stages=2)


SMALL_TILES = {
    2: (
        _tile(16, 128, SMALL_WIDTH, 8),
        _tile(32, 128, SMALL_WIDTH, 8, 2 * MATRIX_ROWS),
        _tile(96, 128, SMALL_WIDTH, 12, 2 * MATRIX_ROWS),
    ),
    4: (
        _tile(16, 64, SMALL_WIDTH),
        _tile(32, 64, SMALL_WIDTH, 8),
        _tile(96, 64, SMALL_WIDTH, 12, 2 * MATRIX_ROWS),
    ),
}
"""Tiles for launches with at most one block per multiprocessor, smallest first, by bytes per element."""
TILES_OF_ALL_KEYS = {2: (128, 256), 4: (128,)}
"""Numbers of keys of tiles that hold all keys of a head, by bytes per element."""


def flash_choice(
    ctx: Lowering, q: Tensor, k: Tensor, v: Tensor, reading: Reading, *, is_converted: bool = False
) -> Choice:
    """Return the schedule of `stream_attention` for these arguments and the expected sizes.

    A schedule with one pipeline stage has no loop over tiles of keys: it is correct only for the numbers of keys that
    its guard admits. All other guards only concern speed. With ``is_converted``, k and v are codes that the kernel
    dequantizes.

    Raises:
        Unsupported: the schedules with and without tensor cores are quarantined.
    """
    for uses_tensor_cores in (True, False):
        choice = _flash_choice(ctx, q, k, v, reading, is_converted or not uses_tensor_cores)
        if not ctx.device.quarantine.covering(schedule_kinds("attention", q.dtype.short, choice.schedule)):
            return choice
    raise Unsupported(
        "quarantine",
        f"the FlashAttention kernels for {q.dtype.short}, with and without tensor cores, failed ort-cuda-plugin"
        " selftest on this device",
    )


def _flash_choice(ctx: Lowering, q: Tensor, k: Tensor, v: Tensor, reading: Reading, is_plain: bool) -> Choice:
    """Return the schedule with tensor cores, unless ``is_plain`` or tensor cores do not support the arguments."""
    *batch, groups, rows, _ = q.shape
    m, keys, width = groups * rows, k.shape[-2], v.shape[-1]
    is_dense = all(contiguous_axis(x, "row", "column") == "column" for x in (q, k, v))
    if has_tensor_cores(ctx) and not is_plain and is_dense and has_tensor_cores_for(ctx, q, k, v):
        is_masked = any(x.size != 1 for _, x in reading.inputs)
        engine = Engine.FLASH_MMA
        tile, guards = _mma_tile(ctx, product(batch), m, keys, width, q.dtype.itemsize, is_masked)
    else:
        engine = Engine.FLASH
        tile, guards = _simt_tile(ctx, m, width), ()
    split_k, enough = _split_kv(ctx, tile, product(batch) * ceildiv(m, tile.m) * ceildiv(width, tile.width), keys)
    return Choice(Schedule(engine, tile, split_k=split_k), by_rules(ctx), (*guards, *enough))


def small_tile(batches: Dim, rows: Dim, width: Dim, itemsize: int, multiprocessors: int) -> AttentionTile | None:
    """Return the smallest of `SMALL_TILES` with at most one block per multiprocessor at the expected sizes.

    Returns None if there is none, for few rows, and for wide results.
    """
    if hint(width) > SMALL_WIDTH or hint(rows) <= MATRIX_ROWS:
        return None
    fits = (tile for tile in SMALL_TILES[itemsize] if hint(batches) * hint(ceildiv(rows, tile.m)) <= multiprocessors)
    return next(fits, None)


def _mma_tile(
    ctx: Lowering, batches: Dim, rows: Dim, keys: Dim, width: Dim, itemsize: int, is_masked: bool
) -> tuple[AttentionTile, tuple[Dim, ...]]:
    """Return the tile for the expected number of query rows, and the conditions on the number of keys that it needs.

    ``width`` is at most 128. With a mask or bias (``is_masked``), fewer scores fit in a thread's registers.
    """
    columns = SMALL_WIDTH if hint(width) <= SMALL_WIDTH else 2 * SMALL_WIDTH
    if hint(rows) <= MATRIX_ROWS:
        return _tile(MATRIX_ROWS, 64, columns), ()
    tile = small_tile(batches, rows, width, itemsize, ctx.device.multiprocessors)
    if tile is None:
        m = WARPS * MATRIX_ROWS
        # Loading 4-byte K and V from shared memory takes as long as multiplying them: more rows per warp reuse a load.
        is_long = itemsize == 4 and hint(rows) > m
        return _tile(2 * m, 32, columns, warp_rows=2 * MATRIX_ROWS) if is_long else _tile(m, 32, columns), ()
    for most in TILES_OF_ALL_KEYS[itemsize]:
        if most // tile.sharing_warps <= MOST_WARP_KEYS and ctx.may_settle(le(keys, most)):
            return replace(tile, keys=most, stages=1), (le(keys, most),)
    return replace(tile, keys=16 * tile.sharing_warps) if is_masked else tile, ()


def _simt_tile(ctx: Lowering, rows: Dim, width: Dim) -> AttentionTile:
    """Return the tile without tensor cores for the expected sizes."""
    m = 8 if hint(rows) <= 8 else 16 if hint(rows) <= 16 else 32
    columns = 64 if hint(width) <= 64 else 128 if hint(width) <= 128 or m > 16 else 256
    keys = 64 if m < 32 or ctx.device.emulated else 128
    return block_tile(ctx, m, keys, columns, resident=False)


def _split_kv(ctx: Lowering, tile: AttentionTile, blocks: Dim, keys: Dim) -> tuple[int, tuple[Dim, ...]]:
    """Return the split-KV factor for a launch of ``blocks`` blocks, and its guards, which only concern speed.

    The factor is a power of two, to limit the number of kernels and plans. The plan serves more keys than expected,
    until `MAX_KEY_GROWTH` times as many as the next factor needs.
    """
    least, many = SPLIT_KEYS, ctx.device.multiprocessors
    if tile.stages == 1:
        return 1, ()
    if tile.warp_rows and tile.threads > 128:  # with more than four warps, a block has its multiprocessor to itself
        least, many = SHARED_SPLIT_KEYS, many // 2
    elif tile.m <= MATRIX_ROWS:
        many *= BLOCKS_PER_MULTIPROCESSOR
    if tile.threads <= WARP:
        least, many = tile.keys // 2, WARPS_PER_MULTIPROCESSOR * ctx.device.multiprocessors
    if ctx.device.emulated:
        least, many = EMULATED_SPLIT_KEYS, EMULATED_MANY_BLOCKS
    splits = 1
    while splits < MAX_SPLIT_KV and hint(blocks) * splits < many and hint(keys) >= 2 * splits * least:
        splits *= 2
    guards = [le(least * splits, keys)] if splits > 1 else []
    if splits < MAX_SPLIT_KV and hint(blocks) * splits < many and not ctx.device.emulated:
        guards.append(lt(keys, MAX_KEY_GROWTH * 2 * splits * least))
    settled = all(ctx.may_settle(guard) for guard in guards)
    return (splits, tuple(guards)) if settled else (1, ())


# ---- when FlashAttention is faster ----


def is_faster_as_flash(ctx: Lowering, step: Attend) -> bool:
    """Tell whether FlashAttention is faster than the plugin's other kernels.

    For operands that tensor cores do not support, it is faster only if several heads with few rows share K and V,
    which it then reads once. It is not faster on the emulated device, and for few rows and few keys. False also for
    attention that FlashAttention cannot compute: without a softmax, with an epilogue, or with strided operands.
    """
    if not has_tensor_cores(ctx) or len(step.outputs) != 1 or uncast(step.outputs[0][0]) is not step.total:
        return False
    *_, rows, keys = step.score_shape
    if hint(rows) <= FEW_ROWS and hint(keys) < 2 * SPLIT_KEYS:
        return False
    operands = flash_operands(ctx, step)
    shared = hint(rows) <= FEW_ROWS and share_keys(*operands)
    if not (has_tensor_cores_for(ctx, *operands) or shared) or any(x.strides[-1] != 1 for x in operands):
        return False
    return softmax_of(step) is not None


def flash_wave(ctx: Lowering, step: Attend) -> Dim | None:
    """Return the condition that the blocks of a small tile (`SMALL_TILES`) of FlashAttention run in one wave.

    None if no small tile does so at the expected sizes, or if the step does not use FlashAttention on tensor cores.
    """
    if not is_faster_as_flash(ctx, step) or not has_tensor_cores_for(ctx, *flash_operands(ctx, step)):
        return None
    q, k, v, *_ = flash_call(ctx, step)
    batches, rows = product(k.shape[:-2]), q.shape[-3] * q.shape[-2]
    tile = small_tile(batches, rows, v.shape[-1], v.dtype.itemsize, ctx.device.multiprocessors)
    return None if tile is None else le(batches * ceildiv(rows, tile.m), ctx.device.multiprocessors)


def has_tensor_cores(ctx: Lowering) -> bool:
    """Tell whether kernels should use tensor cores; not on the emulated device, which emulates mma slowly."""
    return not ctx.device.emulated


def has_tensor_cores_for(ctx: Lowering, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Tell whether the tensor-core kernel supports these types and head sizes, and pays off.

    It does not pay off for few rows of float32, since such attention is memory-bound.
    """
    sizes, types, size = {q.shape[-1], k.shape[-1], v.shape[-1]}, {q.dtype, k.dtype, v.dtype}, v.shape[-1]
    if len(sizes) > 1 or len(types) > 1 or not isinstance(size, int) or size <= 0 or size % 16:
        return False
    if q.dtype is DType.FLOAT32:
        return size <= WIDEST_FLOAT32 and hint(q.shape[-2]) > FEW_ROWS and has_tf32(ctx)
    return q.dtype in HALVES and size <= WIDEST


def has_tf32(ctx: Lowering) -> bool:
    """Tell whether tensor cores may multiply float32 operands as TF32."""
    return kind_of(ctx.device, ctx.options, "f32") == "tf32"
