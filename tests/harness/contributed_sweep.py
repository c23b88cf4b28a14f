"""Sweep over com.microsoft: all element types and optional inputs of its operators, many nodes in one session.

A `Case` is a node with float32 inputs. `check_cases` runs it in every type that the operator table declares, in the
checking mode with adversarial streams. It compares with the CPU provider, with a reference, or with the plugin's own
float32 result, which other tests compare with NumPy. `untested` returns the types and inputs that no case covers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as state

from contributed import BFLOAT16, DISABLED, FLOAT, FLOAT16, TOLERANCES, Array
from emulator_harness import configured
from ort_cuda_plugin.abi.emulation import findings
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.ops import registry
from session_pair import ep_session

DOUBLE = int(TensorProto.DOUBLE)
REALS = (FLOAT, FLOAT16, BFLOAT16, DOUBLE)
ALLOWED = TOLERANCES | {DOUBLE: 2e-5, int(TensorProto.FLOAT8E4M3FN): 0.13, int(TensorProto.FLOAT8E5M2): 0.26}
"""Maximum relative and absolute error by element type; for 8-bit floats the distance of neighboring numbers."""
DOMAIN = "com.microsoft"


@functools.cache
def schemas() -> dict[str, Any]:
    """Return ONNX Runtime's schemas of the domain, by operator name."""
    return {schema.name: schema for schema in state.get_all_operator_schema() if schema.domain == DOMAIN}


@functools.cache
def on_the_cpu() -> dict[str, list[dict[str, list[str]]]]:
    """Return the type constraints of each of the CPU provider's kernels of the domain, by operator name."""
    found: dict[str, list[dict[str, list[str]]]] = {}
    for kernel in state.get_all_opkernel_def():
        if kernel.domain == DOMAIN and kernel.provider == "CPUExecutionProvider":
            found.setdefault(kernel.op_name, []).append(dict(kernel.type_constraints))
    return found


def onnx_type(text: str) -> int | None:
    """Return the TensorProto number of a type such as "tensor(float)"; None for types without device tensors."""
    name = text.removeprefix("tensor(").removesuffix(")").upper()
    dtype = DType.__members__.get({"FLOAT": "FLOAT32", "DOUBLE": "FLOAT64"}.get(name, name))
    return dtype.onnx if dtype is not None and dtype.is_supported else None


def declared(op_type: str) -> dict[str, frozenset[int]]:
    """Return, for each type constraint of the operator's schema, the types of the plugin's registered kernels."""
    (row,) = (row for row in registry.operators() if row.domain == DOMAIN and row.name == op_type)
    types = {}
    for constraint in schemas()[op_type].type_constraints:
        name = constraint.type_param_str
        allowed = {onnx_type(text) for text in constraint.allowed_type_strs} - {None}
        ours = {dtype.onnx for dtype in row.types[name]} if name in row.types else allowed
        types[name] = frozenset(kind for kind in ours & allowed if kind is not None)
    return types


def constraints(values: Sequence[Any], count: int) -> list[str]:
    """Return the type constraint, or the fixed type, of each of ``count`` inputs or outputs of a schema."""
    return [values[min(i, len(values) - 1)].typeStr for i in range(count)]


