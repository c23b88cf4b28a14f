"""Schedules of GEMMs: cuBLASLt, GEMV, tiles on tensor cores with split-K or sliced-K, or SIMT tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..kernels.contraction.epilogue_patterns import product_form
from ..kernels.contraction.integer_operands import MAX_DEPTH, PIECE, integer_epilogue, integer_form
from ..kernels.gemm.dispatch import Folded, contiguous_axis, folded, has_weights_along_n, operand_elements, transposed
from ..kernels.gemm.gemm_mma import matrix_kind, multiplies_integers
from ..kernels.gemm.gemv import takes
from ..kernels.gemm.tf32_weights_as_f16 import has_compact_columns, has_compact_lines
from ..kernels.gemm.tile_shapes import INTEGERS, TileConfig, choose_tile, matrix_tiles, piece_of, simt_tiles
from ..model.ir import DType
from ..program.expressions.symbolic import Dim, ceildiv, divides, hint, is_const, le, lt, product
from ..program.lowering.context import DeviceProperties, Lowering
from ..program.steps.schedule import Choice, Engine, Schedule, Tile, WeightLayout
from ..program.steps.steps import Contract
from .cost_model import choose_split_k, choose_tile_config, epilogue_cost, no_more_blocks
from .reasons import by_rules

__all__ = [
    "fused_split_k",
    "gemm_choices",
    "integer_kind",
    "is_faster_in_f16",
    "mma_schedules",
    "own_gemm_choices",
    "own_gemm_schedules",
    "simt_schedules",
    "sliced_k_before_library",
    "tile_guards",
]

GEMV_ROWS = 4
"""Maximum rows (m) for which rules prefer a GEMV kernel."""
MAX_TUNED_GEMV_ROWS = 16
"""Maximum rows (m) for which the autotuner also times a GEMV kernel."""
RELATIVE_TIMES = (1.0, 1.1, 1.35, 1.8)
"""Time per multiply-add with each of `matrix_tiles`, relative to the first, largest one (estimates)."""
TILE_LIMITS = (64, 1024)
"""Maximum rows (m) of small and of medium GEMMs. Small, medium and large GEMMs each get a plan: a small GEMM has at
most four of the smallest tiles along m, and the rows of medium GEMMs differ by a factor of at most 16."""
SPLIT_STEPS = 8
"""Minimum k steps per split for which rules prefer split-K (estimate); the autotuner also times half as many."""
MAX_SPLIT_K = 8
MAX_MEASURED = 6
"""Maximum tensor-core tiles that the autotuner compiles and times."""


def gemm_choices(ctx: Lowering, step: Contract) -> Iterator[Choice]:
    """Yield the candidates for the GEMM, the rules' preference first. cuBLASLt may still decline its candidate."""
    own = own_gemm_schedules(ctx, step)
    if "cublaslt" in ctx.device.libraries:
        preferred = _gemv_before_library(ctx, step, own) or sliced_k_before_library(ctx, step, own)
        if preferred is not None:
            yield preferred
        if step.a.dtype.is_float and not step.is_converted and step.low_rank is None:
            yield Choice(Schedule(Engine.LIBRARY), by_rules(ctx))
    yield from own_gemm_choices(ctx, step, own)


def own_gemm_choices(ctx: Lowering, step: Contract, own: list[Schedule] | None = None) -> Iterator[Choice]:
    """Yield the candidates that are the plugin's kernels, the rules' preference first.

    A guard limits integer kernels to more than `GEMV_ROWS` rows; with fewer, a GEMV is as fast.
    """
    m = folded(ctx, step).sizes[0]
    for schedule in own or own_gemm_schedules(ctx, step):
        least = (lt(GEMV_ROWS, m),) if schedule.operands in INTEGERS else ()
        yield Choice(schedule, by_rules(ctx), (*least, *tile_guards(ctx, schedule, m)))


def tile_guards(ctx: Lowering, schedule: Schedule, rows: Dim) -> tuple[Dim, ...]:
    """Return the guards that keep a tensor-core tile, chosen for the expected rows, from far more or fewer rows.

    A small tile loads each weight once per block of few rows, which is slow for thousands of rows. Rows that a Run
    reads back have no guards. The emulated device has none either: it uses one tile for all sizes.
    """
    if schedule.engine is not Engine.MMA or ctx.device.emulated:
        return ()
    below = [limit for limit in TILE_LIMITS if limit < hint(rows)]
    above = [limit for limit in TILE_LIMITS if limit >= hint(rows)]
    guards = [lt(limit, rows) for limit in below[-1:]] + [le(rows, limit) for limit in above[:1]]
    return tuple(guard for guard in guards if ctx.holds(guard))


