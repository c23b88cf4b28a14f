"""Graph of a model on pages: nodes, the steps that compute them, and two drawings of both.

One drawing has a box for each step of a Run, the other for each ONNX node. In both, a cluster is a frame around its
own drawing, and the model's inputs and outputs, and nodes of other providers, stand outside of the frames.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .kinds import kind_of
from .layout import Layout, layout

WIDTH, HEIGHT = 186, 50
_PORT_HEIGHT = 34
_PADDING, _TITLE = 16, 24
"""Sizes and distances of boxes and frames, pixels."""
_LONGEST_TITLE = 3
"""Maximum number of operators that a step's box names."""
SIGNS = (
    ("own", "the plugin runs it"),
    ("free", "no step: a view, a size, or computed once"),
    ("other", "another provider"),
    ("nowhere", "no provider"),
    ("copy", "copy between host and device"),
)
"""The frames and lines of a graph, by class of the style sheet, and their meaning, for `html.signs`."""
MANY_OUTSIDE = 150
"""Number of clusters and of nodes outside of clusters, together, above which each chain of nodes on another provider is
drawn as one box.
"""


@dataclass(frozen=True)
class GraphNode:
    """An ONNX node. ``inputs`` and ``outputs`` are names of values, without weights.

    ``cluster`` is the fused node that contains the node, "" if none. ``provider`` runs the node.
    ``is_own`` says that this is the plugin, ``is_nowhere`` that no provider runs the node.
    """

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cluster: str = ""
    provider: str = ""
    is_own: bool = True
    is_nowhere: bool = False
    reason: str = ""


@dataclass(frozen=True)
class GraphStep:
    """A step of a Run: a launch, library call or copy. ``cluster`` contains the ``nodes`` that it computes, by name.

    ``kind`` is the step's kind in a plan, ``amount`` its time or bytes, in the unit of `ModelGraph.unit`. ``facts`` are
    lines for the panel beside the graph. ``anchor`` is the fragment of the page's URL that selects the step.
    """

    anchor: str
    name: str
    kind: str
    cluster: str
    nodes: tuple[str, ...]
    op_types: tuple[str, ...]
    amount: float
    facts: tuple[str, ...] = ()

    @property
    def color(self) -> str:
        """Return the kind of kernel, a key of `KINDS`."""
        return kind_of(self.kind, self.op_types, self.name)


@dataclass(frozen=True)
class ModelGraph:
    """Nodes in topological order, steps in the order of a Run, and types of values such as ``FLOAT32[1, 64]``.

    ``copied`` are values that are copied between host and device, with whether they go to the device. ``unit`` is the
    unit of the steps' amounts.
    """

    nodes: Sequence[GraphNode]
    steps: Sequence[GraphStep]
    values: Mapping[str, str]
    unit: str
    copied: Mapping[str, bool] = field(default_factory=dict)


def node_anchor(node: str) -> str:
    """Return the fragment of the page's URL that selects a node."""
    return f"node {node}"


def graph_data(graph: ModelGraph) -> dict[str, Any]:
    """Return the drawings and the facts about nodes and steps, as data for the page's script.

    ``views`` has the drawings: "steps" only if steps are known. ``nodes`` and ``steps`` describe what the panel shows.
    """
    number_of = {node.name: number for number, node in enumerate(graph.nodes)}
    views = {"nodes": _View(graph, by_steps=False).data()}
    if graph.steps:
        views = {"steps": _View(graph, by_steps=True).data(), **views}
    return {
        "unit": graph.unit,
        "views": views,
        "steps": [
            {
                "id": step.anchor,
                "t": step.name,
                "k": step.color,
                "a": step.amount,
                "n": [number_of[name] for name in step.nodes if name in number_of],
                "f": list(step.facts),
            }
            for step in graph.steps
        ],
        "nodes": [
            {
                "id": node_anchor(node.name),
                "t": node.name,
                "o": node.op_type,
                "p": node.provider,
                "r": node.reason,
                "i": list(node.inputs),
                "w": list(node.outputs),
            }
            for node in graph.nodes
        ],
        "values": {
            name: graph.values[name]
            for node in graph.nodes
            for name in (*node.inputs, *node.outputs)
            if graph.values.get(name)
        },
        "copied": list(graph.copied),
    }


