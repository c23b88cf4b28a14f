"""Claims: decides which nodes the plugin runs, with a reason for each declined node."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ...custom.operator import CustomOperator
from ...model.ir import DType, Graph, InvalidModel, Node, UnknownRank, Unsupported, Value
from ...model.partition import partition
from ...ops.kernel_definitions import HOST_RESULTS
from ...ops.registry import channels_last_operators
from ...program.expressions.symbolic import Dim
from ...program.lowering.context import NUM_TRIALS, Buffer, DeviceProperties, LoweringOptions
from ...program.steps.containers import Operand
from ...program.termination import Measure
from ..nodes.control_flow import CompiledBodies, CompiledBody
from ..nodes.node_lowering import InputSymbols, NodeLowering, symbolic_input
from ..nodes.ranks import Ranks, learn_declined
from ..nodes.repetition import FunctionNode, Repetition
from ..search.search import as_loop, as_repetition, is_search
from . import islands
from .budget import MemoryBudget
from .islands import CONTROL_FLOW

logger = logging.getLogger("ort_cuda_plugin")


@dataclass(frozen=True)
class NodeVerdict:
    """The decision whether the plugin runs a node; ``kind`` and ``reason`` explain why it declines, or are "".

    ``kind`` is one of `Unsupported.kinds`. ``body_of`` names the control-flow node whose body contains the node, "" in
    the main graph. For a custom operator ``note`` names its origin, and says whether it calls Python in each Run.
    ``cluster`` is the fused node that contains the node, or "". ``provider`` names the execution provider that runs the
    node, "" if unknown or none. ``inputs`` and ``outputs`` are the names of the node's values, without weights.
    ``device`` is the ordinal of the device that runs the node, if the session has several devices; else None.

    Examples:
        >>> verdict = ort_cuda_plugin.explain("model.onnx")[0]
        >>> verdict.label, verdict.supported, verdict.inputs
        ('product', True, ('x',))
    """

    name: str
    op_type: str
    domain: str
    since_version: int
    supported: bool
    kind: str = ""
    reason: str = ""
    body_of: str = ""
    note: str = ""
    cluster: str = ""
    provider: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    device: int | None = None

    @property
    def label(self) -> str:
        """Return the node's name, or else the name of its first output."""
        return self.name or next(iter(self.outputs), "") or "(unnamed)"

    def __str__(self) -> str:
        where = f" in {self.body_of}" if self.body_of else ""
        said = self.reason or self.note
        runs = self.provider or "not the plugin"
        if self.device is not None:
            runs += f" on device {self.device}"
        return f"{self.label} ({self.op_type}){where}: {runs}{said and f', {said}'}"


@dataclass(frozen=True)
class Claims:
    """The result of `claim`: the nodes of a graph that the plugin claims.

    Attributes:
        clusters: lists of nodes to fuse, in topological order; then one cluster for each token search.
        singles: claimed control-flow nodes that are not fused; kernels of ONNX Runtime run them, and so their bodies.
        verdicts: one per node of the graph, in order.
    """

    clusters: list[list[Node]]
    singles: list[Node]
    verdicts: list[NodeVerdict]


def analyze(
    graph: Graph,
    device: DeviceProperties,
    options: LoweringOptions | None = None,
    ranks: Ranks | None = None,
    provider: str = "",
    *,
    single_nodes: bool = False,
) -> list[NodeVerdict]:
    """Return one verdict per node of ``graph``, in order.

    The analysis calls the lowering functions of operators on symbolic shapes, and reads no large initializer. After a
    declined node it continues with the types and shapes that ORT infers. ``ranks`` holds ranks that ORT does not infer;
    ranks that the lowering functions infer are added to it. ``provider`` is the plugin's provider name. After layout
    changes ORT asks for claims a second time; then the nodes that the plugin claimed the first time carry this name.
    ``single_nodes`` as for `claim`.
    """
    analysis = _Analysis(graph, device, options or LoweringOptions(), ranks or Ranks(), provider)
    verdicts = analysis.verdicts(graph.nodes)
    return analysis.without_shape_arithmetic(verdicts) if single_nodes else analysis.without_idle_nodes(verdicts)


