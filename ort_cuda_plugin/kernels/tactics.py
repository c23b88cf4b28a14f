"""The ways to compute a product, convolution or attention: libraries, our kernels in several forms, and steps apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..program.expressions.symbolic import hint
from ..program.lowering.context import Lowering
from ..program.steps.steps import Attend, Contract, Convolve, Map, Sums, Tactic
from ..program.steps.trace import Launch, Step
from .attention.flash_mma_schedule import try_flash_attention, try_flash_in_one_wave
from .attention.multi_pass import attention_tactics
from .conv.channels_last import is_channels_last, matrix_convolution_kind, try_channels_last
from .conv.depthwise_conv import try_depthwise
from .conv.dispatch import convolution_tactics
from .conv.implicit_gemm_mma import matrix_convolution_tactics, try_sliced_k_convolution
from .gemm.dispatch import integer_product_kind, product_tactics, try_gemv, try_sliced_k
from .gemm.tile_shapes import INTEGERS
from .library.library_attention import attention_form

LIBRARY = "library"
"""The call of cuBLASLt or cuDNN."""
MATRICES = "one walk over the keys"
PARTS = "three steps"
"""Attention whose scores are stored: a product, a row program and a product."""
SMALL_ATTENTION = 1 << 14
"""Scores of a head below which launches cost more than arithmetic. An estimate: no GPU has measured it."""
DECODED_ROWS, MANY_KEYS = 4, 256
"""Rows of a head, and keys, that are a decoder's with a cache."""


def own_tactics(ctx: Lowering, step: Sums) -> list[str]:
    """The names of our kernels for the step, first what rules prefer."""
    match step:
        case Contract():
            return list(product_tactics(ctx, step))
        case Convolve():
            return [*matrix_convolution_tactics(ctx, step), *convolution_tactics(ctx, step)]
        case Attend():
            return [*[MATRICES] * (try_flash_attention(ctx, step) is not None), *attention_tactics(ctx, step)]
    raise TypeError(f"{type(step).__name__} has no tactics")


def tactics(ctx: Lowering, step: Sums) -> list[str]:
    """The names of ways to compute the step, first what rules prefer. A library may decline when it is asked."""
    if any(hint(dim) == 0 for dim in step.shape):
        return []
    own = own_tactics(ctx, step)
    if isinstance(step, Attend):
        parts = [PARTS] if step.parts else []
        if attention_form(ctx, step) is not None:
            return [own[0], LIBRARY, *own[1:], *parts] if ruled(ctx, step).name else [LIBRARY, *own, *parts]
        return [*parts, *own] if try_decomposition(ctx, step) else [*own, *parts]
    library = "cudnn" if isinstance(step, Convolve) else "cublaslt"
    refused = step.transposed if isinstance(step, Convolve) else step.is_converted
    may_call = library in ctx.device.libraries and step.operands[0].dtype.is_float and not refused
    if may_call and ruled(ctx, step).name:
        return [own[0], LIBRARY, *own[1:]]
    return [*[LIBRARY] * may_call, *own]


def with_tactic(ctx: Lowering, step: Step) -> Step:
    """Return the step with the tactic that the tuner finds the fastest, or that rules prefer to a library."""
    if not isinstance(step, Sums) or step.tactic.name or try_depthwise_in_memory_order(ctx, step):
        return step
    names = tactics(ctx, step) if ctx.tuner is not None else []
    tuned = ctx.tuner.tactic(ctx, step, names) if ctx.tuner is not None and len(names) > 1 else Tactic()
    return replace(step, tactic=tuned if tuned.name else ruled(ctx, step))


def try_depthwise_in_memory_order(ctx: Lowering, step: Sums) -> bool:
    """Return whether the step is a depthwise convolution whose image has its channels last, where that is wanted."""
    return (
        isinstance(step, Convolve)
        and try_channels_last(ctx, step)
        and is_channels_last(step.operands[0])
        and try_depthwise(ctx, step)
    )


