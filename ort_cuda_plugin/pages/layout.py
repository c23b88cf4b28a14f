"""Layered graph layout (Sugiyama): rows of boxes, and routes of edges that pass between the boxes of a row.

An edge that skips rows runs through a *dummy*, a narrow slot of its own, in each row that it skips. All edges of one
source share their dummies (a *trunk*), from which they branch off above their targets. An edge therefore leaves the
gap between two rows only in a dummy or at its ends, and never runs behind a box.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

ROW_GAP = 36
BOX_GAP = 22
TRUNK_GAP = 14
"""Distances between rows, between boxes of a row, and between a dummy and its neighbor in a row, pixels."""
LONGEST_ROW = 40
"""Maximum boxes side by side; a layer with more boxes takes several rows of the drawing."""
_ORDER_SWEEPS = 8
_X_SWEEPS = 8
_SLIGHT = 4
"""Distance from a box's middle up to which its only edge arrives straight from above, pixels."""
_STRAIGHT = 8.0
"""Weight with which a dummy aligns with a dummy in the next row; all other alignments have the weight 1."""


@dataclass(frozen=True)
class Route:
    """The edges of one source. ``trunk`` has the x of each dummy, in the rows below the source's.

    ``ends`` maps each target, which lies below the source, to the x at which its edge arrives. An edge that closed a
    cycle was turned around before (`Layout.turned`), and belongs to the route of its upper end.
    """

    trunk: tuple[int, ...]
    ends: Mapping[Hashable, int]


@dataclass(frozen=True)
class Layout:
    """The upper left corner of each box, the row of each box, the top and bottom of each row, and a route per source.

    ``turned`` are the edges that closed a cycle, in the direction in which they are drawn.
    """

    corners: Mapping[Hashable, tuple[int, int]]
    row_of: Mapping[Hashable, int]
    rows: Sequence[tuple[int, int]]
    routes: Mapping[Hashable, Route]
    width: int
    height: int
    turned: frozenset[tuple[Hashable, Hashable]]


@dataclass(eq=False)
class _Slot:
    """A box or dummy in a row. ``x`` is its middle."""

    width: float
    key: Hashable = None
    is_dummy: bool = False
    above: list[_Slot] = field(default_factory=list)
    below: list[_Slot] = field(default_factory=list)
    x: float = 0.0


def layout(sizes: Mapping[Hashable, tuple[int, int]], edges: Sequence[tuple[Hashable, Hashable]]) -> Layout:
    """Return the layout of boxes with these widths and heights. Edges that close a cycle are turned around."""
    known = [(s, t) for s, t in dict.fromkeys(edges) if s in sizes and t in sizes and s != t]
    turned = frozenset((t, s) for s, t in _closing(list(sizes), known))
    directed = list(dict.fromkeys((t, s) if (t, s) in turned else (s, t) for s, t in known))
    row_of = _rows(list(sizes), directed)
    boxes = {key: _Slot(width, key) for key, (width, _) in sizes.items()}
    rows: list[list[_Slot]] = [[] for _ in range(max(row_of.values(), default=-1) + 1)]
    for key, box in boxes.items():
        rows[row_of[key]].append(box)
    trunks = _trunks(boxes, rows, row_of, directed)
    _order(rows)
    _set_x(rows)
    left = min((slot.x - slot.width / 2 for row in rows for slot in row), default=0.0)
    right = max((slot.x + slot.width / 2 for row in rows for slot in row), default=0.0)
    spans, y = [], 0
    for row in rows:
        height = max((sizes[slot.key][1] for slot in row if not slot.is_dummy), default=0)
        spans.append((y, y + height))
        y += height + ROW_GAP
    corners = {key: (round(box.x - box.width / 2 - left), spans[row_of[key]][0]) for key, box in boxes.items()}
    ends = _ends(boxes, trunks, row_of, directed, left)
    routes = {
        key: Route(tuple(round(dummy.x - left) for dummy in trunks.get(key, ())), arrivals)
        for key, arrivals in ends.items()
    }
    return Layout(corners, row_of, spans, routes, round(right - left), max(y - ROW_GAP, 0), turned)


def _closing(keys: Sequence[Hashable], edges: Sequence[tuple[Hashable, Hashable]]) -> set[tuple[Hashable, Hashable]]:
    """Return the edges that close a cycle, as a depth-first search finds them."""
    below: dict[Hashable, list[Hashable]] = {key: [] for key in keys}
    for source, target in edges:
        below[source].append(target)
    closing: set[tuple[Hashable, Hashable]] = set()
    state: dict[Hashable, int] = {}  # 1: on the path of the search, 2: done
    for start in keys:
        if start in state:
            continue
        state[start] = 1
        path = [(start, iter(below[start]))]
        while path:
            key, targets = path[-1]
            for target in targets:
                if state.get(target) == 1:
                    closing.add((key, target))
                elif target not in state:
                    state[target] = 1
                    path.append((target, iter(below[target])))
                    break
            else:
                state[key] = 2
                path.pop()
    return closing