def is_unrolled(
    body: Graph,
    device: DeviceProperties,
    options: LoweringOptions,
    passes_implicit_inputs: bool,
    provider: str = "",
    compiled: Mapping[str, CompiledBody] | None = None,
) -> bool:
    """Return whether the control-flow node that owns ``body`` is lowered together with its bodies.

    If it is, the nodes of its bodies must not be fused. ORT presents a body before the surrounding graph, so the
    decision depends on the node alone: an If is lowered with its bodies only if its condition is a constant. The bodies
    of an If in ``body`` may have clusters, which ``compiled`` holds as for `claim`.
    """
    parent = body.parent
    if parent is None or (parent.op_type == "If" and (not parent.inputs[0] or parent.inputs[0].initializer is None)):
        return False
    if not passes_implicit_inputs and any(_not_passed([[parent]])):
        return False
    alone = Graph(body.name, [parent], [], [], body.opsets)
    analysis = _Analysis(alone, device, options, Ranks(), provider, compiled=compiled)
    (verdict,) = analysis.verdicts([parent])
    return verdict.supported and not analysis.singles


def claim(
    graph: Graph,
    device: DeviceProperties,
    options: LoweringOptions | None = None,
    ranks: Ranks | None = None,
    provider: str = "",
    *,
    passes_implicit_inputs: bool = True,
    has_kernel: Callable[[Node], bool] = lambda node: True,
    claim_unprofitable_nodes: bool = False,
    single_nodes: bool = False,
    budget: MemoryBudget | None = None,
    compiled: Mapping[str, CompiledBody] | None = None,
) -> Claims:
    """Decide which nodes of ``graph`` the plugin runs. ``ranks`` receives the ranks inferred for the whole graph.

    ``passes_implicit_inputs``: ORT passes a fused node the values that only its bodies read; ``has_kernel``: the kernel
    registry has a kernel for a control-flow node. With ``claim_unprofitable_nodes`` the plugin also claims nodes
    whose copies between host and device cost more time than the device saves. With ``single_nodes`` each node is a
    separate cluster, and the CPU does shape arithmetic. ``compiled`` holds the clusters of bodies, by the names of
    their fused nodes. The first node that does not fit in the ``budget``, and all later nodes, are declined.

    If an input comes from a declined node or from another cluster, the analysis of the cluster alone may know less
    about it than the analysis of the whole graph: for example, the elements of a shape tensor are unknown. So each
    cluster is also analyzed alone. Nodes that this analysis declines are removed, and it repeats until it declines
    none.
    """
    options = options or LoweringOptions()
    ranks = ranks or Ranks()
    reason = ""
    if graph.parent is not None and graph.parent.op_type not in CONTROL_FLOW:
        reason = f"ONNX Runtime replaces {graph.parent.op_type} by other nodes, which cannot contain compiled nodes"
        if is_search(graph.parent):
            reason = f"ONNX Runtime's {graph.parent.op_type} reads the results of its bodies on the host"
    elif not single_nodes and is_unrolled(graph, device, options, passes_implicit_inputs, provider, compiled):
        around = graph.parent.op_type if graph.parent is not None else ""
        reason = f"the plugin compiles the surrounding {around} node together with its bodies"
    if reason:
        return Claims([], [], [decline(node, "control-flow", reason) for node in graph.nodes])
    compiled = compiled or {}
    whole = _Analysis(graph, device, options, ranks, provider, has_kernel, None, compiled, inlines=not single_nodes)
    found = whole.verdicts(graph.nodes)
    found = whole.without_shape_arithmetic(found) if single_nodes else whole.without_idle_nodes(found)
    if budget is not None:
        found = _within(budget, graph, found)
    verdicts = dict(zip(graph.nodes, found, strict=True))
    singles = whole.singles
    measure = Measure("claims")
    while True:
        ours = {node for node in graph.nodes if verdicts[node].supported}
        fused = [node in ours and node not in singles for node in graph.nodes]
        # Each iteration declines nodes, or moves them from clusters to kernels of ORT, so the loop ends.
        measure.fall(len(ours) + sum(fused))
        clusters = partition(graph, fused)
        searches = [[node] for node in graph.nodes if node in ours and node in singles and is_search(node)]
        if single_nodes:
            clusters = [[node] for cluster in clusters for node in cluster]
        changed: dict[Node, NodeVerdict] = {}
        for node, missing in _not_passed([*clusters, *searches]) if not passes_implicit_inputs else ():
            reason = (
                f"only a body reads {missing.name!r}, and this version of ONNX Runtime does not pass it to a fused node"
            )
            changed[node] = whole.as_single(node, Unsupported("control-flow", reason))
        for node, value in _crossing(graph, clusters):
            changed[node] = decline(
                node, "op", f"{value.name!r} is not a tensor, and a fused node can output only tensors"
            )
        if not changed and (len(clusters) > 1 or len(ours) < len(graph.nodes) or singles):
            for cluster in clusters:
                alone = _Analysis(graph, device, options, ranks, provider, has_kernel, singles, compiled)
                for node, verdict in zip(cluster, alone.verdicts(cluster), strict=True):
                    if not verdict.supported or node in singles:
                        changed[node] = verdict
        if not changed and not claim_unprofitable_nodes:
            reason = (
                "its inputs and outputs are in host memory, and copying them costs more time than the device saves; "
                "claim_unprofitable_nodes=1 runs it on the device"
            )
            runs_here = graph.parent is None or not _why_no_kernel(graph.parent, has_kernel)
            for island in islands.unprofitable_islands(graph, runs_here, clusters, ours):
                changed.update((node, decline(node, "cost", reason)) for node in island)
        if not changed:
            chosen = [node for node in graph.nodes if node in singles and node in ours and not is_search(node)]
            return Claims([*clusters, *searches], chosen, [verdicts[node] for node in graph.nodes])
        verdicts |= changed