@dataclass
class _Drawn:
    """A box in a drawing. ``lines`` are its texts; ``refs`` the numbers of its steps and nodes.

    ``style`` is "own", "other", "nowhere", "port", "free" (a node that no step computes) or "cluster".
    """

    lines: tuple[str, ...]
    style: str
    kind: str = ""
    step: int = -1
    nodes: tuple[int, ...] = ()
    anchor: str = ""
    amount: float = 0.0
    height: int = HEIGHT


class _View:
    """One drawing: boxes with corners, and edges as trunks with branches; see `layout`."""

    def __init__(self, graph: ModelGraph, *, by_steps: bool) -> None:
        self.graph = graph
        self.by_steps = by_steps
        self.step_of: dict[str, int] = {}
        for number, step in enumerate(graph.steps):
            # If several steps compute a node, take the most expensive: kernels for other sizes take no time.
            for name in step.nodes:
                if name not in self.step_of or step.amount > graph.steps[self.step_of[name]].amount:
                    self.step_of[name] = number
        self.boxes: list[dict[str, Any]] = []
        self.edges: list[dict[str, Any]] = []
        self.clusters = list(dict.fromkeys(node.cluster for node in graph.nodes if node.cluster))
        read = Counter(name for node in graph.nodes for name in node.inputs)
        made = {name for node in graph.nodes for name in node.outputs}
        self.inputs = [name for name in read if name not in made]
        self.outputs = [name for node in graph.nodes for name in node.outputs if name not in read]

    def data(self) -> dict[str, Any]:
        width, height = self._whole()
        return {"w": width, "h": height, "boxes": self.boxes, "edges": self.edges}

    # ---- which box a node belongs to ----

    def _whole(self) -> tuple[int, int]:
        """Draw the model; return width and height."""
        nodes = self.graph.nodes
        group: dict[int, Hashable] = {n: node.cluster or n for n, node in enumerate(nodes)}
        if len(set(group.values())) > MANY_OUTSIDE:
            group = _chained(nodes, group)
        members: dict[Hashable, list[int]] = {}
        for number, key in group.items():
            members.setdefault(key, []).append(number)
        drawn: dict[Hashable, _Drawn] = {("in", name): self._port(name, "input") for name in self.inputs}
        inner: dict[Hashable, _Inner] = {}
        for key, numbers in members.items():
            if key in self.clusters:
                inner[key] = _Inner(self, numbers)
                names = f"cluster {self.clusters.index(str(key))}: {len(numbers)} nodes"
                drawn[key] = _Drawn((names,), "cluster", anchor=f"cluster-{self.clusters.index(str(key))}")
            else:
                drawn[key] = self._outside(numbers)
        drawn |= {("out", name): self._port(name, "output") for name in self.outputs}
        maker: dict[str, Hashable] = {name: ("in", name) for name in self.inputs}
        maker |= {name: group[number] for number, node in enumerate(nodes) for name in node.outputs}
        edges: dict[tuple[Hashable, Hashable], dict[str, bool]] = {}
        for number, node in enumerate(nodes):
            for name in node.inputs:
                if maker[name] != group[number]:
                    is_copy = name in self.graph.copied and self.graph.copied[name] == node.is_own
                    edges.setdefault((maker[name], group[number]), {})[name] = is_copy
        for name in self.outputs:
            edges.setdefault((maker[name], ("out", name)), {})[name] = False
        sizes = {key: inner[key].size if key in inner else (WIDTH, box.height) for key, box in drawn.items()}
        found = layout(sizes, list(edges))
        self.emit(found, drawn, edges, (_PADDING, _PADDING), sizes)
        for key, part in inner.items():
            x, y = found.corners[key]
            part.emit((x + 2 * _PADDING, y + _PADDING + _TITLE))
        return found.width + 2 * _PADDING, found.height + 2 * _PADDING

    def _port(self, name: str, what: str) -> _Drawn:
        return _Drawn((name, f"{what} {short_type(self.graph.values.get(name, ''))}"), "port", height=_PORT_HEIGHT)

    def _outside(self, numbers: Sequence[int]) -> _Drawn:
        nodes = [self.graph.nodes[number] for number in numbers]
        first = nodes[0]
        style = "own" if first.is_own else "nowhere" if first.is_nowhere else "other"
        provider = first.provider.removesuffix("ExecutionProvider")
        if len(nodes) > 1:
            lines = (f"{len(nodes)} nodes", provider, "")
            return _Drawn(lines, style, nodes=tuple(numbers), anchor=node_anchor(first.name))
        lines = (first.op_type, first.name, f"{provider}  {self._shape(first)}")
        return _Drawn(lines, style, nodes=tuple(numbers), anchor=node_anchor(first.name))

    def _shape(self, node: GraphNode) -> str:
        return next((short_type(found) for name in node.outputs if (found := self.graph.values.get(name))), "")

    def inside(self, numbers: Sequence[int]) -> tuple[dict[Hashable, _Drawn], dict[int, Hashable]]:
        """Return the boxes of a cluster's nodes, and the key of each node's box.

        The drawing by steps has no boxes for nodes without a step, such as views.
        """
        drawn: dict[Hashable, _Drawn] = {}
        keys: dict[int, Hashable] = {}
        for number in numbers:
            node = self.graph.nodes[number]
            step = self.step_of.get(node.name, -1)
            if step >= 0 or not self.by_steps:
                keys[number] = ("step", step) if self.by_steps else number
            if step < 0 and self.by_steps:
                continue
            if step < 0:
                drawn[number] = _Drawn(
                    (node.op_type, node.name, self._shape(node)), "free", nodes=(number,), anchor=node_anchor(node.name)
                )
            elif not self.by_steps:
                drawn[number] = self._node(number, step)
        for step in dict.fromkeys(key[1] for key in keys.values() if isinstance(key, tuple)):
            drawn["step", step] = self._step(step, [n for n in numbers if keys.get(n) == ("step", step)])
        return drawn, keys

    def _node(self, number: int, step: int) -> _Drawn:
        node, found = self.graph.nodes[number], self.graph.steps[step]
        lines = (node.op_type, node.name, self._shape(node))
        return _Drawn(lines, "own", found.color, step, (number,), node_anchor(node.name))

    def _step(self, step: int, numbers: Sequence[int]) -> _Drawn:
        found = self.graph.steps[step]
        types = [self.graph.nodes[number].op_type for number in numbers]
        title = " + ".join(types[:_LONGEST_TITLE])
        title += f" + {len(types) - _LONGEST_TITLE} more" if len(types) > _LONGEST_TITLE else ""
        lines = (title, found.name, self._shape(self.graph.nodes[numbers[-1]]))
        return _Drawn(lines, "own", found.color, step, tuple(numbers), found.anchor, found.amount)

    # ---- data ----

    def emit(
        self,
        found: Layout,
        drawn: Mapping[Hashable, _Drawn],
        edges: Mapping[tuple[Hashable, Hashable], Mapping[str, bool]],
        corner: tuple[int, int],
        sizes: Mapping[Hashable, tuple[int, int]],
    ) -> None:
        """Append the boxes and edges of a layout, moved to ``corner``."""
        left, top = corner
        indices: dict[Hashable, int] = {}
        for key, box in drawn.items():
            x, y = found.corners[key]
            indices[key] = len(self.boxes)
            width, height = sizes[key]
            self.boxes.append(_box_data(box, (x + left, y + top, width, height)))
        rows = [(top + first, top + last) for first, last in found.rows]
        for source, route in found.routes.items():
            row = found.row_of[source]
            x, y = found.corners[source]
            width, height = sizes[source]
            branches = []
            for target, end in route.ends.items():
                is_turned = (source, target) in found.turned
                names = edges.get((target, source) if is_turned else (source, target), {})
                branches.append(
                    [indices[target], found.row_of[target] - row - 1, end + left, int(is_turned), list(names),
                     int(any(names.values()))]
                )  # fmt: skip
            self.edges.append(
                {
                    "s": indices[source],
                    "x": x + left + width // 2,
                    "y": y + top + height,
                    "b": rows[row][1],
                    "t": [[dummy + left, *rows[row + 1 + n]] for n, dummy in enumerate(route.trunk)],
                    "e": branches,
                }
            )


