"""Loads clusters from a compiled model's context. Inputs that a stored plan accepts need no compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from ..clusters.cluster import CompiledCluster, Variant, WeightReader
from ..clusters.nodes.ranks import Ranks
from ..compiler.kernel import KernelSpec
from ..compiler.targets import BuiltKernel, KernelImage, Target
from ..custom.plugin.stored import stored_callback
from ..model.ir import Constant, DType, Graph, Node
from ..plan.decoder import decode, element_types
from ..plan.format import version as plan_version
from ..plan.tables import KnownEntries, Precomputation, Precomputed, Tables, Weight, weight_key
from ..program.device import AttentionKernel
from ..program.lowering.context import DeviceProperties, LoweringOptions
from ..program.steps.libraries import LibraryProblem, ProblemFlags
from ..program.steps.quarantine import ScheduleKind, operator_name, why
from .fits import driver_runs, runs_on
from .guards import Guards
from .storage.constants import StoredConstants
from .storage.container import Container, Json, parse_json
from .storage.errors import MALFORMED, ContextError, UnforeseenShapes
from .storage.graph_data import decode_graph, dtype_of
from .writer import cpu_digest

MAX_REASONS = 5
"""Maximum number of quarantined schedules, or of quarantined operators, that a message names."""


@dataclass(frozen=True)
class Session:
    """The session that loads a context: its device and its options.

    ``allow_host_code`` says whether code of the context may run on this computer's CPU; ``refits`` whether initializers
    that the context does not store may have new contents. ``driver_version`` is the CUDA version of the driver.
    """

    target: Target
    device: DeviceProperties
    options: LoweringOptions
    allow_host_code: bool
    refits: bool = False
    driver_version: str = ""


@dataclass(frozen=True)
class Loaded:
    """A cluster from a context: its stored plans, or a cluster that compiles the stored graph.

    In the second case ``why`` says why the stored plans are not used. ``refitted`` names the initializers whose
    contents differ from those at compilation. ``warning`` says which quarantined kernels or operators the cluster runs.
    ``otherwise`` is None unless the quarantine is the only reason against the stored plans. It loads these plans if the
    compilation of the stored graph fails; its argument is the error of the compilation.
    """

    cluster: StoredCluster | CompiledCluster
    why: str = ""
    refitted: Sequence[str] = ()
    warning: str = ""
    otherwise: Callable[[Exception], Loaded] | None = None


class Context:
    """A loaded context: the partitions, kernels and constants of a container.

    Raises: ContextError: the container was not written by `ContextWriter`.
    """

    def __init__(self, container: Container) -> None:
        self.container = container
        try:
            index = container.index
            self.constants = StoredConstants(container)
            self.kernel_rows: list[Json] = list(index["kernels"])
            self.partitions: dict[str, Json] = {}
            for row in index["partitions"]:
                if type(row["name"]) is not str:
                    raise ValueError(f"partition name: got {row['name']!r}, expected text")
                if row["name"] in self.partitions:
                    raise ValueError(f"two partitions have the name {row['name']!r}")
                self.partitions[row["name"]] = row
        except MALFORMED as error:
            raise container.damaged(f"its index is malformed: {error!r}") from error

    def cluster(
        self, name: str, session: Session, inputs: Sequence[DType | None], outputs: Sequence[DType | None]
    ) -> Loaded:
        """Load the cluster of partition ``name``.

        ``inputs`` and ``outputs`` are the element types of the node that names the partition. The cluster is compiled
        from its stored graph if the stored plans cannot be used: their code does not run on the session's device, their
        options contradict the session's, or the device has quarantined one of their schedules.

        Raises:
            ContextError: there is no such partition, the node has other inputs or outputs, or the context contradicts
                itself.
        """
        row = self.partitions.get(name)
        if row is None:
            names = ", ".join(sorted(self.partitions)) or "none"
            raise ContextError(
                f"{self.container.subject} has no partition {name!r}. Its partitions: {names}. Compile the model again"
            )
        try:
            refitted = self._check_initializers(row, session.refits)
            self._check_ports(row["inputs"], inputs, f"inputs of {name!r}")
            self._check_ports(row["outputs"], outputs, f"outputs of {name!r}", strictly=True)
            partition = _Partition(self, row, session)
            found, quarantined = partition.usable_target(), partition.quarantined
            subject = f"{self.container.subject}, partition {name!r},"
            operators = partition.quarantined_operators()
            warning = f"{subject} runs quarantined operators: {operators}. {_REMEDY}" if operators else ""
            if found is not None:
                return Loaded(StoredCluster(partition, found), "", refitted, warning)
            loaded = Loaded(
                partition.compiled(), f"{subject} is compiled again: {partition.why_not}", refitted, warning
            )
        except MALFORMED as error:
            raise self.container.damaged(f"partition {name!r}: {error!r}") from error
        if quarantined is None:
            return loaded

        def otherwise(error: Exception) -> Loaded:
            reasons = "; ".join(filter(None, (partition.why_not, operators)))
            told = f"{subject} runs quarantined kernels: {reasons}. It cannot be compiled again: {error}. {_REMEDY}"
            try:
                return Loaded(StoredCluster(partition, quarantined), "", refitted, told)
            except MALFORMED as damage:
                raise self.container.damaged(f"partition {name!r}: {damage!r}") from damage

        return replace(loaded, otherwise=otherwise)

    def source_of(self, name: str) -> tuple[int, str] | None:
        """Return number and file of the source model of partition ``name``; None if it needs no source model.

        Raises:
            ContextError: the context contradicts itself.
        """
        number = self.partitions.get(name, {}).get("source")
        if number is None:
            return None
        try:
            return _index(number), self.constants.files[number]
        except MALFORMED as error:
            raise self.container.damaged(f"partition {name!r}: {error!r}") from error

    def _check_initializers(self, row: Json, refits: bool) -> list[str]:
        if row.get("source") is None:
            return []
        if refits:
            self.constants.check_rest(_index(row["source"]))
        return self.constants.check([_index(number) for number in row["constants"]], refits)

    def _check_ports(self, stored: Json, found: Sequence[DType | None], what: str, strictly: bool = False) -> None:
        """Check that the element types of the EPContext node, ``found``, are those of the stored inputs or outputs.

        Unless ``strictly``, an unknown type (None) is accepted, which is safe for inputs: each Run checks them. ONNX
        Runtime allocates outputs by the node's types without a check.
        """
        types = [None if port["dtype"] is None else dtype_of(port["dtype"]) for port in stored]
        differ = len(types) != len(found) or any(
            a is not b for a, b in zip(types, found, strict=True) if strictly or b is not None
        )
        if differ:
            shown = ["unknown" if dtype is None else dtype.name for dtype in found]
            raise ContextError(
                f"{self.container.subject}: the element types of the {what} are "
                f"{[dtype and dtype.name for dtype in types]}, and those of the EPContext node are {shown}; use the "
                "compiled model that was written with the context"
            )

    def graph_data(self, number: Json) -> Json:
        """Return graph ``number`` as a JSON value. Raises ContextError, ValueError."""
        return parse_json(bytes(self.container.array(number)))

    def constant(self, number: Json) -> Constant:
        """Return a stored constant. Raises LookupError, TypeError."""
        return self.constants.all[_index(number)]

    def kernel(self, number: Json, target: Target) -> BuiltKernel:
        """Return a stored kernel. Raises ContextError, and the exceptions of `MALFORMED`."""
        row = self.kernel_rows[_index(number)]
        entry, metadata = row["entry"], row["metadata"]
        if not all(type(value) is int and 0 <= value < 1 << 32 for value in metadata.values()):
            raise ValueError(f"metadata of kernel {entry}: got {metadata}, expected integers of 32 bits")
        image = bytes(self.container.array(row["image"]))
        identity = repr((sorted(metadata.items()), self.container.digest(row["image"])))
        stored = KernelImage(image, entry, target, metadata)
        return BuiltKernel(entry, tuple(row["signature"]), identity, image=stored)


_REMEDY = (
    "Results may be wrong. Compile the source model again on this device: the new compilation avoids quarantined "
    "kernels. Or lift the quarantine with `ort-cuda-plugin selftest --clear`"
)
"""What to do about quarantined kernels of a context."""


def _index(number: Json) -> int:
    if type(number) is not int or number < 0:
        raise TypeError(f"an index: got {number!r}, expected an integer of at least 0")
    return number


class _Partition:
    """One cluster's part of a context, as seen by the session that loads it."""

    def __init__(self, context: Context, row: Json, session: Session) -> None:
        self.context = context
        self.row = row
        self.session = session
        self.name: str = row["name"]
        self.inputs: list[str] = [port["name"] for port in row["inputs"]]
        self.outputs: list[str] = [port["name"] for port in row["outputs"]]
        self.options = _stored_options(row["options"])
        self.why_not = ""
        self.quarantined: Json | None = None

    def usable_target(self) -> Json | None:
        """Return the stored target for the session's device. If none can be used, return None and set ``why_not``.

        If only the quarantine is against the targets that fit the device, ``quarantined`` becomes the best of them.
        """
        session = self.session
        if (self.options.use_tf32 and not session.options.use_tf32) or (
            session.options.deterministic and not self.options.deterministic
        ):
            self.why_not = (
                "it was compiled with use_tf32=1, and the session has use_tf32=0"
                if self.options.use_tf32 and not session.options.use_tf32
                else "it was compiled with deterministic=0, and the session has deterministic=1"
            )
            return None
        asked = session.options.keep_float32
        if asked and set(asked) != set(self.options.keep_float32):
            stored = ",".join(self.options.keep_float32)
            self.why_not = (
                f"it was compiled with keep_float32={stored}, and the session has keep_float32={','.join(asked)}"
            )
            return None
        reasons = [(row, self._misfit(row)) for row in self.row["targets"]]
        fitting = [row for row, reason in reasons if not reason]
        if not fitting:
            made_for = "; ".join(f"{row['arch']}: {reason}" for row, reason in reasons) or "nothing"
            self.why_not = f"it has no code for {session.target.arch} that this computer can run ({made_for})"
            return None
        if session.target.is_emulated and not session.allow_host_code:
            self.why_not = (
                "the emulated device runs machine code of a compiled model only with context_allow_host_code=1 or "
                "ORT_CUDA_PLUGIN_CONTEXT_ALLOW_HOST_CODE=1"
            )
            return None

        def rank(row: Json) -> tuple[bool, str]:
            return row["arch"] == session.target.arch, row["arch"]

        allowed = [row for row in fitting if not self._quarantined_schedules(row)]
        if allowed:
            return max(allowed, key=rank)
        self.quarantined = max(fitting, key=rank)
        self.why_not = self._quarantined_schedules(self.quarantined)
        return None

    def _quarantined_schedules(self, row: Json) -> str:
        """Return which quarantined schedules the plans of the stored target ``row`` have, and why; "" if none."""
        quarantine = self.session.device.quarantine
        if not quarantine.schedules:
            return ""
        if "schedules" not in row:
            return (
                f"it does not record its schedules, and {', '.join(map(str, quarantine.schedules[:MAX_REASONS]))} are "
                "quarantined on this device. Compile the source model again to record them"
            )
        return _reasons(map(why, quarantine.covering(_schedule_kind(kind) for kind in row["schedules"])))

    def quarantined_operators(self) -> str:
        """Return which operators of the cluster are quarantined on the device, and why; "" if none is."""
        quarantine = self.session.device.quarantine
        if not quarantine.operators:
            return ""
        nodes = self.graph().all_nodes()
        types = ((node, {x.dtype.short for x in node.inputs if x is not None and x.dtype}) for node in nodes)
        return _reasons(quarantine.refusal(operator_name(node.domain, node.op_type), read) for node, read in types)

    def _misfit(self, row: Json) -> str:
        """Return why the session's device cannot use the stored target ``row``; "" if it can."""
        session, target, arch = self.session, self.session.target, row["arch"]
        if target.is_emulated != arch.startswith("emulated"):
            return "a GPU and the emulated device cannot run each other's code"
        if row["plan_version"] != plan_version:
            return f"its plans have format version {row['plan_version']}, this plugin reads version {plan_version}"
        if target.is_emulated:
            return (
                ""
                if arch == target.arch and row["cpu"] == cpu_digest(target)
                else "compiled for another CPU, or for another mode of the emulated device"
            )
        if not runs_on(arch, target.compute_capability):
            return "compiled for another GPU architecture"
        if not driver_runs(row.get("toolkit", ""), session.driver_version):
            return (
                f"its kernels need a driver for CUDA {row['toolkit']}, and the installed driver is for CUDA "
                f"{session.driver_version}; update the driver"
            )
        missing = sorted(set(row["libraries"]) - session.device.libraries)
        if missing:
            return f"its plans call {', '.join(missing)}, which this computer lacks; install them"
        return "" if row["plans"] else "the compilation for this architecture failed"

    def graph(self) -> Graph:
        """Return the cluster's graph. Raises ContextError."""
        try:
            return decode_graph(self.context.graph_data(self.row["graph"]), self.context.constants.all)
        except MALFORMED as error:
            raise self.context.container.damaged(f"the graph of {self.name!r}: {error!r}") from error

    def compiled(self, known: KnownEntries | None = None) -> CompiledCluster:
        """Return a cluster that compiles the stored graph, without the stored plans. Raises ContextError."""
        graph = self.graph()
        asked = self.session.options
        options = replace(
            self.options,
            use_tf32=self.options.use_tf32 and asked.use_tf32,
            deterministic=self.options.deterministic or asked.deterministic,
            keep_float32=asked.keep_float32 or self.options.keep_float32,
        )
        try:
            ranks = Ranks()
            ranks.known.update((str(name), _index(rank)) for name, rank in self.row["ranks"].items())
            return CompiledCluster(
                graph, self.session.device, options, self.inputs, self.outputs, ranks, set(self.row["fed"]), known=known
            )
        except MALFORMED as error:
            raise self.context.container.damaged(f"partition {self.name!r}: {error!r}") from error