def _within(budget: MemoryBudget, graph: Graph, verdicts: list[NodeVerdict]) -> list[NodeVerdict]:
    pairs = list(zip(graph.nodes, verdicts, strict=True))
    last = budget.first_beyond(node for node, verdict in pairs if verdict.supported)
    if last is None:
        return verdicts
    first = graph.nodes.index(last)
    reason = f"the device memory budget of {budget.nbytes} bytes does not suffice for node {last.label} and later nodes"
    return [
        decline(node, "cost", reason) if verdict.supported and index >= first else verdict
        for index, (node, verdict) in enumerate(pairs)
    ]


def _not_passed(clusters: list[list[Node]]) -> Iterator[tuple[Node, Value]]:
    """Yield (node, value) if a body of the node reads a value that the node's cluster neither computes nor reads."""
    for cluster in clusters:
        known = {value for node in cluster for value in (*node.inputs, *node.outputs)}
        for node in cluster:
            outside = (value for value in node.implicit_inputs if value not in known and value.initializer is None)
            missing = next(outside, None)
            if missing is not None:
                yield node, missing


def _crossing(graph: Graph, clusters: list[list[Node]]) -> Iterator[tuple[Node, Value]]:
    """Yield (node, result) for each result that is not a tensor and is read outside of the node's cluster."""
    cluster_of = {node: number for number, cluster in enumerate(clusters) for node in cluster}
    made = {value: node for node in cluster_of for value in node.outputs if value is not None and value.is_container}
    leaving = {value for value in graph.outputs if value in made}
    for node in graph.nodes if made else ():
        for value in node.reads():
            if value in made and cluster_of.get(node) != cluster_of[made[value]]:
                leaving.add(value)
    for value in sorted(leaving, key=lambda value: value.name):
        yield made[value], value


