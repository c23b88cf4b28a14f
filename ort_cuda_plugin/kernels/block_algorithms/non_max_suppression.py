"""Greedy non-maximum suppression: a box is kept unless it overlaps a kept box of a higher score too much.

A block processes the boxes of one batch and class, sorted by score, in chunks of one box per thread. Each thread first
compares its box with the boxes kept from earlier chunks. Then the block repeatedly keeps the first remaining box of the
chunk, and each thread compares its box with that one. So barriers are needed for each kept box, not for each box.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...model.ir import DType
from ...program.lowering.context import Lowering, Tensor
from ..codegen.launch_geometry import no_wider
from ..codegen.plain_function import Expression, Lines, plain_kernel

if TYPE_CHECKING:
    from numba import cuda, float32, int32, int64, uint8
    from numba.cuda import libdevice

    from ...compiler.intrinsics import Pointer, array_pointer, ballot, choose, quotient_i64, shfl_i32

EMULATED_THREADS, THREADS, WARP = 32, 1024, 32
"""Threads per block on the emulated device, maximum threads per block on a GPU, and threads per warp."""


_center_corners = ", ".join(
    f"float32(boxes[at + {middle}] {sign} float32(boxes[at + {size}] / float32(2)))"
    for sign in "-+"
    for middle, size in ((1, 3), (0, 2))
)
_any_corners = ", ".join(f"{edge}(boxes[at + {i}], boxes[at + {i + 2}])" for edge in ("min", "max") for i in (0, 1))
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


@plain_kernel
def _suppress(
    kept: Pointer[int],
    chosen: Pointer[float],
    order: Pointer[int],
    boxes: Pointer[float],
    scores: Pointer[float],
    limit: Pointer[int],
    iou_threshold: Pointer[float],
    score_threshold: Pointer[float],
    classes: int,
    n: int,
    *,
    threads: int,
    warps: int,
    corners_of: Expression,
    is_candidate: Expression,
    compare: Lines,
) -> None:
    row = int64(cuda.blockIdx.x)
    thread = int64(cuda.threadIdx.x)
    lane = thread & 31
    warp = thread >> 5
    base = row * n
    corners = quotient_i64(row, classes) * n * 4
    firsts = array_pointer(cuda.shared.array(2 * warps, int32))
    shared_box = array_pointer(cuda.shared.array(8, float32))
    left = int64(limit[0])
    number = int64(0)
    turn = int64(0)
    for piece in range(0, n, threads):
        i = piece + thread
        place = base + min(i, n - 1)
        # To estimate its time, the plugin may run the kernel alone, with an uninitialized ``order``: clamp the index.
        box = min(max(int64(order[place]), int64(0)), n - 1)
        at = corners + box * 4
        box_y1, box_x1, box_y2, box_x2 = corners_of(boxes, at)
        area = float32((box_y2 - box_y1) * (box_x2 - box_x1))
        is_left = (i < n) & (left > 0)
        if is_left:
            is_left = is_candidate(base, box)
        # A box without an area neither suppresses boxes nor is suppressed.
        is_compared = is_left & (area > float32(0))
        for j in range(choose(left > 0, number, int64(0))):
            if is_compared:
                a_y1, a_x1 = chosen[(base + j) * 4], chosen[(base + j) * 4 + 1]
                a_y2, a_x2 = chosen[(base + j) * 4 + 2], chosen[(base + j) * 4 + 3]
                compare(a_y1, a_x1, a_y2, a_x2)
        is_kept = False
        while left > 0:
            mask = ballot(is_left)
            if lane == 0:
                lowest = int32(libdevice.ffs(int32(mask)))
                firsts[turn * warps + warp] = choose(mask != 0, int32(int32(thread) + lowest - 1), int32(threads))
            cuda.syncthreads()
            of_warp = firsts[turn * warps + min(lane, int64(warps - 1))]
            found = ballot((lane < warps) & (of_warp < threads))
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
                compare(a_y1, a_x1, a_y2, a_x2)
            a_area = float32((a_y2 - a_y1) * (a_x2 - a_x1))
            number += choose(a_area > float32(0), int64(1), int64(0))
            left -= 1
            turn = 1 - turn
        if i < n:
            kept[base + i] = choose(is_kept, uint8(1), uint8(0))
        cuda.syncthreads()


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
    """Return a mask of the boxes that are kept: bool [batches * classes, n], in the order of ``order``.

    ``boxes`` is float32 [batches, n, 4], two opposite corners (y, x, y, x) or with ``center`` (x, y, width, height);
    ``scores`` float32 [batches, classes, n]; ``order`` int64 [batches * classes, n], the boxes of each batch and class
    by descending score. ``limit`` (int64, one element) is the maximum number of boxes to keep per batch and class. The
    thresholds are float32 tensors of one element. Without a ``score_threshold`` (None), boxes of any score are kept.
    """
    batches, classes, n = scores.shape
    rows = batches * classes
    kept = ctx.empty((rows, n), DType.BOOL)
    threads = EMULATED_THREADS if ctx.device.emulated else no_wider(THREADS, n)
    candidate = "True" if score_threshold is None else "scores[base + box] > score_threshold[0]"
    _suppress.launch(
        ctx,
        "suppress_boxes",
        rows,
        threads,
        kept=kept,
        chosen=ctx.empty((rows, n, 4), DType.FLOAT32),
        order=order,
        boxes=ctx.contiguous(boxes),
        scores=ctx.contiguous(scores),
        limit=limit,
        iou_threshold=iou_threshold,
        score_threshold=score_threshold,
        classes=classes,
        n=n,
        warps=threads // WARP,
        corners_of=_center_corners if center else _any_corners,
        is_candidate=candidate,
        compare=_compare,
    )
    return kept
