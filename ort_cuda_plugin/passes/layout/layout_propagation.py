"""Channels-last (NHWC) layout propagation for convolutions on tensor cores.

Convolutions that need NHWC, and the steps between them, keep their images (activation tensors) in NHWC. An image that
another step needs in the model's order (NCHW) is copied once. Outputs of the cluster stay in the model's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...kernels.contraction.epilogue_patterns import convolution_form
from ...kernels.conv.channels_last import (
    channels_first,
    empty_channels_last,
    is_channels_last,
    is_depthwise_beside_mma,
    matrix_convolution_kind,
    padded_channels,
    place_stride,
    prefers_channels_last,
    suits_cudnn,
    to_memory,
)
from ...kernels.elementwise.index_map import gather_map
from ...kernels.gemm.tile_shapes import piece_of
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, divides
from ...program.lowering.context import Lowering, Tensor
from ...program.steps.steps import Attend, Contract, Convolve, Map, dense
from ...program.steps.tensor import Buffer, BufferKind
from ...program.steps.trace import Launch, Step
from ..analysis.affine_view import exact_quotient
from ..analysis.uses import Uses
from ..simplification.concat_elimination import Copy, with_view

__all__ = ["propagate_channels_last"]


def propagate_channels_last(ctx: Lowering, steps: Sequence[Step]) -> list[Step]:
    """Propagate the channels-last layout (NHWC) from convolutions on tensor cores to all steps between them.

    Assumes: convolutions have one channel axis where cuDNN computes them.
    Guarantees: images of such convolutions are in NHWC, or are copied to NHWC once. Steps that do not support NHWC get
        a dense copy. Launches that operators recorded, such as pooling, are recorded again for the new strides.
    Example: ``r = Conv(x NCHW); y = Conv(r NCHW)`` -> ``x' = transpose(x); r NHWC = Conv(x'); y = Conv(r)``.
    """
    wanting = {number for number, step in enumerate(steps) if isinstance(step, Convolve) and _gains(ctx, step)}
    return _Propagation(ctx, steps, wanting).run() if wanting else list(steps)


def _gains(ctx: Lowering, step: Convolve) -> bool:
    if 0 in step.shape or not prefers_channels_last(ctx, step):
        return False
    is_ours = matrix_convolution_kind(ctx, step) or is_depthwise_beside_mma(ctx, step)
    return bool(is_ours) or convolution_form(ctx, step) is not None


class _Propagation:
    """State of the propagation. ``wanting`` has the positions of the convolutions that need NHWC."""

    def __init__(self, ctx: Lowering, steps: Sequence[Step], wanting: set[int]) -> None:
        self.ctx, self.steps, self.wanting = ctx, steps, wanting
        self.uses = Uses(enumerate(steps))
        self.moves: dict[Buffer, Copy] = {}
        """For each buffer that changes its layout: the tensor in the old layout (source), and in NHWC (target)."""
        self.refusing: dict[Buffer, set[int]] = {}
        """For each such buffer, the positions of the steps that still use the old layout."""
        self.before: dict[int, list[Step]] = {}
        self.after: dict[int, list[Step]] = {}
        self.copies: dict[tuple[Buffer, Dim, tuple[Dim, ...], tuple[Dim, ...], int], Tensor] = {}

    def run(self) -> list[Step]:
        found: list[Tensor] = []
        for number in sorted(self.wanting):
            step = self.steps[number]
            assert isinstance(step, Convolve)
            found += [step.operands[0], *(y for _, y in step.outputs)]
        for x in found:
            self._move(x, demanded=True)
        self._spread()
        result: list[Step] = []
        for number, step in enumerate(self.steps):
            new = self._rewritten(number, step)
            result += [*self.before.get(number, ()), *new, *self.after.get(number, ())]
        return result

    def _spread(self) -> None:
        """Move further images to NHWC: those that a map reads or writes elementwise together with an image that has
        moved, and those that a launch uses with such an image, if the launch can be recorded again.

        Such an image moves only if all steps that use it support NHWC.
        """
        pending = list(self.moves)
        while pending:  # terminates: each buffer moves, and is appended, at most once
            shape = self.moves[pending[-1]].source.shape
            for number in self.uses.users(pending.pop()):
                step = self.steps[number]
                tensors: list[Tensor] = []
                if type(step) is Map and step.shape == shape:
                    tensors = [x for _, x in (*step.inputs, *step.outputs) if x.shape == shape]
                elif isinstance(step, Launch) and step.remake is not None:
                    tensors = [arg for arg in step.args if isinstance(arg, Tensor) and arg.rank == len(shape)]
                pending += [x.buffer for x in tensors if self._move(x, demanded=False)]

    def _move(self, x: Tensor, demanded: bool) -> bool:
        """Change the image that contains x to NHWC; return False if that is impossible.

        With ``demanded``, steps that do not support NHWC use a copy in the old layout; otherwise all steps must support
        NHWC.
        """
        whole = _whole_image(x)
        if whole is None or whole.buffer in self.moves:
            return False
        move = Copy(0, whole, empty_channels_last(self.ctx, whole.shape, x.dtype))
        users = sorted(self.uses.users(whole.buffer))
        refusing = {number for number in users if not self._accepts(number, move)}
        if refusing and not (demanded and self._is_bridged(whole.buffer, refusing)):
            return False
        self.moves[whole.buffer], self.refusing[whole.buffer] = move, refusing
        readers = refusing.intersection(self.uses.readers(whole.buffer))
        writers = refusing.intersection(self.uses.writers(whole.buffer))
        if writers:
            self.after.setdefault(writers.pop(), []).append(self._copied(whole, move.target))
        elif readers:
            self.before.setdefault(min(readers), []).append(self._copied(move.target, whole))
        return True

    def _is_bridged(self, buffer: Buffer, refusing: set[int]) -> bool:
        """Return whether one copy serves all ``refusing`` steps: after the only writer, or before the first reader."""
        writers = set(self.uses.writers(buffer))
        if refusing & writers:
            return len(writers) == 1 and writers.isdisjoint(self.uses.readers(buffer))
        return max(writers) < min(refusing)

    def _accepts(self, number: int, move: Copy) -> bool:
        step = self.steps[number]
        if isinstance(step, Launch):
            views = [arg for arg in step.args if isinstance(arg, Tensor) and arg.buffer is move.source.buffer]
            return step.remake is not None and all(_viewed(x, move) is not None for x in views)
        if not isinstance(step, Map) or isinstance(step, Attend):
            return False
        if number in self.wanting and isinstance(step, Convolve):
            x, w = step.operands
            if w.buffer is move.source.buffer or (x.buffer is move.source.buffer and _viewed(x, move) is None):
                return False
            return with_view(replace(step, operands=()), move) is not None
        moved = with_view(step, move)
        if isinstance(moved, Contract) and move.target.buffer in {x.buffer for x in moved.summed}:
            return all(1 in x.strides[-2:] for x in moved.operands)
        return moved is not None

    def _view(self, number: int, x: Tensor) -> Tensor:
        """Return x as step ``number`` accesses it: a view in NHWC if the image has moved for this step, else x."""
        move = self.moves.get(x.buffer)
        if move is None or number in self.refusing[x.buffer]:
            return x
        view = _viewed(x, move)
        assert view is not None
        return view

    def _rewritten(self, number: int, step: Step) -> list[Step]:
        moves = [self.moves[buffer] for buffer in (*step.reads, *step.writes) if buffer in self.moves]
        moves = [move for move in dict.fromkeys(moves) if number not in self.refusing[move.source.buffer]]
        self.ctx.nodes = step.nodes
        if isinstance(step, Launch) and moves:
            assert step.remake is not None
            return list(step.remake(lambda x: self._view(number, x)))
        if number in self.wanting:
            assert isinstance(step, Convolve)
            x, w = step.operands
            added, x = self._ordered(number, step, self._view(number, x))
            rest: Step | None = replace(step, operands=())
            for move in moves:
                assert rest is not None
                rest = with_view(rest, move)
            assert isinstance(rest, Convolve)
            return [*added, replace(rest, operands=(x, w))]
        changed: Step | None = step
        for move in moves:
            assert changed is not None
            changed = with_view(changed, move)
        assert changed is not None
        return [changed]

    def _ordered(self, number: int, step: Convolve, x: Tensor) -> tuple[list[Step], Tensor]:
        """Return (steps that copy x to NHWC, the copy); no steps are needed if an earlier copy or x can be read."""
        padded = padded_channels(self.ctx, step)
        if not padded and (is_channels_last(x) or _try_reading_in_place(self.ctx, step, x)):
            return [], x
        key = x.buffer, x.offset, x.strides, x.shape, padded
        known = self.copies.get(key)
        if known is not None:
            return [], known
        channels = x.shape[1]
        with self.ctx.recording() as made:
            if padded:
                assert isinstance(channels, int)
                memory = gather_map(
                    self.ctx,
                    [*(x.shape[axis] for axis in to_memory(x.rank)[:-1]), padded],
                    x.dtype,
                    lambda maps, c: maps.source(x).at([c[0], c[-1], *c[1:-1]], c[-1] < channels),
                )
                result = channels_first(self.ctx, memory)
            else:
                result = empty_channels_last(self.ctx, x.shape, x.dtype)
                made.append(self._copied(x, result))
        if not self.uses.writers(x.buffer) or max(self.uses.writers(x.buffer)) < number:
            self.copies[key] = result
        return made, result

    def _copied(self, source: Tensor, target: Tensor) -> Map:
        leaf = Scalar(source.dtype, "leaf")
        writers = self.uses.writers(source.buffer) or self.uses.writers(target.buffer)
        nodes = self.steps[writers[-1]].nodes if writers else self.ctx.nodes
        return Map(nodes, source.shape, ((leaf, source),), ((leaf, target),))


def _try_reading_in_place(ctx: Lowering, step: Convolve, x: Tensor) -> bool:
    """Return whether the plugin's kernel can read x, a slice of an image's channels, without a copy to NHWC.

    The pixels must have a constant stride, and each must begin at a provable multiple of 16 bytes.
    """
    kind = matrix_convolution_kind(ctx, step)
    if suits_cudnn(ctx, step) or not kind:
        return False
    stride, piece = place_stride(x), piece_of(kind)
    return stride is not None and divides(piece, stride) and divides(piece, x.offset)


def _whole_image(x: Tensor) -> Tensor | None:
    """Return the intermediate [images, channels, space...] that x views, whole or a slice of channels; else None."""
    if x.rank < 3 or x.buffer.kind is not BufferKind.SCRATCH:
        return None
    if dense(x):
        return x
    channels = exact_quotient(x.strides[0], x.strides[1])
    if channels is None:
        return None
    whole = Tensor(x.dtype, (x.shape[0], channels, *x.shape[2:]), x.buffer)
    same = all(dim == 1 or a == b for dim, a, b in zip(x.shape, x.strides, whole.strides, strict=True))
    return whole if same and whole.nbytes == x.buffer.nbytes else None


def _viewed(x: Tensor, move: Copy) -> Tensor | None:
    """Return x, a view of the source of ``move``, as a view of its target; None if strides cannot express the view."""
    leaf = Scalar(x.dtype, "leaf")
    moved = with_view(Map((), x.shape, ((leaf, x),), ()), move)
    return moved.inputs[0][1] if isinstance(moved, Map) else None