class _Analysis:
    """Calls the lowering functions of operators on symbolic shapes.

    Nodes that need an unknown rank are analyzed once per trial, see `ranks`. ``singles`` receives the control-flow
    nodes that ORT's kernels run (without ``inlines``, all control-flow nodes), and token searches. For nodes that read
    results of ``singles``, these results are new symbolic inputs.
    """

    def __init__(
        self,
        graph: Graph,
        device: DeviceProperties,
        options: LoweringOptions,
        ranks: Ranks,
        provider: str = "",
        has_kernel: Callable[[Node], bool] = lambda node: True,
        singles: set[Node] | None = None,
        compiled: Mapping[str, CompiledBody] | None = None,
        inlines: bool = True,
    ) -> None:
        self._graph, self._device, self._options = graph, device, options
        self._ranks = ranks
        self.provider = provider
        self.singles = set() if singles is None else singles
        self._has_kernel = has_kernel
        self._compiled = compiled or {}
        self._inlines = inlines
        self._symbols = InputSymbols()
        self._waiting: set[Value | None] = set()  # results of nodes that wait for an unknown rank
        self._begin(None)

    def _begin(self, trial: int | None, known: Mapping[Value, Operand] | None = None) -> None:
        symbols = self._symbols

        def read_host_input(buffer: Buffer, count: int) -> tuple[Dim, ...]:
            return symbols.host_values(buffer, [1] * count)

        self.ranks = self._ranks.under(trial)
        self.lowering = NodeLowering(
            self._graph,
            self._device,
            self._options,
            read_host_input,
            record=False,
            guesses=symbols,
            trial=trial,
            compiled=CompiledBodies(self.provider, self._compiled),
        )
        for value, operand in (known or {}).items():
            self.lowering.set(value, operand)

    def verdicts(self, nodes: list[Node]) -> list[NodeVerdict]:
        found = {node: self._verdict(node) for node in nodes}
        waiting = [node for node, verdict in found.items() if isinstance(verdict, _Waiting)]
        if waiting:
            found.update(self._by_trials(waiting))
        return [found[node] for node in nodes]

    def _by_trials(self, nodes: list[Node]) -> dict[Node, NodeVerdict]:
        """Return verdicts of nodes that need a rank that ORT does not infer.

        A node is supported if at least one trial accepts it and none declines it. A trial in which the node, or a
        producer of its inputs, is invalid does not count. A control-flow node that cannot be lowered goes to ONNX
        Runtime's kernels.
        """
        taken: dict[Node, NodeVerdict] = {}
        declined: dict[Node, NodeVerdict] = {}
        invalid: dict[Node, NodeVerdict] = {}
        known = self.lowering.operands()
        results = dict(known)
        for trial in range(NUM_TRIALS):
            self._begin(trial, known)
            lost: set[Value | None] = set()
            for node in nodes:
                if not lost.isdisjoint(node.reads()):
                    lost.update(node.outputs)
                    continue
                verdict = self._verdict(node)
                if isinstance(verdict, _Invalid):
                    invalid[node] = verdict
                    lost.update(node.outputs)
                else:
                    (taken if verdict.supported else declined)[node] = verdict
            results = self.lowering.operands() | results
        self._begin(None, results)
        self._ranks.settle(value for node in nodes for value in node.outputs)
        for node, verdict in declined.items():
            declined[node] = replace(verdict, reason=f"{verdict.reason} (a rank of its inputs is not known)")
        no_rank = "the ranks of its inputs are unknown, and each rank that the plugin tried is invalid"
        lacking = {node: decline(node, "shape", no_rank) for node in nodes}
        found = lacking | invalid | taken | declined
        for node, verdict in found.items():
            if node.has_subgraphs and not verdict.supported:
                found[node] = self.as_single(node, Unsupported(verdict.kind, verdict.reason))
        return found

    def without_idle_nodes(self, verdicts: list[NodeVerdict]) -> list[NodeVerdict]:
        """Decline shape arithmetic that only declined nodes use, since on the device it costs launches and copies.

        If the plugin runs all nodes, no node is declined: unused results cost nothing.
        """
        if all(verdict.supported for verdict in verdicts):
            return verdicts
        graph, tensors = self.lowering.graph, self.lowering.tensors
        used = set(graph.outputs)
        result: list[NodeVerdict] = []
        for node, verdict in zip(reversed(graph.nodes), reversed(verdicts), strict=True):
            outputs = [value for value in node.outputs if value is not None and self.lowering.knows(value)]
            if verdict.supported:
                on_host = all(value in tensors and tensors[value].host is not None for value in outputs)
                on_host = on_host and node not in self.singles
                if on_host and used.isdisjoint(outputs):
                    verdict = decline(node, "cost", "only nodes of other providers use this shape arithmetic")
                else:
                    used.update(node.reads())
            result.append(verdict)
        return result[::-1]

    def without_shape_arithmetic(self, verdicts: list[NodeVerdict]) -> list[NodeVerdict]:
        """Decline shape arithmetic if each node is a cluster, since its results would be copied to the host.

        Shape and Size stay: their kernels write the result in host memory.
        """
        tensors = self.lowering.tensors
        result = []
        for node, verdict in zip(self.lowering.graph.nodes, verdicts, strict=True):
            outputs = [tensors[value] for value in node.outputs if value is not None and value in tensors]
            is_shapes = (node.domain or node.op_type not in HOST_RESULTS) and all(x.host is not None for x in outputs)
            if verdict.supported and is_shapes and node not in self.singles:
                verdict = decline(
                    node, "cost", "the session runs each node as a separate kernel, and so computes shapes on the CPU"
                )
            result.append(verdict)
        return result

    def _verdict(self, node: Node) -> NodeVerdict:
        try:
            self._lower(node)
        except UnknownRank as error:
            learn_declined(node, self.ranks)
            self._waiting.update(node.outputs)
            return decline(node, error.kind, error.reason, _Waiting)
        except Unsupported as error:
            learn_declined(node, self.ranks)
            if node.has_subgraphs:
                return self.as_single(node, error)
            return decline(node, error.kind, error.reason)
        except (InvalidModel, ZeroDivisionError, OverflowError) as error:
            return decline(node, "shape", f"the model is invalid at this node: {error}", _Invalid)
        except Exception as error:
            # A bug in one operator's lowering function must not lose the claims of all other nodes.
            logger.exception(
                "node %s: internal error of the plugin while it analyzed the node. Report the model", node.label
            )
            return decline(node, "op", f"internal error: {type(error).__name__}: {error}. Report the model")
        if node.provider and node.provider != self.provider:  # ORT would drop a cluster with the node
            return decline(node, "op", f"ONNX Runtime has assigned the node to {node.provider}")
        return _supported(node, self.lowering.served.get(node), self.lowering.ctx.notes.get(node, ""))

    def as_single(self, node: Node, why_not_fused: Unsupported) -> NodeVerdict:
        """Return the verdict for a node whose bodies cannot be lowered with it: supported if a kernel of ORT runs it.

        ORT has asked for claims in the bodies before, so their nodes name the providers that run them.
        """
        if node.domain or node.op_type not in CONTROL_FLOW:
            return decline(node, why_not_fused.kind, why_not_fused.reason)
        problem = _why_no_kernel(node, self._has_kernel)
        if problem:
            return decline(node, "control-flow", f"{why_not_fused.reason}; {problem}")
        inner = [member for body in node.subgraphs.values() for member in body.nodes]
        if inner and not any(member.provider == self.provider for member in inner if member.provider):
            return decline(node, "cost", f"{why_not_fused.reason}; no node of its bodies runs on the plugin")
        self.singles.add(node)
        return _supported(node, note=f"ONNX Runtime runs its bodies: {why_not_fused.reason}")

    def _check_search(self, node: Node) -> None:
        """Add the token search ``node`` to ``singles`` if the plugin can run it; else raise the errors of `_lower`."""
        found = search_clusters(node, self._graph.opsets, self._device, self._options, self._ranks, self.provider)
        self.lowering.ctx.notes[node] = found.note
        self.singles.add(node)

    def _lower(self, node: Node) -> None:
        if node.has_subgraphs and not self._inlines:
            raise Unsupported(
                "control-flow", "the session runs each node as a separate kernel, not compiled together with its bodies"
            )
        if is_search(node):
            self._check_search(node)
            return
        known = self.lowering.tensors
        for value in node.reads():
            if not self.lowering.knows(value):
                if value.is_container and value in self._waiting and self.ranks.trial is None:
                    raise UnknownRank(
                        f"the number and ranks of the tensors in {value.name!r}, a sequence or an optional value, are "
                        "unknown"
                    )
                self.lowering.add_input(value, symbolic_input(self._symbols, value, 0, ranks=self.ranks))
        shape = node.inputs[0].shape if node.inputs and node.inputs[0] is not None else None
        if shape is not None and len(shape) < 2 and self._may_become_channels_last(node):
            raise Unsupported(
                "shape", "ONNX Runtime cannot convert a tensor of fewer than 2 dimensions to channels-last"
            )
        self.lowering.lower(node)
        for result in node.outputs:
            if result is not None and result in known:
                self.ranks.learn(result, known[result].rank)

    def _may_become_channels_last(self, node: Node) -> bool:
        options = self.lowering.ctx.options
        return options.prefer_nhwc and not node.domain and node.op_type in channels_last_operators()