def own_gemm_schedules(ctx: Lowering, step: Contract) -> list[Schedule]:
    """Return the schedules of the plugin's kernels that are not quarantined, the rules' preference first.

    If kernels are quarantined, schedules without tensor cores follow those with tensor cores.
    """
    found = []
    if _has_few_columns(ctx, step):
        found = [replace(_schedules(ctx, transposed(ctx, step))[0], is_transposed=True)]
    found += _schedules(ctx, step)
    if step.low_rank is not None:  # split-K would add the low-rank product in each of the splits
        found = list(dict.fromkeys(replace(schedule, split_k=1) for schedule in found))
    if not ctx.device.quarantine.has("gemm"):
        return found
    if any(schedule.engine is Engine.MMA for schedule in found):
        m = folded(ctx, step).sizes[0]
        found += simt_schedules(ctx.device, m, hint(m), step.total.dtype)
    return [schedule for schedule in found if ctx.device.quarantine.allows(step, schedule)]


def _schedules(ctx: Lowering, step: Contract) -> list[Schedule]:
    call = folded(ctx, step)
    m, n, k = call.sizes
    kind = _kind(ctx, step, call)
    if kind:
        config = _tile_config(ctx, step, kind, call)
        tiles = mma_schedules(ctx.device, kind, m, n, product(call.batch), k, config)
    else:
        tiles = simt_schedules(ctx.device, m, hint(m), step.total.dtype)
    can_be_gemv = bool(call.contiguous[1])
    few_rows = le(m, GEMV_ROWS) if can_be_gemv and kind not in INTEGERS else 0
    if not is_const(few_rows):
        tiles.insert(0, replace(tiles[0], split_k=1, gemv_rows=GEMV_ROWS))
    found = [replace(tile, weights=_weights(ctx, step, call, tile)) for tile in tiles]
    if can_be_gemv and hint(m) <= MAX_TUNED_GEMV_ROWS:
        is_first = is_const(few_rows) and few_rows != 0
        gemv = Schedule(Engine.GEMV)
        if has_compact_columns(ctx, step):
            gemv = replace(gemv, weights=WeightLayout.F16_ALONG_N)
        elif is_first:  # the weight layout that plans for more rows have, so that all plans share the weights
            gemv = replace(gemv, weights=_weights(ctx, step, call, replace(tiles[0], gemv_rows=GEMV_ROWS)))
        found.insert(0 if is_first else 1 if hint(m) <= GEMV_ROWS else len(found), gemv)
    return found


def simt_schedules(device: DeviceProperties, rows: Dim, expected: int, dtype: DType) -> list[Schedule]:
    """Return SIMT schedules that may be the fastest, the rules' preference first, for about ``expected`` rows."""
    others = [] if dtype.itemsize == 8 else [tile for tile, _ in simt_tiles(device) if tile.m < 2 * expected]
    return [Schedule(Engine.SIMT, tile) for tile in dict.fromkeys([choose_tile(device, rows, dtype), *others])]