class StoredCluster:
    """A cluster of stored plans, with the interface of `CompiledCluster` that a fused node uses.

    ``arch`` is the architecture of the plans. Raises the exceptions of `MALFORMED` for malformed data.
    """

    def __init__(self, partition: _Partition, row: Json) -> None:
        self._partition = partition
        self._context = context = partition.context
        self.arch = str(row["arch"])
        self.weight_reader = WeightReader()
        self.host_inputs = [_index(number) for number in row["host_inputs"]]
        self._tables = Tables(KnownEntries())
        self._states: dict[int, Constant] = {}
        target = partition.session.target
        self._kernels = [context.kernel(number, target) for number in row["kernels"]]
        self._problems = [_problem(problem) for problem in row["problems"]]
        self._callbacks = tuple(stored_callback(callback) for callback in row.get("callbacks", []))
        programs = [self._program(program, target) for program in row["programs"]]
        self._weights = [self._weight(weight, programs) for weight in row["weights"]]
        self._plans = tuple(bytes(context.container.array(number)) for number in row["plans"])
        self._check_types(partition)
        self._rebuilt: CompiledCluster | None = None
        for numbered in (self._kernels, self._problems, self._weights, self._callbacks):
            if len(set(numbered)) != len(numbered):  # variants that are added later would get wrong indices
                raise ValueError("a stored target lists a kernel, library call, weight or callback twice")

    def prepare(self) -> Variant:
        """Return one `Variant` with all stored plans, their kernels and weights."""
        kernels: list[KernelSpec] = list(self._kernels)
        weights, problems = list(self._weights), list(self._problems)
        return Variant(None, kernels, weights, problems, self._tables, self._plans, self._callbacks)

    def build(self, input_shapes: Sequence[Sequence[int]], host_values: Sequence[Sequence[int]]) -> Variant:
        """Compile a variant from the stored graph, for inputs that no stored plan accepts.

        Raises: ImportError: the compiler is not installed; see `unforeseen`. NodeError, InvalidModel: as
        `CompiledCluster.build`. ContextError: the stored graph is damaged.
        """
        if self._rebuilt is None:
            self._rebuilt = self._compiler()
        return self._rebuilt.build(input_shapes, host_values)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights of all stored plans."""
        return sum(weight.nbytes for weight in self._weights)

    @property
    def input_names(self) -> list[str]:
        """Return the names of the cluster's inputs, as `CompiledCluster.input_names`."""
        return list(self._partition.inputs)

    def explain(self, shapes: Sequence[Sequence[int]], host_values: Sequence[Sequence[int]]) -> str:
        """Return the reasons why no stored plan accepts these inputs."""
        contents = dict(zip(self.host_inputs, host_values, strict=True))
        reasons = [
            f"plan {number}: {Guards(decode(plan), self._partition.inputs).refusal(shapes, contents)}"
            for number, plan in enumerate(self._plans)
        ]
        return "; ".join(reasons)

    def unforeseen(
        self, shapes: Sequence[Sequence[int]], host_values: Sequence[Sequence[int]], error: ImportError
    ) -> UnforeseenShapes:
        """Return the error for inputs that no stored plan accepts. ``error`` says why the compiler is not available."""
        subject = f"{self._context.container.subject}, partition {self._partition.name!r}"
        return UnforeseenShapes(
            f"{subject} has no plan for these inputs ({self.explain(shapes, host_values)}), and none can be compiled "
            f"here: {error}. Install the plugin's compiler, or compile the model for these shapes as well, with the "
            "option context_shapes or --shapes"
        )

    def kernels_added(self, variant: Variant) -> None:
        """Record that ``variant.kernels`` were added to the C cluster: see `CompiledCluster.kernels_added`."""
        variant.tables.kernels.commit()

    def problems_added(self, variant: Variant) -> None:
        """Record that ``variant.problems`` were added to the C cluster: see `CompiledCluster.problems_added`."""
        variant.tables.problems.commit()

    def callbacks_added(self, variant: Variant) -> None:
        """Record that ``variant.callbacks`` were added to the C cluster: see `CompiledCluster.callbacks_added`."""
        variant.tables.callbacks.commit()

    def weights_added(self, variant: Variant) -> None:
        """Record that the weights were added: see `CompiledCluster.weights_added`. Stored weights need no release."""
        if self._rebuilt is not None:
            self._rebuilt.weights_added(variant)

    def _check_types(self, partition: _Partition) -> None:
        """Compare the plans' inputs and outputs with those of the partition."""
        ports = tuple([DType(port["dtype"]).ort for port in partition.row[kind]] for kind in ("inputs", "outputs"))
        for plan in self._plans:
            if (found := element_types(plan)) != ports:
                raise ValueError(f"element types of a plan's inputs and outputs: got {found}, expected {ports}")

    def _compiler(self) -> CompiledCluster:
        """Return a cluster that compiles the stored graph.

        Indices in its variants continue those of the stored plans.
        """
        known = KnownEntries()
        known.kernels.update((kernel, number) for number, kernel in enumerate(self._kernels))
        known.problems.update((problem, number) for number, problem in enumerate(self._problems))
        known.callbacks.update((callback, number) for number, callback in enumerate(self._callbacks))
        for number, weight in enumerate(self._weights):
            known.weights[weight_key(weight)] = number
        compiler = self._partition.compiled(known)
        compiler.weight_reader = self.weight_reader
        compiler.host_inputs = self.host_inputs
        nodes: list[Node] = list(compiler.graph.all_nodes())
        for number, state in self._states.items():
            compiler.states[nodes[number]] = state
        return compiler

    def _program(self, row: Mapping[str, Json], target: Target) -> Precomputation:
        plan = decode(bytes(self._context.container.array(row["plan"])))
        kernels = tuple(self._context.kernel(number, target) for number in row["kernels"])
        weights = tuple(self._context.constant(number) for number in row["weights"])
        return Precomputation(plan, kernels, weights, (plan, kernels, weights))

    def _weight(self, row: Mapping[str, Json], programs: Sequence[Precomputation]) -> Weight:
        if "program" in row:
            program = programs[_index(row["program"])]
            if _index(row["output"]) >= len(program.plan.outputs):
                raise ValueError(
                    f"a weight is output {row['output']} of a precomputation with {len(program.plan.outputs)} outputs"
                )
            return Precomputed(program, row["output"], _index(row["bytes"]))
        constant = self._context.constant(row["constant"])
        if "node" in row:
            self._states[_index(row["node"])] = constant
        return constant