def ruled(ctx: Lowering, step: Sums) -> Tactic:
    """The tactic that rules prefer to a library; without a name where they do not.

    One row takes as long as memory does, which our kernel reads as fast; a library's kernel also fills tiles. A small
    product takes less than a library's call, which takes long to begin. A library's attention has blocks of many rows,
    which keep few multiprocessors busy where there are few rows in all.
    """
    if "cublaslt" in ctx.device.libraries and isinstance(step, Contract):
        if try_gemv(ctx, step):
            return Tactic(own_tactics(ctx, step)[0], f"one row, as long as memory takes; {by_rules(ctx)}")
        if try_sliced_k(ctx, step):
            return _small(ctx, step)
    if "cudnn" in ctx.device.libraries and isinstance(step, Convolve) and try_sliced_k_convolution(ctx, step):
        return _small(ctx, step)
    if isinstance(step, Attend) and attention_form(ctx, step) is not None and try_flash_in_one_wave(ctx, step):
        return Tactic(MATRICES, f"small, all blocks run at once; {by_rules(ctx)}")
    return Tactic()


def _small(ctx: Lowering, step: Sums) -> Tactic:
    return Tactic(own_tactics(ctx, step)[0], f"takes less than a library's call; {by_rules(ctx)}")


def try_decomposition(ctx: Lowering, step: Attend) -> bool:
    """Return whether tensor cores of cuBLASLt win more than trips through memory cost, or more blocks do.

    Attention stays whole that cuDNN computes, or a kernel of ours on tensor cores.
    """
    if not step.parts or attention_form(ctx, step) is not None or try_flash_attention(ctx, step) is not None:
        return False
    if is_decoding(step) and not ctx.device.emulated:
        return True
    if "cublaslt" not in ctx.device.libraries:
        return False
    *_, rows, keys = step.score_shape
    return hint(rows) * hint(keys) >= SMALL_ATTENTION


def is_decoding(step: Attend) -> bool:
    """Whether few rows attend to many keys: blocks of few threads would walk over all of them."""
    *_, rows, keys = step.score_shape
    return hint(rows) <= DECODED_ROWS and hint(keys) >= MANY_KEYS


def parts_of(ctx: Lowering, step: Attend) -> Iterator[Map]:
    """The steps of attention in parts.

    Products of few rows are ours: a library would be asked about each number of keys, which grows with each token.
    """
    for one in step.parts:
        if isinstance(one, Contract) and is_decoding(step):
            one = replace(one, tactic=Tactic(own_tactics(ctx, one)[0], "the number of keys grows"))
        yield one


def described(ctx: Lowering, step: Sums) -> str:
    """In words, which kernel of ours the step gets and why."""
    name, why = step.tactic.name or own_tactics(ctx, step)[0], step.tactic.why or by_rules(ctx)
    return f"{name}{_operands(ctx, step, name)}: {why}"


def try_integer_operands(ctx: Lowering, step: Sums) -> bool:
    """Return whether a kernel of ours multiplies the codes of dequantised operands on tensor cores."""
    if isinstance(step, Convolve):
        return matrix_convolution_kind(ctx, step) in INTEGERS
    return isinstance(step, Contract) and bool(integer_product_kind(ctx, step))


def _operands(ctx: Lowering, step: Sums, name: str) -> str:
    """What the kernel of that name multiplies, where that is codes."""
    if not try_integer_operands(ctx, step):
        return ""
    ways = matrix_convolution_tactics(ctx, step) if isinstance(step, Convolve) else {}
    if isinstance(step, Contract):
        ways = product_tactics(ctx, step)
    return ", bytes as they are stored, exact sums" if name in ways and ways[name].tile is not None else ""


def explain(ctx: Lowering, step: Sums) -> None:
    """Notes at the step's launches why they are these."""
    launches = [launch for launch in ctx.trace.steps if isinstance(launch, Launch)]
    if launches:
        note = described(ctx, step)
        for launch in launches:
            launch.note = note


def by_rules(ctx: Lowering) -> str:
    """Why a step has the tactic that rules prefer."""
    return "chosen by rules, which deterministic=1 pins" if ctx.options.deterministic else "chosen by rules"