@dataclass(frozen=True)
class Case:
    """A node with its inputs in float32 (None: omitted).

    Attributes:
        outputs: whether the node has each output.
        reals: float types in which the case runs, if the operator has them; None: all.
        fixed: types of constraints that do not change with the float type. Inputs that are not float32 fix the types
            of their constraints themselves.
        constant: indices of inputs that are initializers.
        reference: computes the expected outputs. None: the CPU provider if it has a kernel, else the plugin in float32.
        on_cpu: by index, inputs that the CPU provider gets instead.
        own: the reason why the CPU provider's kernel cannot run these inputs; "": it can.
        part: returns the part of an output that is compared.
        tolerance: maximum error, if it is larger than the type's.
        steps: whether a tenth of the elements of an integer output may differ by 1.
    """

    op_type: str
    inputs: Sequence[Array | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[bool] = (True,)
    reals: Sequence[int] | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)
    constant: Sequence[int] = ()
    reference: Callable[..., Sequence[Array] | Array] | None = None
    on_cpu: Mapping[int, Array] = field(default_factory=dict)
    own: str = ""
    part: Callable[[int, Array], Array] = lambda _, y: y
    tolerance: float = 0.0
    steps: bool = False

    def types(self, real: int) -> dict[str, int]:
        """Return the type of each constraint when the case runs in the float type ``real``.

        Constraints of outputs only are ``real`` as well, if the operator allows it.
        """
        allowed = declared(self.op_type)
        result = {name: real for name, kinds in allowed.items() if real in kinds}
        result |= {name: next(iter(kinds)) for name, kinds in allowed.items() if len(kinds) == 1}
        for x, name in zip(self.inputs, constraints(schemas()[self.op_type].inputs, len(self.inputs)), strict=True):
            if x is None or name not in allowed:
                continue
            if x.dtype != np.float32:
                result[name] = helper.np_dtype_to_tensor_dtype(x.dtype)
            elif name not in result:
                result[name] = FLOAT
        return result | dict(self.fixed)

    def kinds(self, real: int) -> list[int | None]:
        """Return the type of each input when the case runs in the float type ``real``; None for an omitted one."""
        types = self.types(real)
        names = constraints(schemas()[self.op_type].inputs, len(self.inputs))

        def kind(x: Array | None, name: str) -> int | None:
            if x is None or x.dtype != np.float32:
                return None if x is None else helper.np_dtype_to_tensor_dtype(x.dtype)
            # A constraint of a variadic input may have several types in one node.
            return types[name] if types.get(name) in REALS else FLOAT

        return list(map(kind, self.inputs, names))

    def results(self, real: int) -> list[int | None]:
        """Return the type of each output when the case runs in the float type ``real``; None for an omitted one."""
        types = self.types(real)
        names = constraints(schemas()[self.op_type].outputs, len(self.outputs))
        return [
            (types[name] if name in types else onnx_type(name)) if wanted else None
            for name, wanted in zip(names, self.outputs, strict=True)
        ]

    @property
    def real_types(self) -> list[int]:
        """Return the float types in which the case runs."""
        inputs = constraints(schemas()[self.op_type].inputs, len(self.inputs))
        floats = [name for x, name in zip(self.inputs, inputs, strict=True) if x is not None and x.dtype == np.float32]
        allowed = declared(self.op_type)
        kinds = [allowed[name] & set(REALS) for name in floats if name in allowed and name not in self.fixed]
        widest = max(kinds, key=len, default={FLOAT})
        mine = [real for real in REALS if real in widest]
        return mine if self.reals is None else [real for real in mine if real in self.reals]

    def tested(self) -> set[tuple[str, str]]:
        """Return what the case covers, as pairs: (constraint, type), (input, "given") or (input, "left out"),
        (output, "given"), (attribute, "set").
        """
        schema = schemas()[self.op_type]
        found = {(name, "set") for name in self.attributes}
        for i, value in enumerate(schema.inputs):
            is_given = i < len(self.inputs) and self.inputs[i] is not None
            found.add((value.name, "given" if is_given else "left out"))
        found |= {(value.name, "given") for value, wanted in zip(schema.outputs, self.outputs, strict=False) if wanted}
        for real in {*self.real_types, *([] if self.is_compared_elsewhere else [FLOAT])}:
            for values, kinds in ((schema.inputs, self.kinds(real)), (schema.outputs, self.results(real))):
                for name, kind in zip(constraints(values, len(kinds)), kinds, strict=True):
                    if kind is not None:
                        found.add((name, TensorProto.DataType.Name(kind).lower()))
        return found

    @property
    def is_compared_elsewhere(self) -> bool:
        """Return whether there is a reference other than the plugin's own float32 result."""
        return self.reference is not None or self.has_cpu_kernel()

    @property
    def for_cpu(self) -> Case:
        """Return the case with the inputs that the CPU provider gets."""
        inputs = [self.on_cpu.get(i, x) for i, x in enumerate(self.inputs)]
        kinds = {helper.np_dtype_to_tensor_dtype(x.dtype) for x in self.on_cpu.values()}
        fixed = {name: kinds.pop() if kinds and name == "TY" else kind for name, kind in self.fixed.items()}
        return dataclasses.replace(self, inputs=inputs, fixed=fixed, on_cpu={})

    def has_cpu_kernel(self) -> bool:
        types = {name: f"tensor({_schema_name(kind)})" for name, kind in self.for_cpu.types(FLOAT).items()}
        return not self.own and any(
            all(types.get(name) in allowed for name, allowed in kernel.items() if name in types)
            for kernel in on_the_cpu().get(self.op_type, [])
        )


