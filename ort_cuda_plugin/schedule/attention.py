"""Schedules of attention: cuDNN, FlashAttention, a multi-pass kernel, or three separate steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from ..kernels.attention.flash_step import flash_call
from ..kernels.attention.multi_pass import RESIDENT_BYTES, resident_tile
from ..kernels.library.library_attention import attention_form
from ..model.ir import Unsupported
from ..program.expressions.symbolic import Dim, hint, le, logical_not, lt
from ..program.lowering.context import Lowering
from ..program.steps.quarantine import kinds_for
from ..program.steps.schedule import AttentionTile, Choice, Engine, Schedule
from ..program.steps.steps import Attend, Contract, Map
from .flash import FEW_ROWS, SPLIT_KEYS, flash_choice, flash_wave, is_faster_as_flash
from .gemm import own_gemm_schedules
from .reasons import by_rules

__all__ = ["attention_choices", "decomposed_attention", "own_attention_choices"]

SMALL_ATTENTION = 1 << 14
"""Scores per head below which three launches take longer than their arithmetic (estimate, not measured on a GPU)."""
MANY_KEYS = 2 * SPLIT_KEYS
"""Minimum keys for attention with at most `FEW_ROWS` query rows to count as decoding with a K/V cache."""


def attention_choices(ctx: Lowering, step: Attend) -> Iterator[Choice]:
    """Yield the candidates for attention; without measurements the first one is used.

    cuDNN may still decline its candidate. FlashAttention precedes cuDNN if all its blocks run in one wave: cuDNN's
    blocks have more query rows each, and so occupy fewer multiprocessors.
    """
    decomposed = Choice(Schedule(Engine.DECOMPOSED), by_rules(ctx), _decoding_guards(ctx, step))
    if attention_form(ctx, step) is not None:
        wave = flash_wave(ctx, step)
        if wave is not None and ctx.holds(wave):
            why = f"all its blocks run at once; {by_rules(ctx)}"
            with suppress(Unsupported):
                flash = _flash(ctx, step)
                yield replace(flash, why=why, guards=(*flash.guards, wave))
        yield Choice(Schedule(Engine.LIBRARY), by_rules(ctx))
    elif _is_faster_decomposed(ctx, step):
        yield decomposed
    yield from own_attention_choices(ctx, step)
    if step.parts:
        yield decomposed


def own_attention_choices(ctx: Lowering, step: Attend) -> Iterator[Choice]:
    """Yield the plugin's kernels for attention, the rules' preference first."""
    guards = _decoding_guards(ctx, step)
    for choice in _own_choices(ctx, step):
        yield replace(choice, guards=(*choice.guards, *guards))


def _own_choices(ctx: Lowering, step: Attend) -> Iterator[Choice]:
    if is_faster_as_flash(ctx, step):
        with suppress(Unsupported):
            yield _flash(ctx, step)
    a, b, c = step.operands
    rows, keys, width = a.shape[-2], b.shape[-1], c.shape[-1]
    tile, guards = choose_multi_pass_tile(ctx, rows, keys, width)
    yield Choice(Schedule(Engine.MULTI_PASS, tile), by_rules(ctx), guards)
    for m in (8, 16, 32):
        if m == 8 or m < 2 * hint(rows):
            tile = resident_tile(ctx, m, width)
            fits = le(tile.score_bytes(keys), RESIDENT_BYTES)
            if ctx.may_settle(fits):
                yield Choice(Schedule(Engine.MULTI_PASS, tile), by_rules(ctx), (fits,))
            yield Choice(Schedule(Engine.MULTI_PASS, replace(tile, resident=False)), by_rules(ctx))


def _flash(ctx: Lowering, step: Attend) -> Choice:
    q, k, v, _, reading = flash_call(ctx, step)
    return flash_choice(ctx, q, k, v, reading)


def choose_multi_pass_tile(ctx: Lowering, rows: Dim, keys: Dim, width: Dim) -> tuple[AttentionTile, tuple[Dim, ...]]:
    """Return the multi-pass kernel's best tile for the expected sizes, and the conditions under which it is the best.

    With more rows per block, fewer blocks read the keys. But if the scores of all keys fit in shared memory, they are
    computed once instead of in each pass; so 16 rows per block may be faster than 32. Fewer than 16 rows would take
    longer than computing the scores in each pass. On the emulated device, a number of rows above 8 that varies between
    Runs gets tiles of 16 rows, so that no Run compiles another tile.
    """
    is_one_tile = ctx.device.emulated and not isinstance(rows, int)
    most = 8 if hint(rows) <= 8 else 16 if hint(rows) <= 16 or is_one_tile else 32
    guards: list[Dim] = []
    for m in dict.fromkeys((most, min(most, 16))):
        tile = resident_tile(ctx, m, width)
        fits = le(tile.score_bytes(keys), RESIDENT_BYTES)
        if ctx.may_settle(fits):
            return tile, (*guards, fits)
        if ctx.may_settle(logical_not(fits)):
            guards.append(logical_not(fits))
    return replace(resident_tile(ctx, most, width), resident=False), tuple(guards)


def _is_faster_decomposed(ctx: Lowering, step: Attend) -> bool:
    """Tell whether three steps (GEMM, softmax, GEMM) are faster than the multi-pass kernel, although they store scores.

    Three steps are faster for many scores with cuBLASLt, and in decoding, where one kernel would have few blocks.
    Attention for which `is_faster_as_flash` is true is not decomposed.
    """
    if not step.parts or is_faster_as_flash(ctx, step):
        return False
    if _is_decoding(step) and not ctx.device.emulated:
        return True
    *_, rows, keys = step.score_shape
    return "cublaslt" in ctx.device.libraries and hint(rows) * hint(keys) >= SMALL_ATTENTION


def _is_decoding(step: Attend) -> bool:
    """Tell whether few rows attend to many keys, so that one kernel would have few blocks with long loops."""
    *_, rows, keys = step.score_shape
    return hint(rows) <= FEW_ROWS and hint(keys) >= MANY_KEYS


def _decoding_guards(ctx: Lowering, step: Attend) -> tuple[Dim, ...]:
    """Return the guards on rows and keys that keep the plan from sizes for which another kernel is much faster.

    A decoder's Runs read a prompt of many rows, or one new row and the keys of all earlier ones. With these guards the
    prompt, rows with few keys and rows with many keys have a plan each. Sizes that a Run reads back have no guard. The
    emulated device needs none, as it has too few processors to gain from more blocks.
    """
    if ctx.device.emulated:
        return ()
    *_, rows, keys = step.score_shape
    if hint(rows) > FEW_ROWS:
        guards = [lt(FEW_ROWS, rows)]
    else:
        guards = [le(rows, FEW_ROWS), le(MANY_KEYS, keys) if _is_decoding(step) else lt(keys, MANY_KEYS)]
    return tuple(guard for guard in guards if ctx.holds(guard))


def decomposed_attention(ctx: Lowering, step: Attend) -> Iterator[Map]:
    """Yield the three steps of attention: GEMM, softmax, GEMM.

    In decoding, both GEMMs get kernels of the plugin that are not quarantined, if there are any: cuBLASLt would need a
    new problem description for each number of keys.
    """
    for one in step.parts:
        if isinstance(one, Contract) and _is_decoding(step):
            own = own_gemm_schedules(ctx, one)
            first = next((x for x in own if not x.gemv_rows and not x.is_transposed), None)
            if first is not None:
                choice = Choice(first, "a library would need a new plan for each number of keys")
                ctx.take(choice, kinds_for(one, first))
                one = replace(one, schedule=choice.schedule, why=choice.why)
        yield one