@dataclass(frozen=True)
class SearchClusters:
    """How the plugin runs a token search: as one cluster with a loop on the device, or as a `Repetition`.

    ``note`` says which, and why.
    """

    found: Graph | Repetition
    note: str


def search_clusters(
    node: Node,
    opsets: Mapping[str, int],
    device: DeviceProperties,
    options: LoweringOptions,
    ranks: Ranks,
    provider: str,
) -> SearchClusters:
    """Return the clusters of a token search. Raises Unsupported or InvalidModel if the plugin cannot run it."""

    def check(graph: Graph) -> str:
        inner = _Analysis(graph, device, options, ranks, provider)
        note = ""
        for member, verdict in zip(graph.nodes, inner.verdicts(graph.nodes), strict=True):
            if not verdict.supported or member in inner.singles:
                where = "" if isinstance(member, FunctionNode) else f"in its bodies, node {member.label}: "
                reason = verdict.reason or f"control-flow nodes in the bodies of {node.op_type} are not implemented"
                raise Unsupported(verdict.kind or "control-flow", where + reason)
            note = verdict.note if isinstance(member, FunctionNode) and verdict.note else note
        return note

    try:
        loop = as_loop(node, opsets)
        return SearchClusters(loop, check(loop))
    except UnknownRank:
        raise
    except Unsupported as error:
        why = error.reason
    try:
        repetition = as_repetition(node, opsets)
        for each in repetition.parts:
            check(each.graph)
    except UnknownRank:
        raise
    except Unsupported as error:
        if error.reason == why:
            raise
        raise Unsupported(
            error.kind, f"{error.reason}; the search cannot be a loop on the device either: {why}"
        ) from error
    return SearchClusters(repetition, f"the host reads a flag after each token: {why}")