def _schema_name(kind: int) -> str:
    return str(TensorProto.DataType.Name(kind)).lower()


def untested(cases: Sequence[Case], op_type: str) -> set[str]:
    """Return the types, optional inputs and outputs, and attributes of an operator that no case covers."""
    covered = {part for case in cases if case.op_type == op_type for part in case.tested()}
    schema = schemas()[op_type]
    wanted = {(name, "set") for name in schema.attributes}
    for values, ways in ((schema.inputs, ("given", "left out")), (schema.outputs, ("given",))):
        for value in values:
            if str(value.option).endswith("Optional"):
                wanted |= {(value.name, way) for way in ways}
            kinds = declared(op_type).get(value.typeStr, frozenset())
            wanted |= {(value.typeStr, _schema_name(kind)) for kind in kinds}
    return {f"{name} {way}" for name, way in wanted - covered}


# ---- models ----


def model_of(cases: Mapping[int, Case], real: int, held: int | None = None) -> bytes:
    """Return one model of all cases. The tensors of case n are ``x<n>_<index>`` and ``y<n>_<index>``. See `fed`."""
    nodes, infos, values, initializers = [], [], [], []
    for number, case in cases.items():
        names = []
        for i, (x, kind) in enumerate(zip(fed(case, held or real, real), case.kinds(real), strict=True)):
            names.append("" if x is None else f"x{number}_{i}")
            if x is None or kind is None:
                continue
            if i in case.constant:
                initializers.append(numpy_helper.from_array(x, names[-1]))
            else:
                infos.append(helper.make_tensor_value_info(names[-1], kind, x.shape))
        outputs = []
        for i, kind in enumerate(case.results(real)):
            outputs.append("" if kind is None else f"y{number}_{i}")
            if kind is not None:
                values.append(helper.make_tensor_value_info(outputs[-1], kind, None))
        name = f"{case.op_type} {number}"
        nodes.append(helper.make_node(case.op_type, names, outputs, name=name, domain=DOMAIN, **case.attributes))
    graph = helper.make_graph(nodes, "sweep", infos, values, initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    result: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return result


def ort_value(x: Array, kind: int) -> ort.OrtValue:
    x = np.ascontiguousarray(x).reshape(x.shape)
    if x.dtype.isbuiltin == 1:
        return ort.OrtValue.ortvalue_from_numpy(x)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(x.view(np.uint8 if x.itemsize == 1 else np.uint16), kind)


def array(value: ort.OrtValue) -> Array:
    """Return the elements of a tensor in host memory as an array, also for types that NumPy lacks."""
    kind = onnx_type(value.data_type())
    assert kind is not None
    dtype, shape, nbytes = helper.tensor_dtype_to_np_dtype(kind), value.shape(), value.tensor_size_in_bytes()
    stored = np.frombuffer(ctypes.string_at(value.data_ptr(), nbytes), np.uint8)
    if kind in (TensorProto.INT4, TensorProto.UINT4):
        halves = np.stack([stored & 15, stored >> 4], -1).reshape(-1)[: int(np.prod(shape))].astype(np.int8)
        return (halves - 16 * (halves > 7) if kind == TensorProto.INT4 else halves).reshape(shape)
    return stored.view(dtype).reshape(shape)


def run(session: ort.InferenceSession, cases: Mapping[int, Case], real: int, held: int) -> dict[int, list[Array]]:
    """Run the session of `model_of`, and return the outputs of each case. ``held`` and ``real`` are those of `fed`."""
    binding = session.io_binding()
    alive = []
    for number, case in cases.items():
        for i, (x, kind) in enumerate(zip(fed(case, held, real), case.kinds(real), strict=True)):
            if x is not None and kind is not None and i not in case.constant:
                alive.append(ort_value(x, kind))
                binding.bind_ortvalue_input(f"x{number}_{i}", alive[-1])
    names = [value.name for value in session.get_outputs()]
    for name in names:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    results: dict[int, list[Array]] = {number: [] for number in cases}
    for name, value in zip(names, binding.get_outputs(), strict=True):
        results[int(name[1:].split("_")[0])].append(array(value))
    return results


# ---- the check ----


def fed(case: Case, held: int, real: int) -> list[Array | None]:
    """Return a case's inputs for the float type ``real``, after rounding them to the float type ``held``.

    So a Run in float32 can get the numbers of a Run in float16.
    """

    def cast(x: Array | None, kind: int | None) -> Array | None:
        return x if x is None or kind is None else x.astype(helper.tensor_dtype_to_np_dtype(kind))

    return list(map(cast, map(cast, case.inputs, case.kinds(held)), case.kinds(real)))


def differs(case: Case, number: int, got: Array, wanted: Array, real: int) -> str:
    """Describe what is wrong with an output; "" if it is right."""
    if got.shape != wanted.shape:
        return f"the shape {got.shape}, not {wanted.shape}"
    got, wanted = case.part(number, got), case.part(number, wanted)
    if got.dtype.kind in "iub":
        distance = np.abs(got.astype(np.int64) - wanted.astype(np.int64))
        few = case.steps and distance.max(initial=0) <= 1 and np.count_nonzero(distance) <= distance.size / 10
        return "" if few or not distance.any() else f"{np.count_nonzero(distance)} of {distance.size} integers"
    allowed = max(ALLOWED[real], ALLOWED[helper.np_dtype_to_tensor_dtype(got.dtype)], case.tolerance)
    wide, exact = got.astype(np.float64), wanted.astype(np.float64)
    right = np.isclose(wide, exact, allowed, allowed, equal_nan=True)
    far = np.nanmax(np.abs(wide[~right] - exact[~right]), initial=0)
    return "" if right.all() else f"{np.count_nonzero(~right)} of {right.size} numbers, by up to {far}"


def check_cases(cases: Sequence[Case], reals: Sequence[int] = REALS) -> None:
    """Run the cases in their types that are in ``reals``, one session for each type; assert that all are right.

    Cases that are compared with the plugin's own float32 result need FLOAT as the first of ``reals``.
    """
    numbered = dict(enumerate(cases))
    own = {n for n, case in numbered.items() if not case.is_compared_elsewhere}
    wrong: list[str] = []
    with configured(adversarial=1, check=1, seed=7):
        kept: tuple[ort.InferenceSession, dict[int, Case]] | None = None
        for real in reals:
            chosen = {n: case for n, case in numbered.items() if real in case.real_types}
            run_here = {n: case for n, case in numbered.items() if n in chosen or (real == FLOAT and n in own)}
            if not run_here:
                continue
            session = ep_session(model_of(run_here, real), DISABLED)
            actual = run(session, run_here, real, real)
            if real == FLOAT:
                kept = session, run_here
            expected = _expected({n: case for n, case in chosen.items() if n not in own}, real)
            if real != FLOAT and own & chosen.keys():
                assert kept is not None
                expected |= {n: y for n, y in run(*kept, FLOAT, real).items() if n in own}
            for n, case in chosen.items():
                for i, (got, wanted) in enumerate(zip(actual[n], expected.get(n, actual[n]), strict=True)):
                    if text := differs(case, i, got, wanted, real):
                        wrong.append(f"{case.op_type} {n} in {TensorProto.DataType.Name(real)}, output {i}: {text}")
        wrong += findings()
    assert not wrong, "\n".join(wrong)


def _expected(cases: Mapping[int, Case], real: int) -> dict[int, list[Array]]:
    """Return the outputs that the references and the CPU provider compute from inputs rounded to ``real``."""
    results: dict[int, list[Array]] = {}
    on_cpu = {n: case.for_cpu for n, case in cases.items() if case.reference is None}
    if on_cpu:
        options = ort.SessionOptions()
        options.graph_optimization_level = DISABLED
        session = ort.InferenceSession(model_of(on_cpu, FLOAT, real), options, providers=["CPUExecutionProvider"])
        results |= run(session, on_cpu, FLOAT, real)
    for n, case in cases.items():
        if case.reference is not None:
            made = case.reference(*fed(case, real, FLOAT))
            results[n] = [made] if isinstance(made, np.ndarray) else list(made)
    return results
