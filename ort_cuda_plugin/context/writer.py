"""Writes contexts: compiles each cluster for the requested targets, and stores plans, kernels and its graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..clusters.cluster import CompiledCluster
from ..clusters.nodes.ranks import Ranks
from ..compiler.kernel import KernelSpec
from ..compiler.library.shared_memory import IN_LAUNCH, may_ask_in_launch
from ..compiler.targets import KernelImage, Target
from ..compiler.toolchain import host_cpu, joined_digest, toolkit_version
from ..model.ir import Constant, Graph, Value
from ..plan.format import encode
from ..plan.format import version as plan_version
from ..plan.tables import Precomputation, Precomputed, Weight
from ..plugin_library import plugin_version
from ..program.lowering.context import LoweringOptions
from .capture import ContextTarget, capture
from .sample_shapes import Shapes
from .storage.constants import ConstantWriter, Source
from .storage.container import Builder, Json, to_json
from .storage.errors import ContextError
from .storage.graph_data import encode_graph

Images = Callable[[Sequence[KernelSpec], Target], Sequence[KernelImage]]
"""Type of a function that compiles kernels for a target."""


def cpu_digest(target: Target) -> str:
    """Return a digest of the host CPU's features, on which the emulated device's code depends; "" for a GPU."""
    return joined_digest(host_cpu()) if target.is_emulated else ""


@dataclass(frozen=True)
class ContextCluster:
    """A cluster to compile; the fields are those of `CompiledCluster`."""

    name: str
    graph: Graph
    inputs: Sequence[str]
    outputs: Sequence[str]
    ranks: Ranks
    fed: Collection[str]


@dataclass(frozen=True)
class ContextRequest:
    """The context that a session requests: options, targets, and input shapes that get plans.

    ``weightless``: initializers stay in the model ``source``. If ``source`` is None, the context stores them.
    """

    options: LoweringOptions
    targets: Sequence[ContextTarget]
    shapes: Sequence[Shapes] = ()
    weightless: bool = False
    source: Source | None = None

    @property
    def architectures(self) -> list[str]:
        """Return the architectures of the targets."""
        return [target.target.arch for target in self.targets]


class ContextWriter:
    """Collects clusters for one context. The function ``images`` compiles kernels."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self._builder = Builder()
        self._constants = ConstantWriter(self._builder)
        self._source: Source | None = None
        self._kernels: dict[tuple[str, str], int] = {}
        self._kernel_rows: list[Json] = []
        self._partitions: list[Json] = []

    def add(self, cluster: ContextCluster, request: ContextRequest) -> str:
        """Compile a cluster for each target, and return the name of its partition.

        The cluster's constants are read now, and again when the context is written.

        Raises:
            NodeError: a node that the plugin claimed cannot be lowered.
            KernelCompileError: a kernel does not compile.
            ContextError: the source model cannot be read, or a plan calls Python code that cannot be stored.
        """
        self._source = request.source
        self._constants.used = set()
        taken = {row["name"] for row in self._partitions}
        numbered = (f"{cluster.name}_{number}" for number in itertools.count(2))
        name = next(name for name in (cluster.name, *itertools.islice(numbered, len(taken))) if name not in taken)
        targets = [self._target(cluster, request, each) for each in request.targets]
        graph = encode_graph(
            cluster.graph, lambda constant: self._constants.number(constant, self._source, for_plans=False)
        )
        values = {value.name: value for value in _values(cluster.graph)}
        self._partitions.append(
            {
                "name": name,
                "inputs": [_port(values[name]) for name in cluster.inputs],
                "outputs": [_port(values[name]) for name in cluster.outputs],
                "graph": self._json(graph),
                "ranks": {name: rank for name, rank in cluster.ranks.known.items() if name in values},
                "fed": [name for name in cluster.inputs if name in cluster.fed],
                "options": asdict(request.options),
                "targets": targets,
                "constants": sorted(self._constants.used),
                "source": None if request.source is None else self._constants.source_number(request.source),
            }
        )
        return name

    def to_bytes(self) -> bytes:
        """Return the context in memory. Raises ContextError."""
        return self._builder.to_bytes(self._contents())

    def detach(self) -> bytes:
        """Return the context in memory. Constants may be freed afterwards. Raises ContextError."""
        return self._builder.detach(self._contents())

    def write(self, path: Path) -> None:
        """Write the context to a file. Constants may be freed afterwards. Raises ContextError."""
        self._builder.write(path, self._contents())

    def _contents(self) -> Json:
        return {
            "made_by": {"plugin": plugin_version()},
            **self._constants.contents(),
            "kernels": self._kernel_rows,
            "partitions": self._partitions,
        }

    def _json(self, value: Json) -> int:
        return self._builder.add(to_json(value))

    def _constant(self, constant: Constant) -> int:
        return self._constants.number(constant, self._source)

    def _target(self, cluster: ContextCluster, request: ContextRequest, target: ContextTarget) -> Json:
        compiled = CompiledCluster(
            cluster.graph,
            target.device,
            request.options,
            cluster.inputs,
            cluster.outputs,
            cluster.ranks,
            cluster.fed,
        )
        captured = capture(compiled, cluster.ranks, request.shapes)
        for callback in captured.callbacks:
            if callback.stored is None:
                raise ContextError(
                    f"{cluster.name}: its plan for {target.target.arch} calls Python code, {callback.name}, which a "
                    "compiled model cannot contain. Compile for other architectures, or replace the operator"
                )
        programs = list(dict.fromkeys(weight.program for weight in captured.weights if isinstance(weight, Precomputed)))
        nodes = {node: number for number, node in enumerate(cluster.graph.all_nodes())}
        owners = {constant: nodes[node] for node, constant in captured.states.items()}
        return {
            "arch": target.target.arch,
            "cpu": cpu_digest(target.target),
            "toolkit": "" if target.target.is_emulated else toolkit_version(),
            "plan_version": plan_version,
            "libraries": sorted(target.device.libraries),
            "host_inputs": captured.host_inputs,
            "kernels": self._kernel_numbers(captured.kernels, target.target),
            "weights": [self._weight(weight, programs, owners) for weight in captured.weights],
            "programs": [self._program(program, target.target) for program in programs],
            "problems": [asdict(problem) for problem in captured.problems],
            "callbacks": [callback.stored for callback in captured.callbacks],
            "plans": [self._builder.add(encode(plan)) for plan in captured.plans],
            "schedules": sorted(captured.schedules),
            "failures": captured.failures,
        }

    def _kernel_numbers(self, specs: Sequence[KernelSpec], target: Target) -> list[int]:
        for spec, image in zip(specs, self._images(specs, target), strict=True):
            key = (spec.digest, target.arch)
            if key not in self._kernels:
                self._kernels[key] = len(self._kernel_rows)
                self._kernel_rows.append(self._kernel_row(spec, image))
        return [self._kernels[spec.digest, target.arch] for spec in specs]

    def _kernel_row(self, spec: KernelSpec, image: KernelImage) -> Json:
        return {
            "entry": image.entry,
            "arch": image.target.arch,
            "signature": list(spec.signature),
            "metadata": {**image.metadata, IN_LAUNCH: int(may_ask_in_launch(spec))},
            "image": self._builder.add(image.data),
        }

    def _program(self, program: Precomputation, target: Target) -> Json:
        return {
            "plan": self._builder.add(encode(program.plan)),
            "kernels": self._kernel_numbers(program.kernels, target),
            "weights": [self._constant(weight) for weight in program.weights],
        }

    def _weight(self, weight: Weight, programs: Sequence[Precomputation], owners: Mapping[Constant, int]) -> Json:
        if isinstance(weight, Precomputed):
            return {"program": programs.index(weight.program), "output": weight.number, "bytes": weight.nbytes}
        row = {"constant": self._constant(weight)}
        return {**row, "node": owners[weight]} if weight in owners else row


def _values(graph: Graph) -> Iterator[Value]:
    yield from (*graph.inputs, *graph.outputs)
    for node in graph.nodes:
        yield from (value for value in (*node.reads(), *node.outputs) if value is not None)


def _port(value: Value) -> Json:
    """Encode an input or an output of the fused node."""
    return {"name": value.name, "dtype": None if value.dtype is None else value.dtype.onnx}