def _supported(node: Node, by: CustomOperator | None = None, note: str = "") -> NodeVerdict:
    note = "; ".join(filter(None, ["" if by is None else by.description, note]))
    return NodeVerdict(node.name, node.op_type, node.domain, node.since_version, True, note=note)


def _why_no_kernel(node: Node, has_kernel: Callable[[Node], bool]) -> str:
    """Return why no kernel of the registry can run a control-flow node, "" if one can.

    States and results of If and Loop may differ in type, but ONNX Runtime compares only the type of the first value
    with the types that a kernel supports. It would copy later values to the device, and fail for strings and sequences.
    """
    if (node.op_type, node.since_version) == ("Scan", 8):
        return "ONNX Runtime has no kernel of Scan-8 for plugins"
    for value in (*node.inputs, *node.outputs):
        if value is None or (value.dtype is not None and value.dtype.is_supported):
            continue
        what = "a string tensor" if value.dtype is DType.STRING else "not a tensor on a device"
        return f"{value.name!r} is {what}: strings, sequences and optional values stay on the host"
    return "" if has_kernel(node) else "no kernel of ONNX Runtime supports the types of its values"


class _Waiting(NodeVerdict):
    """Verdict for a node whose lowering function needs an unknown rank."""


class _Invalid(NodeVerdict):
    """Verdict for a node that is invalid for its inputs."""


def decline(node: Node, kind: str, reason: str, how: type[NodeVerdict] = NodeVerdict) -> NodeVerdict:
    """Return a verdict of class ``how``: the plugin does not run the node, for the reason given."""
    return how(node.name, node.op_type, node.domain, node.since_version, False, kind, reason)