_FORMER_OPTIONS = {
    "channels_last": "prefer_nhwc",
    "conv_epilogue": "fuse_conv_bias",
    "conv_search": "cudnn_conv_algo_search",
    "large_workspace": "cudnn_conv_use_max_workspace",
    "line_first": "cudnn_conv1d_pad_to_nc1d",
    "measuring_ms": "tunable_op_max_tuning_duration_ms",
}
"""Name of an option in contexts that earlier versions wrote -> its current name."""


def _stored_options(row: Mapping[str, Json]) -> LoweringOptions:
    """Return a partition's stored options by their current names, without those that this version does not know."""
    known = {field.name for field in fields(LoweringOptions)}
    given = {_FORMER_OPTIONS.get(name, name): value for name, value in row.items()}
    if "measure_products" in row:
        given["tunable_op_enable"] = given["tunable_op_tuning_enable"] = row["measure_products"]
    if not row.get("attention", True):
        given["sdpa_kernel"] = int(AttentionKernel.MATH)
    elif not row.get("library_attention", True):
        given["sdpa_kernel"] = int(AttentionKernel.FLASH)
    kept = given.get("keep_float32", [])
    if not isinstance(kept, list | tuple) or not all(type(name) is str for name in kept):
        raise TypeError(f"keep_float32: expected a list of names, got {kept!r}")
    given["keep_float32"] = tuple(kept)
    return LoweringOptions(**{name: value for name, value in given.items() if name in known})


def _schedule_kind(row: Json) -> ScheduleKind:
    if not all(type(text) is str for text in row):
        raise TypeError(f"the kind of a schedule: got {row!r}, expected strings")
    return ScheduleKind(*row)


def _reasons(texts: Iterable[str]) -> str:
    """Join the first `MAX_REASONS` distinct texts that are not empty, and say how many there are besides."""
    known = [*dict.fromkeys(filter(None, texts))]
    more = f"; and {len(known) - MAX_REASONS} more" if len(known) > MAX_REASONS else ""
    return "; ".join(known[:MAX_REASONS]) + more


def _problem(row: Mapping[str, Json]) -> LibraryProblem:
    problem = LibraryProblem(**{**row, "flags": ProblemFlags(row["flags"])})
    numbers = problem.kind, problem.dtype, problem.rank
    if not all(type(x) is int and 0 <= x < 1 << 31 for x in numbers):
        raise ValueError(f"kind, type and rank of a library call: got {numbers}, expected integers of 31 bits")
    return replace(problem, alpha=float(problem.alpha), beta=float(problem.beta))