def mma_schedules(
    device: DeviceProperties, kind: str, rows: Dim, columns: Dim, batch: Dim, depth: Dim, config: TileConfig | None
) -> list[Schedule]:
    """Return tensor-core schedules that may be the fastest, the rules' preference first: ``config``, if given.

    Otherwise rules prefer the tile with the least estimated time, where idle multiprocessors cost as much as busy ones,
    and the largest power-of-two split-K factor with at most one block per multiprocessor.
    """
    ways: list[tuple[float, Tile, int]] = []
    first = (math.inf, matrix_tiles(kind)[0], 1)
    for tile, cost in zip(matrix_tiles(kind), RELATIVE_TIMES, strict=True):
        blocks = hint(ceildiv(rows, tile.m) * ceildiv(columns, tile.n) * batch)
        first = min(first, (cost * tile.m * max(blocks, device.multiprocessors), tile, blocks), key=lambda way: way[0])
        blocks = max(1, blocks)
        split_k = 1
        while split_k == 1 or (split_k <= MAX_SPLIT_K and blocks * split_k < 2 * device.multiprocessors):
            if split_k > 1 and hint(depth) < split_k * tile.k * SPLIT_STEPS // 2:
                break
            ways.append((cost * tile.m * max(blocks * split_k, device.multiprocessors) / split_k, tile, split_k))
            split_k *= 2
    ways.sort(key=lambda way: way[0])
    _, tile, blocks = first
    most = min(MAX_SPLIT_K, device.multiprocessors // max(1, blocks), hint(depth) // (SPLIT_STEPS * tile.k))
    pairs = [
        (tile, 1 << (max(1, most).bit_length() - 1)),
        *((tile, split_k) for _, tile, split_k in ways[:MAX_MEASURED]),
    ]
    found = [Schedule(Engine.MMA, tile, kind, split_k) for tile, split_k in dict.fromkeys(pairs)]
    return found if config is None else [Schedule(Engine.MMA, config.tile, kind, sliced_k=config.sliced_k), *found]


# ---- comparison with a library ----


def _gemv_before_library(ctx: Lowering, step: Contract, own: list[Schedule]) -> Choice | None:
    """Return the choice of a GEMV kernel if the GEMM has one row, else None.

    Such a GEMM is memory-bound, and a library's tiles would be mostly padding. None also on the emulated device, and
    for operands that `VectorGemv` does not support.
    """
    call = folded(ctx, step)
    is_one = le(call.sizes[0], 1)
    if ctx.device.emulated or hint(call.sizes[0]) != 1 or not takes(operand_elements(step)[0], *call.contiguous):
        return None
    gemv = next((schedule for schedule in own if schedule.engine is Engine.GEMV), None)
    if gemv is None or not ctx.holds(is_one):
        return None
    if gemv.weights is WeightLayout.ALONG_K:
        gemv = replace(gemv, weights=WeightLayout.STORED)
    return Choice(gemv, f"a GEMV is memory-bound; {by_rules(ctx)}", (is_one,))


def sliced_k_before_library(ctx: Lowering, step: Contract, own: list[Schedule] | None = None) -> Choice | None:
    """Return the choice of a sliced-K kernel if it is faster than a cuBLASLt call including its overhead, else None.

    Sliced-K kernels copy 16-byte chunks: the operands' row pitches must be multiples of 16 bytes.
    """
    call = folded(ctx, step)
    kind = _kind(ctx, step, call)
    m, n, k = call.sizes
    if not kind or step.is_converted or hint(m) <= GEMV_ROWS or not is_const(k):
        return None
    config = _tile_config(ctx, step, kind, call)
    if config is None:
        return None
    rows = [x.strides[-2 if x.strides[-1] == 1 else -1] for x in (call.a, call.b)]
    if has_compact_lines(ctx, step) or _needs_rows_along_k(call, kind, config):
        rows[1] = k
    bounded = no_more_blocks(ctx.device, config.tile, m, n, product(call.batch))
    if not all(divides(piece_of(kind), row) for row in rows) or not ctx.holds(bounded):
        return None
    found = next((x for x in own or own_gemm_schedules(ctx, step) if not x.gemv_rows), None)
    if found is None or found.sliced_k != config.sliced_k or found.tile != config.tile:  # ``config`` is quarantined
        return None
    return Choice(found, f"faster than a library call; {by_rules(ctx)}", (bounded,))


def _tile_config(ctx: Lowering, step: Contract, kind: str, call: Folded, *, in_f16: bool = False) -> TileConfig | None:
    """Return the result of `choose_tile_config` for the step; None for steps with prologues, except integer codes.

    If cuBLASLt cannot fuse the whole epilogue, the library's time includes a separate kernel. With ``in_f16`` the
    plugin's kernel multiplies float16 operands, and the library's kernel operands of type ``kind``.
    """
    m, n, k = call.sizes
    if kind in INTEGERS:
        form = integer_form(step)
        assert form is not None
        step = integer_epilogue(step, form)
    elif step.is_converted:
        return None
    more = {**_beside_library(ctx, step, kind), **epilogue_cost(step, n)}
    if in_f16:
        return choose_tile_config(ctx.device, "f16", m, n, product(call.batch), k, along_k=True, **more)
    is_compact = has_compact_lines(ctx, step)
    along_k = is_compact or kind in INTEGERS or _can_be_along_k(call, kind)  # codes not along k are copied
    more |= {"is_compact": is_compact, "along_k": along_k}
    return choose_tile_config(ctx.device, kind, m, n, product(call.batch), k, **more)


def _beside_library(ctx: Lowering, step: Contract, kind: str) -> dict[str, Any]:
    """Return parameters ``library`` and ``left`` of `choose_tile_config`, which describe the cuBLASLt alternative."""
    if "cublaslt" not in ctx.device.libraries:
        return {}
    form = product_form(ctx, step)
    left = hint(product(step.shape)) * step.a.dtype.itemsize if form is None or form.leftover else 0
    return {"left": left, "library": kind if form else ""}


# ---- properties of a GEMM ----


def _kind(ctx: Lowering, step: Contract, call: Folded) -> str:
    """Return the mma operand type for the GEMM, "" if tensor cores do not support it."""
    integers = integer_kind(ctx, step)
    if integers:
        return integers
    return matrix_kind(ctx, operand_elements(step)[0]) if all(call.contiguous) else ""


def integer_kind(ctx: Lowering, step: Contract) -> str:
    """Return the mma operand type of a GEMM of 8-bit codes, "" if tensor cores cannot multiply its codes.

    GEMMs with few rows are excluded: they are memory-bound, and a GEMV reads the weights as fast.
    """
    a, b = step.operands
    depth = a.shape[-1]
    if not multiplies_integers(ctx.device) or not isinstance(depth, int) or depth % PIECE or depth > MAX_DEPTH:
        return ""
    if a.strides[-1] != 1 or not all(divides(PIECE, number) for number in (a.offset, *a.strides[:-1])):
        return ""
    form = integer_form(step) if all(dim == 1 for dim in b.shape[:-2]) else None
    return form.kind if form is not None and ctx.holds(lt(GEMV_ROWS, folded(ctx, step).sizes[0])) else ""


def is_faster_in_f16(ctx: Lowering, step: Contract) -> bool:
    """Tell whether the plugin's kernel on operands stored as float16 is faster than a library's TF32 GEMM."""
    call = folded(ctx, step)
    kind = _kind(ctx, step, call)
    is_long = hint(call.sizes[0]) > GEMV_ROWS and call.contiguous[0] == "k" and not ctx.device.quarantine.has("gemm")
    return kind == "tf32" and is_long and _tile_config(ctx, step, kind, call, in_f16=True) is not None


def fused_split_k(ctx: Lowering, step: Contract) -> int:
    """Return the split-K factor of a GEMM whose next step reduces the splits; 1 if splits are slower or unsupported."""
    call = folded(ctx, step)
    m, n, k = call.sizes
    kind = _kind(ctx, step, call)
    is_one = product(call.batch) == 1 and not step.is_converted and not step.column_parts and step.schedule is None
    is_one &= step.low_rank is None
    if kind not in ("f16", "bf16") or not is_one or not isinstance(k, int) or call.contiguous[0] != "k":
        return 1
    if ctx.device.quarantine.has("gemm"):  # split-K uses the same tensor-core kernels, which may be quarantined
        return 1
    if hint(m) <= GEMV_ROWS or step.b.rank != 2 or not _can_be_along_k(call, kind):
        return 1
    more = {**_beside_library(ctx, step, kind), **epilogue_cost(step, n)}
    return choose_split_k(ctx.device, kind, m, n, k, along_k=True, **more)


def _can_be_along_k(call: Folded, kind: str) -> bool:
    """Tell whether a is contiguous along k, and b is too, at least after one copy of its constant weights."""
    a, b = call.contiguous
    return a == "k" and (b == "k" or (has_weights_along_n(call) and divides(piece_of(kind), call.sizes[2])))


def _needs_rows_along_k(call: Folded, kind: str, config: TileConfig) -> bool:
    """Tell whether the kernel needs a copy of the weights that is contiguous along k.

    Tiles whose sizes are not powers of two require it; sliced-K with TF32 is slow without it.
    """
    return has_weights_along_n(call) and (not config.is_even or (kind == "tf32" and config.sliced_k > 1))


def _weights(ctx: Lowering, step: Contract, call: Folded, schedule: Schedule) -> WeightLayout:
    """Return the weight layout for the kernels of ``schedule``: tiles, and if it has one, the GEMV for few rows."""
    if schedule.engine is not Engine.MMA or step.is_converted:
        return WeightLayout.STORED
    if schedule.operands == "tf32" and not schedule.gemv_rows and has_compact_lines(ctx, step):
        return WeightLayout.F16_ALONG_K
    config = TileConfig(schedule.gemm_tile, schedule.sliced_k)
    is_along_k = _needs_rows_along_k(call, schedule.operands, config)
    return WeightLayout.ALONG_K if is_along_k else WeightLayout.STORED


def _has_few_columns(ctx: Lowering, step: Contract) -> bool:
    """Tell whether the GEMM has so few columns that it should be transposed, on the emulated device.

    The tiles of the emulated device all have 64 columns, and would be mostly padding.
    """
    rows, columns = product(step.a.shape[:-1]), step.b.shape[-1]
    is_plain = not step.column_parts and not any(conversion and conversion.bits for conversion in step.conversions)
    if step.low_rank is not None or not ctx.device.emulated or not is_plain:
        return False
    axis = contiguous_axis(step.a, "m", "k")
    if not isinstance(columns, int) or not columns <= GEMV_ROWS < hint(rows):
        return False
    return axis == "k" or (axis == "m" and isinstance(step.a.shape[-2], int))
