"""Selection of a step's schedule: by measured times if there is a tuner, else by rules."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from ..kernels.contraction.epilogue_patterns import LibraryForm, product_form
from ..kernels.conv.channels_last import matrix_convolution_kind
from ..kernels.gemm.tile_shapes import INTEGERS
from ..kernels.library.library_attention import AttentionForm, attention_form
from ..kernels.library.library_calls import cudnn_form
from ..model.ir import Unsupported
from ..program.expressions.symbolic import hint
from ..program.lowering.context import Lowering
from ..program.steps.quarantine import kinds_for
from ..program.steps.schedule import Choice, Schedule
from ..program.steps.steps import Attend, Contract, Convolve, Sums
from .attention import attention_choices, own_attention_choices
from .conv import conv_choices, own_conv_schedules
from .gemm import gemm_choices, integer_kind, own_gemm_choices
from .reasons import by_rules

__all__ = ["candidates", "choose", "has_integer_operands", "library_epilogue", "own_choice", "scheduled"]

AnySums = TypeVar("AnySums", bound=Sums)


def candidates(ctx: Lowering, step: Sums) -> list[Choice]:
    """Return the candidates for the step, the rules' preference first, without duplicate schedules.

    The rules or the autotuner select one of them. A library may still decline its candidate. Quarantined schedules are
    left out, so that the list may be empty. Raises TypeError unless the step is a GEMM, a convolution or attention.
    """
    match step:
        case Contract():
            found = gemm_choices(ctx, step)
        case Convolve():
            found = conv_choices(ctx, step)
        case Attend():
            found = attention_choices(ctx, step)
        case _:
            raise TypeError(f"step: got {type(step).__name__}, expected a Contract, Convolve or Attend")
    unique: dict[Schedule, Choice] = {}
    epilogue = _quarantined_epilogue(ctx, step)
    for choice in found:
        if ctx.device.quarantine.allows(step, choice.schedule, epilogue):
            unique.setdefault(choice.schedule, choice)
    return list(unique.values())


def own_choice(ctx: Lowering, step: Sums) -> Choice:
    """Return the choice that the rules prefer among the plugin's own kernels.

    Raises:
        Unsupported: all of these kernels are quarantined.
    """
    match step:
        case Contract():
            found = own_gemm_choices(ctx, step)
        case Convolve():
            found = (Choice(schedule, by_rules(ctx)) for schedule in own_conv_schedules(ctx, step))
        case Attend():
            found = own_attention_choices(ctx, step)
        case _:
            raise TypeError(f"step: got {type(step).__name__}, expected a Contract, Convolve or Attend")
    for choice in found:
        if ctx.device.quarantine.allows(step, choice.schedule):
            return choice
    raise Unsupported("quarantine", ctx.device.quarantine.why_none(step), step.node)


def has_integer_operands(ctx: Lowering, step: Sums) -> bool:
    """Tell whether the plugin's kernel would multiply the 8-bit codes of the operands on tensor cores."""
    if isinstance(step, Convolve):
        return matrix_convolution_kind(ctx, step) in INTEGERS
    return isinstance(step, Contract) and bool(integer_kind(ctx, step))


def choose(ctx: Lowering, step: Sums) -> Choice:
    """Return the candidate with the least measured time, or the rules' preference if there are no measurements."""
    found = candidates(ctx, step) or [own_choice(ctx, step)]
    if ctx.tuner is not None and all(hint(dim) != 0 for dim in step.shape):
        # Do not measure schedules with two launches. In each Run one launch has an empty grid, and the other one equals
        # that of a single-launch schedule, which is also a candidate.
        single = [choice for choice in found if not choice.schedule.gemv_rows and not choice.schedule.im2col_pixels]
        if len(single) > 1 and (measured := ctx.tuner.choice(ctx, step, single)) is not None:
            return measured
    return found[0]


def scheduled(ctx: Lowering, step: AnySums, choice: Choice | None = None) -> AnySums:
    """Return the step with the schedule of ``choice``, by default its own schedule, or else that of `own_choice`."""
    if choice is None:
        if step.schedule is not None:
            return step
        choice = own_choice(ctx, step)
    ctx.take(choice, kinds_for(step, choice.schedule))
    note = ctx.device.quarantine.note(step, _quarantined_epilogue(ctx, step))
    return replace(step, schedule=choice.schedule, why=choice.why + note)


def library_epilogue(ctx: Lowering, step: Sums) -> str:
    """Return the part of the step's epilogue that a library call for it computes, such as "bias, ReLU".

    Returns "none" if the call computes no part, "" if the library cannot compute the step.
    """
    form: LibraryForm | AttentionForm | None = None
    match step:
        case Contract():
            form = product_form(ctx, step)
        case Convolve():
            form = cudnn_form(ctx, step)
        case Attend():
            form = attention_form(ctx, step)
    if form is None:
        return ""
    if isinstance(form, AttentionForm):
        return "none" if form.bias is None and form.computed is None else "bias"
    names = ("" if form.residual is None else "residual", "" if form.bias is None else "bias", form.activation)
    return ", ".join(filter(None, names)) or "none"


def _quarantined_epilogue(ctx: Lowering, step: Sums) -> str:
    """Return the epilogue by which a library call for the step may be quarantined; "" if the quarantine names none."""
    return library_epilogue(ctx, step) if ctx.device.quarantine.names_epilogues else ""
