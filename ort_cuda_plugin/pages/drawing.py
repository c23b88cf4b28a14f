"""Draws graphs as SVG: boxes in layers, each box below the boxes on which it depends, with few crossings of edges."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 168, 38
_ACROSS, _DOWN, _ASIDE = WIDTH + 18, HEIGHT + 34, WIDTH * 3 // 4
_SWEEPS = 6
_LETTERS = 24
_LONGEST_LAYER = 60
"""Maximum boxes side by side; a layer with more boxes takes several rows of the drawing."""
STYLE = """
svg.graph { background: #fafafa; border: 1px solid #ddd }
svg.graph text { font: 11px system-ui, sans-serif; fill: #222; pointer-events: none }
svg.graph path { fill: none; stroke: #999; stroke-width: 1.2 }
svg.graph path.copy { stroke: #d62728; stroke-width: 2.2 }
svg.graph rect { stroke: #555; stroke-width: 1 }
.scrolled { overflow: auto; max-height: 80vh }
"""


@dataclass(frozen=True)
class Box:
    """A node of a drawing. ``lines`` are its text, truncated; ``hint`` is its tooltip; ``link`` is an anchor."""

    lines: tuple[str, ...]
    colour: str
    hint: str = ""
    link: str = ""


@dataclass(frozen=True)
class Edge:
    """An arrow from one box to another, by their keys. ``is_copy``: between host and device."""

    source: Hashable
    target: Hashable
    hint: str = ""
    is_copy: bool = False


def drawing(boxes: Mapping[Hashable, Box], edges: Sequence[Edge]) -> str:
    """Return the graph as SVG. Edges from or to missing boxes are left out."""
    known = [edge for edge in edges if edge.source in boxes and edge.target in boxes and edge.source != edge.target]
    places = layout(list(boxes), [(edge.source, edge.target) for edge in known])
    width = max((x for x, _ in places.values()), default=0) + WIDTH + _ASIDE // 2
    height = max((y for _, y in places.values()), default=0) + HEIGHT + 16
    paths = "".join(_path(edge, places) for edge in known)
    drawn = "".join(_box(box, *places[name]) for name, box in boxes.items())
    return (
        f'<div class="scrolled"><svg class="graph" width="{width}" height="{height}" viewBox="-8 -8 {width} {height}">'
        f"{paths}{drawn}</svg></div>"
    )


def layout(names: Sequence[Hashable], edges: Sequence[tuple[Hashable, Hashable]]) -> dict[Hashable, tuple[int, int]]:
    """Return the upper left corner of each box. Edges that close a cycle are ignored."""
    layers = _layers(names, edges)
    above: dict[Hashable, list[Hashable]] = {name: [] for name in names}
    below: dict[Hashable, list[Hashable]] = {name: [] for name in names}
    for source, target in edges:
        below[source].append(target)
        above[target].append(source)
    rows: list[list[Hashable]] = [[] for _ in range(max(layers.values(), default=-1) + 1)]
    for name in names:
        rows[layers[name]].append(name)
    at = {name: float(index) for row in rows for index, name in enumerate(row)}
    for sweep in range(_SWEEPS):
        neighbours = above if sweep % 2 == 0 else below
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = {
                name: sum(at[other] for other in neighbours[name]) / len(neighbours[name])
                if neighbours[name]
                else at[name]
                for name in row
            }
            row.sort(key=lambda name: wanted[name])
            middle = sum(wanted.values()) / len(row)
            at.update((name, index - (len(row) - 1) / 2 + middle) for index, name in enumerate(row))
    return _placed(rows, at)


def _placed(rows: Sequence[Sequence[Hashable]], at: Mapping[Hashable, float]) -> dict[Hashable, tuple[int, int]]:
    places: dict[Hashable, tuple[float, int]] = {}
    y = 0
    for row in rows:
        for first in range(0, len(row), _LONGEST_LAYER):
            part = row[first : first + _LONGEST_LAYER]
            shift = at[part[0]] if first else 0.0
            places.update((name, ((at[name] - shift) * _ACROSS, y)) for name in part)
            y += _DOWN
    left = min((x for x, _ in places.values()), default=0.0)
    return {name: (round(x - left), y) for name, (x, y) in places.items()}


def _layers(names: Sequence[Hashable], edges: Sequence[tuple[Hashable, Hashable]]) -> dict[Hashable, int]:
    """Return the layer of each box, below all boxes on which it depends. Boxes of a cycle keep the given order."""
    waits = dict.fromkeys(names, 0)
    below: dict[Hashable, list[Hashable]] = {name: [] for name in names}
    for source, target in edges:
        below[source].append(target)
        waits[target] += 1
    layers = dict.fromkeys(names, 0)
    done: set[Hashable] = set()
    ready = [name for name in names if not waits[name]]
    rest = iter(names)
    while len(done) < len(names):
        if not ready:
            ready.append(next(name for name in rest if name not in done))
        name = ready.pop()
        if name in done:
            continue
        done.add(name)
        for target in below[name]:
            waits[target] -= 1
            if target not in done:
                layers[target] = max(layers[target], layers[name] + 1)
                if waits[target] == 0:
                    ready.append(target)
    return layers


def _path(edge: Edge, places: Mapping[Hashable, tuple[int, int]]) -> str:
    (x1, y1), (x2, y2) = places[edge.source], places[edge.target]
    x1, x2, y1 = x1 + WIDTH // 2, x2 + WIDTH // 2, y1 + HEIGHT
    middle = (y1 + y2) // 2
    aside = _ASIDE if y2 - y1 > _DOWN and abs(x2 - x1) < WIDTH else 0  # routes around the boxes between
    kind = ' class="copy"' if edge.is_copy else ""
    curve = f"M{x1} {y1}C{x1 + aside} {middle} {x2 + aside} {middle} {x2} {y2}"
    return f'<path{kind} d="{curve}"><title>{escape(edge.hint)}</title></path>'


def _box(box: Box, x: int, y: int) -> str:
    lines = "".join(
        f'<text x="{x + 6}" y="{y + 15 + 15 * number}">{escape(_cut(line))}</text>'
        for number, line in enumerate(box.lines[:2])
    )
    drawn = (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="{box.colour}">'
        f"<title>{escape(box.hint)}</title></rect>{lines}"
    )
    return f'<a href="#{escape(box.link)}">{drawn}</a>' if box.link else drawn


def _cut(line: str) -> str:
    return line if len(line) <= _LETTERS else f"{line[:8]}\N{HORIZONTAL ELLIPSIS}{line[9 - _LETTERS :]}"
