"""Mistakes of operator authors: each gives an error that explains it, and never a wrong result."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from custom_operators import DOMAIN, kept_registry, model, stock_session
from ort_cuda_plugin.clusters.nodes.shape_inference import infer_results
from ort_cuda_plugin.compiler.compile import KernelCompileError, kernel_ir
from ort_cuda_plugin.custom import (
    SUM,
    DType,
    HostInt64,
    Int64,
    Lowering,
    Op,
    T,
    array_kernel,
    elementwise,
    gather_map,
    launch,
    op,
    permute,
    reduce,
    registry,
    reshape,
    row_map,
    scalar,
    squeeze,
    unsqueeze,
)
from ort_cuda_plugin.custom.plugin import register_creator, unregister_creator
from ort_cuda_plugin.custom.plugin.calls import PluginFailure
from ort_cuda_plugin.custom.plugin.streams import RunStream
from ort_cuda_plugin.model.ir import Graph, InvalidModel, Node, Unsupported, Value
from ort_cuda_plugin.program.steps.trace import Launch
from plugins import DOUBLE, ProbeCreator, context, lowered, tensor


@pytest.fixture(autouse=True)
def own_operators() -> Any:
    with kept_registry():
        yield


def made_by(body: Callable[[Lowering, Any], Any], ctx: Lowering | None = None) -> None:
    """Lower an operator whose function calls ``body``, for a float32 input of shape [n, m]."""

    @op("my.domain::Tried", register=False)
    def tried(ctx: Lowering, x: T) -> T:
        return body(ctx, x)  # type: ignore[no-any-return]

    tried.operator.lower(ctx or context(), [tensor(["n", "m"])], {})


def per_element(function: Callable[[Any], Any]) -> Callable[[Lowering, Any], Any]:
    return lambda ctx, x: elementwise(ctx, function, x)


def per_place(function: Callable[[Any], Any], dtype: DType = DType.FLOAT32) -> Callable[[Lowering, Any], Any]:
    return lambda ctx, x: gather_map(ctx, x.shape, dtype, lambda maps, c: function(maps.source(x).at(c)))


NUMPY: Any = np
NAME: Any = "float32"
BODIES: dict[str, tuple[Callable[[Lowering, Any], Any], str]] = {
    "== in a choice": (per_element(lambda a: scalar.where(a == 0, a, 1)), "== and != compare Python's objects, use eq"),
    "== beside a condition": (per_element(lambda a: scalar.where((a > 0) & (a != a), a, 1)), "use equal() and"),
    "== that is cast": (per_element(lambda a: scalar.cast(a == 0, DType.FLOAT32)), "use equal() and"),
    "== as the result": (per_element(lambda a: a == 0), "use equal() and"),
    "a choice of numbers": (per_element(lambda a: scalar.where(a > 0, 1, 0)), "got 1 and 0. constant() converts"),
    "a number": (per_element(lambda a: 1.0), "expected an expression, got 1.0: constant() converts"),
    "a number of a place": (per_place(lambda a: 1.0), "expected an expression, got 1.0: constant() converts"),
    "/ of integers": (per_element(lambda a: scalar.cast(a, DType.INT32) / 2), "/ of INT32: expected floats. Divide"),
    "/ of a size": (lambda ctx, x: ctx.empty([x.shape[0] / 2], x.dtype), "use // or ceildiv() in place of /"),
    "a size as a number": (lambda ctx, x: [0] * int(x.shape[0]), "the size n is symbolic, expected an integer"),
    "a size": (lambda ctx, x: elementwise(ctx, lambda a: a + x.shape[0], x), ": maps.dim() converts a size"),
    "a type of NumPy": (
        lambda ctx, x: ctx.empty(x.shape, NUMPY.float32),
        "expected an element type such as DType.FLOAT32, got <class 'numpy.float32'>",
    ),
    "a name of a type": (
        per_element(lambda a: scalar.cast(a, NAME)),
        "expected an element type such as DType.FLOAT32, got 'float32'",
    ),
    "an array": (
        lambda ctx, x: elementwise(ctx, lambda a, b: a * b, x, NUMPY.ones(3)),
        "input: got ndarray, expected a tensor. Convert arrays by ctx.constant",
    ),
    "a size as a shape": (
        lambda ctx, x: ctx.empty(x.size, x.dtype),
        "shape: expected whole numbers or expressions, got m*n",
    ),
    "no such axis": (lambda ctx, x: permute(ctx, x, [0, 2]), "axis: got 2, expected one in [-2, 2)"),
    "another type": (
        per_place(lambda a: a, DType.INT64),
        "element of a result: got type FLOAT32, expected INT64. cast() the element",
    ),
    "too many": (lambda ctx, x: (x, x), "my.domain::Tried-1 returned 2 outputs, expected 1"),
    "an end of the program": (lambda ctx, x: exit(1), "failed with SystemExit"),
    "an end of a generator": (lambda ctx, x: next(_ends()), "failed with GeneratorExit"),
}


def _ends() -> Any:
    raise GeneratorExit
    yield


@pytest.mark.parametrize("name", BODIES)
def test_a_body(name: str) -> None:
    body, said = BODIES[name]
    with pytest.raises(
        Unsupported, match=r"^my\.domain::Tried-1.*" + re.escape(said.removeprefix("my.domain::Tried-1"))
    ):
        made_by(body)


def test_what_looks_right_is_right() -> None:
    def body(ctx: Lowering, x: Any) -> Any:
        y = elementwise(ctx, lambda a: abs(a) ** 2 % 3, x)
        return gather_map(ctx, y.shape, y.dtype, lambda maps, c: maps.source(y).at([0, c[1]]))

    made_by(body)


def test_axes_count_from_the_end_too() -> None:
    def body(ctx: Lowering, x: Any) -> Any:
        y = squeeze(ctx, unsqueeze(ctx, x, [-1]), [-1])
        assert y.shape == x.shape
        total = reduce(ctx, lambda row, a: row.reduce(SUM, a), y, [-1], keepdims=False)
        assert total.shape == x.shape[:1]
        (y,) = row_map(ctx, lambda row, a: ([a / row.reduce(SUM, a)], []), [-1], permute(ctx, y, [-1, 0]))
        assert y.shape == x.shape[::-1]
        return y

    made_by(body)


@pytest.mark.parametrize("shape", [(3, 3), (np.int64(2), 3), (1, 5)])
def test_a_view_has_as_many_elements(shape: tuple[int, ...]) -> None:
    """Without the check, a view with fewer elements would silently drop the others."""

    @op("my.domain::Tried")
    def tried(ctx: Lowering, x: T) -> T:
        return reshape(ctx, x, shape) if shape[0] > 1 else squeeze(ctx, unsqueeze(ctx, x, [0]), [1])

    session = stock_session(model([helper.make_node("Tried", ["x"], ["y"], domain=DOMAIN)], {"x": ["n"]}, ["y"]))
    given = session.run(None, {"x": np.ones(int(np.prod(shape)) if shape[0] > 1 else 1, np.float32)})[0]
    assert given.shape == (shape if shape[0] > 1 else (1,))
    with pytest.raises(Exception, match=r"must have as many elements|dimension 1 must have size 1"):
        session.run(None, {"x": np.ones(12, np.float32)})


def test_numbers_of_numpy_are_numbers() -> None:
    def body(ctx: Lowering, x: Any) -> Any:
        y = ctx.empty([NUMPY.int64(4), 4], x.dtype)
        launch(ctx, filled, np.int64(1), np.int32(64), [y, np.float32(2), np.int64(3)], writes=[y])
        return y

    made_by(body)


@array_kernel
def filled(y: Any, a: float, b: int) -> None:
    y[0, 0] = a + b


@array_kernel
def copy(x: Any, y: Any) -> None:
    y[0, 0] = x[0, 0]


def test_a_result_that_nothing_writes() -> None:
    said = r"^my\.domain::Tried-1: nothing writes output 'y': launch a kernel that does"
    with pytest.raises(InvalidModel, match=said):
        made_by(lambda ctx, x: ctx.empty(x.shape, x.dtype))
    made_by(lambda ctx, x: x)
    made_by(lambda ctx, x: ctx.empty((0, 4), x.dtype))
    register_creator(ProbeCreator(enqueue=lambda *_: None))
    (probe,) = registry.current().serving("test.plugins", "Probe", 1)
    with pytest.raises(InvalidModel, match="nothing writes output 'y'"):
        probe.lower(context(), [tensor(["n"])], {})


SIZES: dict[str, tuple[Callable[[Any], Any], Any, Any, str]] = {
    "a fraction": (lambda x: 1.5, 1, 0, "1.5 is not a size for its grid: use whole numbers"),
    "a negative one": (lambda x: (1, -1), 1, 0, "its grid is -1, expected 0 to"),
    "too large": (lambda x: 1 << 40, 1, 0, "its grid is 1099511627776, expected 0 to"),
    "a fraction of a block": (lambda x: 1, 2.0, 0, "2.0 is not a size for its block"),
    "shared memory": (lambda x: 1, 1, "4", "'4' is not a size for its shared memory"),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_of_a_launch(name: str) -> None:
    grid, block, shared, said = SIZES[name]

    def body(ctx: Lowering, x: Any) -> Any:
        y = ctx.empty(x.shape, x.dtype)
        launch(ctx, copy, grid(x), block, [x, y], writes=[y], shared_bytes=shared)
        return y

    with pytest.raises(
        Unsupported, match=r"my\.domain::Tried-1 failed with TypeError: kernel copy: " + re.escape(said)
    ):
        made_by(body)


def test_a_plugin_launches_in_a_run_what_is_not_possible() -> None:
    stream = RunStream(None)  # type: ignore[arg-type]
    given: list[tuple[Any, Any, Any, str]] = [
        (DOUBLE, 1.5, 1, "kernel double: 1.5 is not a size for its grid"),
        (DOUBLE, -1, 1, "kernel double: its grid is -1, expected 0 to"),
        (DOUBLE, 1, (64, 64), "kernel double: got a block of (64, 64, 1) threads"),
        (DOUBLE, 1, (1, 1, 65), "kernel double: got a block of (1, 1, 65) threads"),
        (np.exp, 1, 1, "expected a kernel, which one of these functions makes: numba_kernel, array_kernel"),
    ]
    for kernel, grid, block, said in given:
        with pytest.raises(TypeError, match=re.escape(said)):
            stream.launch(kernel, grid, block, [])


def test_a_plugin_gives_no_list() -> None:
    for method, given in (("get_output_shapes", None), ("get_output_shapes", [3]), ("get_output_data_types", "f")):
        with pytest.raises(PluginFailure, match=rf"plugin Probe-1: {method} returned .*, expected a"):
            lowered(ProbeCreator(**{method: lambda *_, given=given: given}), tensor(["n"]))


def test_a_plugin_gives_another_kind() -> None:
    for method, given in (("get_nb_outputs", 0), ("get_nb_outputs", "1"), ("get_metadata_string", 3)):
        with pytest.raises(PluginFailure, match=rf"plugin Probe-1: {method} returned {given!r}, expected "):
            lowered(ProbeCreator(**{method: lambda *_, given=given: given}), tensor(["n"]))


def compiled(kernel: Any) -> None:
    """Compile ``kernel`` for two arrays with two dimensions, as the operator Probe launches it."""
    ctx, x = context(), tensor(["n", "m"])
    y = ctx.empty(x.shape, x.dtype)
    launch(ctx, kernel, 1, 1, [x, y], writes=[y])
    (step,) = ctx.trace.steps
    assert isinstance(step, Launch)
    kernel_ir(step.kernel)


def test_a_kernel_that_does_not_compile_names_its_operator() -> None:
    @array_kernel
    def flat(x: Any, y: Any) -> None:
        y[0] = x[0]

    @array_kernel
    def wrong(x: Any, y: Any) -> None:
        y[0, 0] = x[0, 0].part

    with pytest.raises(
        KernelCompileError, match=r"^kernel 'flat' of test\.plugins::Probe \(.*as many indices as an array has"
    ):
        compiled(flat)
    with pytest.raises(
        KernelCompileError, match=r"^kernel 'wrong' of test\.plugins::Probe \(.*\): Unknown attribute 'p"
    ):
        compiled(wrong)


def first(x: T) -> T:
    return x


def nothing() -> None: ...


def default(ctx: Lowering, x: T, *, k: int = "a") -> T:  # type: ignore[assignment]
    return x


def plain(ctx: Lowering, x: T) -> T:
    return x


SIGNATURES: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no context": (first, {}, TypeError, "first parameter: got "),
    "no parameter": (nothing, {}, TypeError, "first parameter: got "),
    "no function": (3, {}, TypeError, "the decorator op needs a function, got 3"),
    "a default of another kind": (
        default,
        {},
        TypeError,
        "the default of attribute 'k' = 'a': expected the type 'int'",
    ),
    "types of nothing": (
        plain,
        {"types": {"U": {DType.INT8}}},
        TypeError,
        "types has 'U', but no input or output is annotated with",
    ),
    "types that are none": (
        plain,
        {"types": {"T": {"int8"}}},
        TypeError,
        "types['T'] = {'int8'}: expected element types",
    ),
    "a version that is a text": (plain, {"version": "1"}, ValueError, "version '1', expected a number from 1 to"),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature(name: str) -> None:
    function, options, kind, said = SIGNATURES[name]
    with pytest.raises(kind, match=r"^my\.domain::Sig.*" + re.escape(said)):
        op("my.domain::Sig", **options)(function)


def test_a_cell_of_a_notebook_runs_again() -> None:
    def cell() -> Op[Any, Any]:
        @op("my.domain::Again")
        def again(ctx: Lowering, x: T) -> T:
            return x

        return again

    _, second = cell(), cell()
    assert registry.current().serving(DOMAIN, "Again", 1) == [second.operator]
    with pytest.raises(ValueError, match=r"my\.domain::Again-1 with priority 0 is registered already by"):
        op("my.domain::Again")(plain)

    def class_of_cell() -> type[ProbeCreator]:
        @register_creator
        class Creator(ProbeCreator):
            pass

        return Creator

    class_of_cell()
    unregister_creator(class_of_cell())
    with pytest.raises(LookupError):
        unregister_creator(ProbeCreator())


def test_an_operator_that_nobody_registered_says_what_to_do() -> None:
    node = Node("here", "Missing", DOMAIN, 1, (), (Value("y", None, None),))
    advice = "Import the module that registers it"
    with pytest.raises(Unsupported, match=rf"my\.domain\.Missing is not implemented: .* {advice}"):
        registry.current().implementations(node, 1)
    graph = Graph("g", [node], [], [], {DOMAIN: 1})
    assert registry.snapshot_of(graph) is registry.current()


def test_sizes_that_the_host_reads_have_names_of_their_own() -> None:
    """ONNX Runtime takes dimensions with equal names to be equal, which those of two nodes need not be."""

    @op("my.domain::Repeat", register=False)
    def repeat(ctx: Lowering, x: T, count: HostInt64) -> tuple[T, T]:
        (n,) = ctx.host_values(count, "count")
        y = gather_map(ctx, [n], x.dtype, lambda maps, c: maps.source(x).at([0]))
        return y, y

    inputs = [Value("", DType.FLOAT32, (1,)), Value("", DType.INT64, (1,))]
    names = [[shape for _, shape in infer_results(repeat.operator, inputs, {})] for _ in range(2)]
    assert names[0][0] == names[0][1] != names[1][0]


def test_what_an_operator_says_of_values_that_it_computes_is_checked() -> None:
    @op("my.domain::Found")
    def found(ctx: Lowering, x: Int64) -> Int64:
        (n,) = ctx.read_back(elementwise(ctx, lambda a: a + 1, x), "how many", lower=1, upper=4)
        return gather_map(ctx, [n], DType.INT64, lambda maps, c: c[0])

    node = helper.make_node("Found", ["x"], ["y"], domain=DOMAIN)
    session = stock_session(model([node], {"x": [1]}, ["y"], TensorProto.INT64))
    assert session.run(None, {"x": np.array([3])})[0].tolist() == [0, 1, 2, 3]
    for x, said in (
        (4, "how many is more than 4, the upper bound that the operator declared"),
        (-1, "how many is less than 1, the lower bound that the operator declared"),
    ):
        with pytest.raises(Exception, match=rf"(?s)\[ONNXRuntimeError\].*\(Found\).*{said}"):
            session.run(None, {"x": np.array([x])})


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_a_body_ends_the_session(capfd: pytest.CaptureFixture[str]) -> None:
    @op("my.domain::Stopped")
    def stopped(ctx: Lowering, x: T) -> T:
        raise KeyboardInterrupt

    node = helper.make_node("Stopped", ["x"], ["y"], domain=DOMAIN)
    with pytest.raises((KeyboardInterrupt, RuntimeError), match=r"KeyboardInterrupt|^$"):
        stock_session(model([node], {"x": [1]}, ["y"]))
    assert "Exception ignored from cffi callback" not in capfd.readouterr().err
