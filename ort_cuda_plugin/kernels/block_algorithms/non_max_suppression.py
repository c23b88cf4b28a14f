"""Greedy suppression of boxes: a box is kept unless one that was kept before it overlaps it too much.

A block has a row of boxes, the best first, and goes through it by pieces. A thread has one box of a piece. It compares
it with the boxes that earlier pieces have kept; then the first box that is left is kept, again and again, and those
behind it are compared with it. So the block meets once for a box that is kept, not for each box.
"""

from __future__ import annotations

from ...model.ir import DType
from ...program.lowering.context import Lowering, Tensor
from ..codegen.launch_geometry import no_wider
from ..codegen.simt_fragments import indent
from ..codegen.source import KernelBuilder

__all__ = ["suppress_boxes"]

EMULATED_THREADS, THREADS, WARP = 32, 1024, 32

_center_corners = """
box_y, box_x = boxes[at + 1], boxes[at]
box_h, box_w = float32(boxes[at + 3] / float32(2)), float32(boxes[at + 2] / float32(2))
box_y1, box_y2 = float32(box_y - box_h), float32(box_y + box_h)
box_x1, box_x2 = float32(box_x - box_w), float32(box_x + box_w)
"""
_any_corners = """
box_y1, box_y2 = min(boxes[at], boxes[at + 2]), max(boxes[at], boxes[at + 2])
box_x1, box_x2 = min(boxes[at + 1], boxes[at + 3]), max(boxes[at + 1], boxes[at + 3])
"""

_source = """
    row = int64(cuda.blockIdx.x)
    thread = int64(cuda.threadIdx.x)
    lane = thread & 31
    warp = thread >> 5
    base = row * n
    corners = quotient_i64(row, classes) * n * 4
    firsts = array_pointer(cuda.shared.array({two_warps}, int32))
    shared_box = array_pointer(cuda.shared.array(8, float32))
    left = int64(limit[0])
    number = int64(0)
    turn = int64(0)
    for piece in range(0, n, {threads}):
        i = piece + thread
        place = base + min(i, n - 1)
        # Where only some blocks run, to be counted, the order is what the memory had.
        box = min(max(int64(order[place]), int64(0)), n - 1)
        at = corners + box * 4
{corners}
        area = float32((box_y2 - box_y1) * (box_x2 - box_x1))
        is_left = (i < n) & (left > 0)
        if is_left:
            is_left = {candidate}
        # A box without an area suppresses none and is suppressed by none.
        is_compared = is_left & (area > float32(0))
        for j in range(choose(left > 0, number, int64(0))):
            if is_compared:
                a_y1, a_x1 = chosen[(base + j) * 4], chosen[(base + j) * 4 + 1]
                a_y2, a_x2 = chosen[(base + j) * 4 + 2], chosen[(base + j) * 4 + 3]
{compare_chosen}
        is_kept = False
        while left > 0:
            mask = ballot(is_left)
            if lane == 0:
                lowest = int32(libdevice.ffs(int32(mask)))
                firsts[turn * {warps} + warp] = choose(mask != 0, int32(int32(thread) + lowest - 1), int32({threads}))
            cuda.syncthreads()
            of_warp = firsts[turn * {warps} + min(lane, int64({warps} - 1))]
            found = ballot((lane < {warps}) & (of_warp < {threads}))
            if found == 0:
                break
            first = shfl_i32(of_warp, int32(libdevice.ffs(int32(found)) - 1))
            if thread == first:
                is_left = False
                is_compared = False
                is_kept = True
                shared_box[turn * 4], shared_box[turn * 4 + 1] = box_y1, box_x1
                shared_box[turn * 4 + 2], shared_box[turn * 4 + 3] = box_y2, box_x2
                if area > float32(0):
                    chosen[(base + number) * 4], chosen[(base + number) * 4 + 1] = box_y1, box_x1
                    chosen[(base + number) * 4 + 2], chosen[(base + number) * 4 + 3] = box_y2, box_x2
            cuda.syncthreads()
            a_y1, a_x1 = shared_box[turn * 4], shared_box[turn * 4 + 1]
            a_y2, a_x2 = shared_box[turn * 4 + 2], shared_box[turn * 4 + 3]
            if is_compared:
{compare}
            a_area = float32((a_y2 - a_y1) * (a_x2 - a_x1))
            number += choose(a_area > float32(0), int64(1), int64(0))
            left -= 1
            turn = 1 - turn
        if i < n:
            kept[base + i] = choose(is_kept, uint8(1), uint8(0))
        cuda.syncthreads()
"""
_compare = """
height = float32(min(a_y2, box_y2) - max(a_y1, box_y1))
width = float32(min(a_x2, box_x2) - max(a_x1, box_x1))
if height > float32(0) and width > float32(0):
    a_size = float32((a_y2 - a_y1) * (a_x2 - a_x1))
    shared = float32(height * width)
    union = float32(float32(a_size + area) - shared)
    if a_size > float32(0) and union > float32(0) and shared / union > iou_threshold[0]:
        is_left = False
        is_compared = False
"""


def suppress_boxes(
    ctx: Lowering,
    boxes: Tensor,
    scores: Tensor,
    order: Tensor,
    limit: Tensor,
    iou_threshold: Tensor,
    score_threshold: Tensor | None,
    *,
    center: bool,
) -> Tensor:
    """Non-maximum suppression: which boxes are kept, bool [batches * classes, n] in the order of ``order``.

    ``boxes`` is float32 [batches, n, 4], two opposite corners (y, x, y, x) or with ``center`` (x, y, width, height);
    ``scores`` float32 [batches, classes, n]; ``order`` int64 [batches * classes, n]. ``limit`` (int64) boxes at most
    are kept per row. The thresholds are float32 and of one element, as ``limit``.
    """
    batches, classes, n = scores.shape
    rows = batches * classes
    kept = ctx.empty((rows, n), DType.BOOL)
    threads = EMULATED_THREADS if ctx.device.emulated else no_wider(THREADS, n)
    candidate = "True" if score_threshold is None else "scores[base + box] > score_threshold[0]"
    builder = KernelBuilder()
    builder.tensor(kept, "kept", written=True)
    builder.tensor(ctx.empty((rows, n, 4), DType.FLOAT32), "chosen", written=True)
    builder.tensor(order, "order")
    builder.tensor(ctx.contiguous(boxes), "boxes")
    builder.tensor(ctx.contiguous(scores), "scores")
    builder.tensor(limit, "limit")
    builder.tensor(iou_threshold, "iou_threshold")
    if score_threshold is not None:
        builder.tensor(score_threshold, "score_threshold")
    builder.integers(classes=classes, n=n)
    body = _source.format(
        threads=threads,
        warps=threads // WARP,
        two_warps=2 * threads // WARP,
        candidate=candidate,
        corners=indent(_center_corners if center else _any_corners, 2),
        compare_chosen=indent(_compare, 4),
        compare=indent(_compare, 4),
    )
    builder.launch(ctx, "suppress_boxes", (rows, 1, 1), (threads, 1, 1), body=body)
    return kept