def _rows(keys: Sequence[Hashable], edges: Sequence[tuple[Hashable, Hashable]]) -> dict[Hashable, int]:
    """Return the row of each box, below all boxes on which it depends. The edges have no cycle."""
    waits = dict.fromkeys(keys, 0)
    below: dict[Hashable, list[Hashable]] = {key: [] for key in keys}
    for source, target in edges:
        below[source].append(target)
        waits[target] += 1
    layer = dict.fromkeys(keys, 0)
    sources = [key for key in keys if not waits[key]]
    ready = list(sources)
    for key in ready:  # the loop appends to `ready`
        for target in below[key]:
            layer[target] = max(layer[target], layer[key] + 1)
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    for key in sources:  # move each box without inputs to the layer above its first reader
        layer[key] = max(min((layer[target] for target in below[key]), default=1) - 1, 0)
    members: dict[int, list[Hashable]] = {}
    for key in keys:
        members.setdefault(layer[key], []).append(key)
    row_of: dict[Hashable, int] = {}
    row = 0
    for number in sorted(members):
        for index, key in enumerate(members[number]):
            row_of[key] = row + index // LONGEST_ROW
        row += -(-len(members[number]) // LONGEST_ROW)
    return row_of


def _trunks(
    boxes: Mapping[Hashable, _Slot],
    rows: Sequence[list[_Slot]],
    row_of: Mapping[Hashable, int],
    edges: Sequence[tuple[Hashable, Hashable]],
) -> dict[Hashable, list[_Slot]]:
    """Add dummies to the rows, and connect each slot with those above and below it; return the dummies by source."""
    trunks: dict[Hashable, list[_Slot]] = {}
    for source, target in edges:
        trunk = trunks.setdefault(source, [])
        first = row_of[source] + 1
        for row in range(first + len(trunk), row_of[target]):
            dummy = _Slot(0.0, is_dummy=True)
            _connect(trunk[-1] if trunk else boxes[source], dummy)
            trunk.append(dummy)
            rows[row].append(dummy)
        last = row_of[target] - first
        _connect(trunk[last - 1] if last else boxes[source], boxes[target])
    return trunks


def _connect(upper: _Slot, lower: _Slot) -> None:
    upper.below.append(lower)
    lower.above.append(upper)


def _order(rows: Sequence[list[_Slot]]) -> None:
    """Sort each row by the mean position of neighbors (barycenter), down and up in turn, to reduce crossings."""
    at = {slot: float(index) for row in rows for index, slot in enumerate(row)}
    for sweep in range(_ORDER_SWEEPS):
        is_down = sweep % 2 == 0
        for row in rows if is_down else reversed(rows):
            wish = {}
            for slot in row:
                others = slot.above if is_down else slot.below
                wish[slot] = sum(at[other] for other in others) / len(others) if others else at[slot]
            row.sort(key=wish.__getitem__)
            at.update((slot, index - (len(row) - 1) / 2) for index, slot in enumerate(row))


def _set_x(rows: Sequence[Sequence[_Slot]]) -> None:
    """Set the x of all slots: near their neighbors, in the order of their row, without overlaps."""
    for row in rows:
        _near(row, [(0.0, 1.0)] * len(row))
    for sweep in range(_X_SWEEPS):
        is_down = sweep % 2 == 0
        for row in rows if is_down else reversed(rows):
            _near(row, [_wish(slot, is_down) for slot in row])


def _wish(slot: _Slot, is_down: bool) -> tuple[float, float]:
    """Return the target x of a slot, and the weight of this target."""
    others = (slot.above if is_down else slot.below) or slot.above or slot.below
    if not others:
        return slot.x, 0.1
    weights = [_STRAIGHT if slot.is_dummy and other.is_dummy else 1.0 for other in others]
    x = sum(weight * other.x for weight, other in zip(weights, others, strict=True)) / sum(weights)
    return x, max(weights)


def _near(row: Sequence[_Slot], wishes: Sequence[tuple[float, float]]) -> None:
    """Set each x of a row as near as possible to its target: least squares, by pooling adjacent violators."""
    if not row:
        return
    steps = [(a.width + b.width) / 2 + (TRUNK_GAP if a.is_dummy or b.is_dummy else BOX_GAP) for a, b in pairwise(row)]
    offsets = [0.0, *accumulate(steps)]
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number of slots
    for (wish, weight), offset in zip(wishes, offsets, strict=True):
        mean, total, count = wish - offset, weight, 1
        while blocks and blocks[-1][0] > mean:
            other, more, size = blocks.pop()
            mean = (mean * total + other * more) / (total + more)
            total, count = total + more, count + size
        blocks.append((mean, total, count))
    index = 0
    for mean, _, count in blocks:
        for slot in row[index : index + count]:
            slot.x = mean + offsets[index]
            index += 1


def _ends(
    boxes: Mapping[Hashable, _Slot],
    trunks: Mapping[Hashable, Sequence[_Slot]],
    row_of: Mapping[Hashable, int],
    edges: Sequence[tuple[Hashable, Hashable]],
    left: float,
) -> dict[Hashable, dict[Hashable, int]]:
    """Return the x at which each edge arrives: spread over the middle of the target, in the order of their origins."""
    arriving: dict[Hashable, list[tuple[float, int, Hashable]]] = {}
    for number, (source, target) in enumerate(edges):
        last = row_of[target] - row_of[source] - 1
        origin = trunks[source][last - 1] if last else boxes[source]
        arriving.setdefault(target, []).append((origin.x, number, source))
    ends: dict[Hashable, dict[Hashable, int]] = {source: {} for source, _ in edges}
    for target, found in arriving.items():
        box = boxes[target]
        apart = min(box.width * 0.6 / len(found), 16)
        if len(found) == 1 and abs(found[0][0] - box.x) <= _SLIGHT:
            ends[found[0][2]][target] = round(found[0][0] - left)
            continue
        for index, (_, _, source) in enumerate(sorted(found, key=lambda each: each[:2])):
            ends[source][target] = round(box.x + (index - (len(found) - 1) / 2) * apart - left)
    return ends