class _Inner:
    """The drawing inside of a cluster's frame."""

    def __init__(self, view: _View, numbers: Sequence[int]) -> None:
        self.view = view
        self.drawn, keys = view.inside(numbers)
        self.edges: dict[tuple[Hashable, Hashable], dict[str, bool]] = {}
        makers: dict[str, tuple[Hashable, ...]] = {}  # the boxes that compute a value, directly or by a view
        for number in numbers:
            node = view.graph.nodes[number]
            read = {name: makers[name] for name in node.inputs if name in makers}
            through = tuple(dict.fromkeys(key for found in read.values() for key in found))
            makers |= dict.fromkeys(node.outputs, (keys[number],) if number in keys else through)
            for name, found in read.items() if number in keys else ():
                for key in found:
                    if key != keys[number]:
                        self.edges.setdefault((key, keys[number]), {})[name] = False
        self.sizes: dict[Hashable, tuple[int, int]] = {key: (WIDTH, box.height) for key, box in self.drawn.items()}
        self.layout = layout(self.sizes, list(self.edges))

    @property
    def size(self) -> tuple[int, int]:
        """Return width and height of the frame."""
        return max(self.layout.width, WIDTH) + 2 * _PADDING, self.layout.height + 2 * _PADDING + _TITLE - _PADDING

    def emit(self, corner: tuple[int, int]) -> None:
        self.view.emit(self.layout, self.drawn, self.edges, corner, self.sizes)


def _box_data(box: _Drawn, bounds: tuple[int, int, int, int]) -> dict[str, Any]:
    found: dict[str, Any] = {"p": list(bounds), "l": list(box.lines), "s": box.style, "id": box.anchor}
    if box.kind:
        found["k"] = box.kind
    if box.step >= 0:
        found["st"] = box.step
    if box.nodes:
        found["n"] = list(box.nodes)
    if box.amount:
        found["a"] = box.amount
    return found


def short_type(text: str) -> str:
    """Return ``f32 1 x 64`` for the type ``FLOAT32[1, 64]``, with multiplication signs and without spaces."""
    name, bracket, sizes = text.partition("[")
    if not bracket:
        return text.lower()
    name = {"FLOAT": "FLOAT32", "DOUBLE": "FLOAT64"}.get(name, name)  # ONNX's names
    short = name.lower().replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "i")
    product = sizes.removesuffix("]").replace(", ", "\N{MULTIPLICATION SIGN}")
    return f"{short} {product or 'scalar'}"


def _chained(nodes: Sequence[GraphNode], group: Mapping[int, Hashable]) -> dict[int, Hashable]:
    """Merge chains of nodes: give a node the group of its only source, if the node is the source's only reader.

    Only nodes that one other provider runs are merged. Since no second path connects the two, merging makes no cycle.
    """
    makers = {name: number for number, node in enumerate(nodes) for name in node.outputs}
    sources: list[set[int]] = [{makers[name] for name in node.inputs if name in makers} for node in nodes]
    readers: list[set[int]] = [set() for _ in nodes]
    for number, found in enumerate(sources):
        for source in found:
            readers[source].add(number)
    joined = dict(group)
    for number, node in enumerate(nodes):
        if node.is_own or len(sources[number]) != 1:
            continue
        (source,) = sources[number]
        if not nodes[source].is_own and len(readers[source]) == 1 and nodes[source].provider == node.provider:
            joined[number] = joined[source]
    return joined


def shares(steps: Iterable[GraphStep]) -> list[tuple[str, float]]:
    """Return the fraction of the amounts of all steps by kind of kernel, the largest first."""
    amounts: dict[str, float] = {}
    for step in steps:
        amounts[step.color] = amounts.get(step.color, 0.0) + step.amount
    total = sum(amounts.values()) or 1.0
    return [(kind, amounts[kind] / total) for kind in sorted(amounts, key=lambda kind: -amounts[kind])]
