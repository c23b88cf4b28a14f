"""Each method of IPluginV3, its capabilities and its creator: calls, arguments and effects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import helper

from custom_operators import kept_registry, model, stock_session
from ort_cuda_plugin.custom.kernels.kernels import numba_kernel
from ort_cuda_plugin.custom.plugin import (
    CapabilityType,
    Phase,
    Plugin,
    PluginField,
    PluginFieldCollection,
    PluginFieldType,
    TensorFormat,
    register_creator,
    unregister_creator,
)
from ort_cuda_plugin.custom.plugin.calls import PluginFailure
from ort_cuda_plugin.custom.plugin.fields import fields_from_json, fields_to_json
from ort_cuda_plugin.custom.plugin.node import create
from ort_cuda_plugin.custom.registry import current
from ort_cuda_plugin.model.ir import DType, InvalidModel, Unsupported
from ort_cuda_plugin.program.analysis.program_text import ProgramText
from ort_cuda_plugin.program.lowering.context import BufferKind, Lowering, Tactic, Tuner
from ort_cuda_plugin.program.steps.trace import Copy, HostCall, Launch, ReadBack
from plugins import DOUBLE, Probe, ProbeCreator, context, lowered, tensor


def launches(ctx: Lowering) -> list[Launch]:
    return [step for step in ctx.trace.steps if isinstance(step, Launch)]


# ---- the creator ----


def test_get_plugin_name() -> None:
    creator = ProbeCreator()
    register_creator(creator)
    try:
        (operator,) = (each for each in current().operators if each.domain == "test.plugins")
        assert (operator.name, operator.version) == ("Probe", 1)
        with pytest.raises(
            ValueError, match=r"plugin Probe, version 1, namespace 'test.plugins': another creator is registered"
        ):
            register_creator(ProbeCreator())
    finally:
        unregister_creator(creator)
    with pytest.raises(LookupError, match=r"plugin Probe, version .*: no creator is registered"):
        unregister_creator(creator)
    wrong = ProbeCreator(get_plugin_name=lambda: "Prober")
    with pytest.raises(
        PluginFailure, match="plugin Probe-1: get_plugin_name of the plugin returned 'Prober', expected"
    ):
        lowered(wrong, tensor([2]))


def test_get_plugin_version() -> None:
    with pytest.raises(PluginFailure, match="get_plugin_version of the plugin returned '2', expected its creator's"):
        lowered(ProbeCreator(get_plugin_version=lambda: "2"), tensor([2]))

    class Beta(ProbeCreator):
        def get_plugin_version(self) -> str:
            return "beta"

    said = "plugin Probe: version: got 'beta', expected the digits of a number of at least 1"
    with pytest.raises(ValueError, match=said):
        register_creator(Beta())


def test_get_plugin_namespace() -> None:
    with pytest.raises(
        PluginFailure, match=r"get_plugin_namespace of the plugin returned '', expected its creator's 'test.plugins'"
    ):
        lowered(ProbeCreator(get_plugin_namespace=lambda: ""), tensor([2]))

    class Nowhere(ProbeCreator):
        def get_plugin_namespace(self) -> str:
            return ""

    creator = Nowhere()
    register_creator(creator)
    try:
        assert [each.name for each in current().operators if each.domain == "trt.plugins"] == ["Probe"]
    finally:
        unregister_creator(creator)


def test_get_field_names() -> None:
    creator = ProbeCreator()
    lowered(creator, tensor([2]), scale=0.5, pads=(1, 2, 3), mode="wide", data="\u00e4", each_run=0)
    plugin = creator.phases
    assert plugin == [Phase.BUILD]
    (fields,) = _fields_of(creator, scale=0.5, pads=(1, -2), mode="wide", data="\u00e4", each_run=1)
    assert [(field.name, field.value) for field in fields] == [
        ("each_run", 1),
        ("scale", 0.5),
        ("pads", (1, -2)),
        ("mode", "wide"),
        ("data", "\u00e4".encode()),
    ]
    assert fields[2].data.dtype == np.int8


def _fields_of(creator: ProbeCreator, **attributes: Any) -> list[PluginFieldCollection]:
    seen: list[PluginFieldCollection] = []

    def create_plugin(name: str, fields: PluginFieldCollection, phase: Phase) -> Plugin:
        seen.append(fields)
        return Probe({}, [], PluginFieldCollection())

    lowered(ProbeCreator(create_plugin=create_plugin), tensor([2]), **attributes)
    return seen


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"pads": (1, 300)},
            r"plugin Probe-1: field 'pads' = \(1, 300\), expected a number or a list of numbers",
        ),
        ({"each_run": (1, 2)}, r"plugin Probe-1: field 'each_run' = \(1, 2\) has 2 elements, expected 1"),
    ],
)
def test_a_field_that_does_not_fit_is_an_error_with_its_value(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        lowered(ProbeCreator(), tensor([2]), **attributes)


def test_create_plugin() -> None:
    def refuses(name: str, fields: PluginFieldCollection, phase: Phase) -> Plugin:
        assert (name, phase) == ("mine", Phase.BUILD)
        raise ValueError(f"a scale of {fields.get('scale')} is too small")

    with pytest.raises(
        PluginFailure, match=r"Probe-1: create_plugin with scale = 0.5: ValueError: a scale of 0.5 is too"
    ):
        lowered(ProbeCreator(create_plugin=refuses), tensor([2]), scale=0.5)
    with pytest.raises(PluginFailure, match="create_plugin with no fields returned no plugin"):
        lowered(ProbeCreator(create_plugin=lambda *_: None), tensor([2]))
    runtime = ProbeCreator()
    create(runtime, "plugin Probe-1", "mine", PluginFieldCollection(), Phase.RUNTIME)
    assert runtime.phases == [Phase.RUNTIME]


# ---- the plugin ----


def test_get_capability_interface() -> None:
    def part(kind: CapabilityType) -> Any:
        return None if kind is CapabilityType.BUILD else Probe({}, [], PluginFieldCollection())

    creator = ProbeCreator(get_capability_interface=part)
    with pytest.raises(PluginFailure, match=r"get_capability_interface\(BUILD\) returned .*, expected a PluginBuild"):
        lowered(creator, tensor([2]))
    create(creator, "plugin Probe-1", "mine", PluginFieldCollection(), Phase.RUNTIME)  # a creator that needs no fields


def test_clone() -> None:
    creator = ProbeCreator()
    from ort_cuda_plugin.custom.plugin.node import PluginNodes

    nodes, ctx = PluginNodes(creator), context()
    nodes.lower(ctx, [tensor([2])], {})
    again = context()
    again.node = ctx.node
    nodes.lower(again, [tensor([2])], {})
    assert creator.phases == [Phase.BUILD], "the node has one plugin, and each plan a clone of it"
    assert len(creator.arguments("clone")) == 4, "one for a plan, and one that is attached"
    with pytest.raises(PluginFailure, match="clone returned no plugin"):
        lowered(ProbeCreator(clone=lambda: None), tensor([2]))


def test_get_metadata_string() -> None:
    ctx = context()
    lowered(ProbeCreator(get_metadata_string=lambda: "scale 3"), tensor([2]), ctx=ctx)
    assert list(ctx.notes.values()) == ["scale 3"]


# ---- build ----


def test_get_nb_outputs() -> None:
    creator = ProbeCreator(
        get_nb_outputs=lambda: 2,
        get_output_data_types=lambda types: [types[0], DType.INT64],
        get_output_shapes=lambda inputs, *_: [inputs[0], (3,)],
    )
    assert [y.dtype for y in lowered(creator, tensor([2]))] == [DType.FLOAT32, DType.INT64]
    with pytest.raises(
        PluginFailure, match=r"get_output_data_types returned .* expected a DType for each of 2 outputs"
    ):
        lowered(ProbeCreator(get_nb_outputs=lambda: 2), tensor([2]))


def test_get_output_shapes() -> None:
    def shapes(inputs: Any, shape_inputs: Any, builder: Any) -> Any:
        n, m = inputs[0]
        assert m == 4
        return [(n * 2 + 1, -(-m // 3), builder.max(n, 7), builder.ceil_div(n, 4), builder.min(m, 3), n % 4 - 1)]

    x = tensor(["n", 4])
    creator = ProbeCreator(get_output_shapes=shapes, enqueue=lambda *_: None)
    (y,) = lowered(creator, x)
    n = x.shape[0]
    assert y.shape[:2] == (n * 2 + 1, 2)
    assert [d if isinstance(d, int) else d.hint for d in y.shape] == [13, 2, 7, 2, 3, 1]
    for wrong, message in (
        (lambda *_: [], "returned 0 shapes, expected one for each of 1 outputs"),
        (lambda *_: [("n",)], "get_output_shapes returned 'n' for a size, expected an int"),
        (lambda inputs, *_: 1 // 0, r"get_output_shapes for inputs of \[n.*, 4\]: ZeroDivisionError"),
    ):
        with pytest.raises(PluginFailure, match=message):
            lowered(ProbeCreator(get_output_shapes=wrong), x)
    with pytest.raises(InvalidModel, match="returned a negative size"):
        lowered(ProbeCreator(get_output_shapes=lambda *_: [(-2,)]), x)


def test_get_output_shapes_of_a_size_that_decides() -> None:
    """If `get_output_shapes` compares a size, a guard limits the plan to sizes for which the comparison agrees."""
    ctx, x = context(), tensor(["n"])
    creator = ProbeCreator(
        get_output_shapes=lambda inputs, *_: [(1,) if inputs[0][0] < 8 else (2,)], enqueue=lambda *_: 0
    )
    (y,) = lowered(creator, x, ctx=ctx)
    assert y.shape == (1,)
    assert [repr(guard) for guard in ctx.trace.guards] != []


def test_declare_size_tensor() -> None:
    """For a size that `enqueue` computes, memory is allocated for its upper bound; later steps wait for the size."""

    def creator(number: int = 1, kind: DType = DType.INT64) -> ProbeCreator:
        def shapes(inputs: Any, _: Any, builder: Any) -> Any:
            n = inputs[0][0]
            return [(builder.declare_size_tensor(number, n // 2, n),), ()]

        return ProbeCreator(
            get_nb_outputs=lambda: 2, get_output_data_types=lambda types: [types[0], kind], get_output_shapes=shapes
        )

    ctx, x = context(), tensor(["n"])
    found, size = lowered(creator(), x, ctx=ctx)
    (read,) = [step for step in ctx.trace.steps if isinstance(step, ReadBack)]
    assert read.source.buffer is size.buffer
    assert found.buffer.nbytes == x.buffer.nbytes
    assert (found.shape[0].hint, found.shape[0].is_read_back) == (3, True)  # type: ignore[union-attr]
    assert ctx.trace.requirements[-1].message == "size tensor 1 of plugin Probe-1 is not between 0 and its upper bound"
    for wrong in (creator(0), creator(2), creator(kind=DType.FLOAT32)):
        with pytest.raises(PluginFailure, match="expected the index of an output that is a scalar"):
            lowered(wrong, x)


def test_get_output_data_types() -> None:
    creator = ProbeCreator(get_output_data_types=lambda types: [DType.FLOAT16], enqueue=lambda *_: None)
    (y,) = lowered(creator, tensor([2]))
    assert y.dtype is DType.FLOAT16
    assert creator.arguments("get_output_data_types") == [([DType.FLOAT32],)]


def formats(*wanted: TensorFormat) -> ProbeCreator:
    def supports(pos: int, in_out: Any, nb_inputs: int) -> bool:
        assert nb_inputs == 1
        return in_out[pos].desc.format is wanted[pos]

    return ProbeCreator(supports_format_combination=supports, enqueue=lambda *_: None)


def test_supports_format_combination() -> None:
    x = tensor(["n", 8, 5, 5], DType.FLOAT16)
    ctx = context()
    creator = formats(TensorFormat.HWC8, TensorFormat.LINEAR)
    (y,) = lowered(creator, x, ctx=ctx)
    ((given, results, inputs, _, _, _),) = creator.arguments("enqueue")
    assert (given[0].format, results[0].format) == (TensorFormat.HWC8, TensorFormat.LINEAR)
    assert given[0].dims[1:] == (8, 5, 5), "in the model's order"
    assert inputs[0].shape[1:] == (5, 5, 8), "in memory"
    assert y.is_contiguous
    (y,) = lowered(formats(TensorFormat.LINEAR, TensorFormat.HWC), x)
    assert (y.shape, y.strides[1]) == (x.shape, 1)


@pytest.mark.parametrize(
    ("format", "shape", "dtype"),
    [
        (TensorFormat.HWC8, [1, 9, 2, 2], DType.FLOAT16),
        (TensorFormat.HWC8, [1, "c", 2, 2], DType.FLOAT16),
        (TensorFormat.HWC8, [1, 8, 2, 2], DType.FLOAT32),
        (TensorFormat.HWC, [8, 2, 2], DType.FLOAT32),
        (TensorFormat.DHWC8, [1, 8, 2, 2], DType.FLOAT16),
        (TensorFormat.CHW32, [1, "c", 2, 2], DType.FLOAT32),
        (TensorFormat.CHW4, [1, 4, 2, 2], DType.FLOAT32),
        (TensorFormat.CDHW32, [1, 32, 2, 2], DType.FLOAT16),
    ],
)
def test_formats_that_cannot_be_given_are_not_offered(format: TensorFormat, shape: Sequence[Any], dtype: DType) -> None:
    with pytest.raises(Unsupported, match=f"accepts no {dtype.name} in .*LINEAR.* for tensor 0 of the node"):
        lowered(formats(format, format), tensor(shape, dtype))


def test_get_format_combination_limit() -> None:
    asked = []

    def supports(pos: int, in_out: Any, nb_inputs: int) -> bool:
        asked.append(pos)
        return True

    creator = ProbeCreator(supports_format_combination=supports, get_format_combination_limit=lambda: 1)
    lowered(creator, tensor([1, 8, 2, 2]))
    assert asked == [0, 1], "the first combination is enough"


def test_get_aliased_input() -> None:
    ctx, x = context(), tensor(["n"])
    creator = ProbeCreator(get_aliased_input=lambda output: 0)
    (y,) = lowered(creator, x, ctx=ctx)
    ((_, _, inputs, outputs, _, _),) = creator.arguments("enqueue")
    assert inputs[0].tensor.buffer is outputs[0].tensor.buffer is y.buffer
    assert isinstance(ctx.trace.steps[0], Copy), "which costs nothing where both are bound to one memory"
    (launch,) = launches(ctx)
    assert y.buffer in launch.reads
    assert y.buffer in launch.writes
    with pytest.raises(PluginFailure, match=r"get_aliased_input\(0\) returned 3, expected -1, or the index"):
        lowered(ProbeCreator(get_aliased_input=lambda output: 3), x)
    other = ProbeCreator(get_aliased_input=lambda output: 0, get_output_shapes=lambda *_: [(2,)])
    with pytest.raises(PluginFailure, match=r"output 0, an alias of input 0, is .*, expected the input's"):
        lowered(other, x)


def test_get_aliased_input_of_an_initializer() -> None:
    ctx = context()
    (y,) = lowered(ProbeCreator(get_aliased_input=lambda output: 0), ctx.constant(np.ones(3, np.float32)), ctx=ctx)
    assert y.buffer.kind is BufferKind.STATE


def fills(scratch: Any, y: Any, n: int) -> None:
    y[0] = scratch[n - 1]


def test_get_workspace_size() -> None:
    kernel = numba_kernel(fills)

    def enqueue(_: Any, __: Any, inputs: Any, outputs: Any, workspace: Any, stream: Any) -> None:
        n = inputs[0].shape[0]
        half = workspace.view(DType.FLOAT32, (n,), offset=4 * n)
        stream.memset(workspace, 0)
        stream.launch(kernel, 1, 1, [half, outputs[0], n])

    ctx, x = context(), tensor(["n"])
    creator = ProbeCreator(get_workspace_size=lambda inputs, _: inputs[0].desc.dims[0] * 8, enqueue=enqueue)
    lowered(creator, x, ctx=ctx)
    (launch,) = launches(ctx)
    scratch = launch.args[0]
    assert (scratch.buffer.nbytes, scratch.offset) == (x.shape[0] * 8, x.shape[0])  # type: ignore[union-attr]
    assert scratch.buffer in launch.reads  # type: ignore[union-attr]
    for wrong in (lambda *_: 1.5, lambda *_: "much"):
        with pytest.raises(PluginFailure, match="get_workspace_size returned"):
            lowered(ProbeCreator(get_workspace_size=wrong), x)
    with pytest.raises(InvalidModel, match="a negative number of bytes"):
        lowered(ProbeCreator(get_workspace_size=lambda *_: -1), x)
    large = ProbeCreator(get_workspace_size=lambda *_: 8, enqueue=lambda *given: given[4].view(DType.FLOAT32, (6,)))
    with pytest.raises(PluginFailure, match=r"view: got bytes 0 to 24 of a tensor that has 8 bytes"):
        lowered(large, x)


def stores_a_float(x: Any, y: Any, scratch: Any) -> None:
    total = 0.0
    scaled = x[0] * 2
    total += scaled
    scratch[0] = scaled
    y[0] = total


def stores_whole_numbers(x: Any, y: Any, scratch: Any) -> None:
    scratch[0] = x[0] > 0
    scratch[1] = int(x[0] * 2.5)
    scratch[2] = 7
    y[0] = scratch[2] * 0.5


def test_floats_in_a_workspace_need_a_view() -> None:
    def enqueue(kernel: Any, view: bool) -> Any:
        def launch(_: Any, __: Any, inputs: Any, outputs: Any, workspace: Any, stream: Any) -> None:
            scratch = workspace.view(DType.FLOAT32, (2,)) if view else workspace
            stream.launch(kernel, 1, 1, [inputs[0], outputs[0], scratch])

        return launch

    def lower(function: Any, view: bool = False) -> None:
        made = enqueue(numba_kernel(function), view)
        lowered(ProbeCreator(get_workspace_size=lambda *_: 8, enqueue=made), tensor(["n"]))

    said = (
        r"kernel stores_a_float stores floats into parameter 2, the workspace, .*Pass workspace\.view\(DType\.FLOAT32"
    )
    with pytest.raises(PluginFailure, match=said):
        lower(stores_a_float)
    lower(stores_a_float, view=True)
    lower(stores_whole_numbers)


@pytest.mark.parametrize("each_run", [0, 1])
def test_a_workspace_may_be_empty(each_run: int) -> None:
    """The workspace of empty inputs has no bytes, and is a tensor all the same."""
    seen: list[tuple[int, ...]] = []

    def enqueue(_: Any, __: Any, inputs: Any, outputs: Any, workspace: Any, stream: Any) -> None:
        seen.append((workspace.view(DType.FLOAT32, inputs[0].shape).size, *inputs[0].shape))

    sizes: list[dict[str, Any]] = [{"get_workspace_size": lambda inputs, _: inputs[0].desc.dims[0] * 4}, {}]
    for methods in sizes:
        with kept_registry():
            register_creator(ProbeCreator(enqueue=enqueue, **methods))
            node = helper.make_node("Probe", ["x"], ["y"], domain="test.plugins", each_run=each_run)
            session = stock_session(model([node], {"x": [0]}, ["y"]))
            assert session.run(None, {"x": np.ones(0, np.float32)})[0].shape == (0,)
        assert seen.pop() == (0, 0)


def test_configure_plugin() -> None:
    creator = ProbeCreator()
    lowered(creator, tensor(["n", 4]))
    (((given,), (result,)),) = creator.arguments("configure_plugin")
    assert (given.desc.dims, given.min, given.opt) == ((-1, 4), (0, 4), (6, 4))
    assert given.max[1] == 4
    assert result.desc.type is DType.FLOAT32

    def refuses(inputs: Any, outputs: Any) -> None:
        raise ValueError(f"{inputs[0].desc.dims[1]} channels, at most 3")

    message = r"plugin Probe-1: configure_plugin for inputs of \[n.*, 4\]: ValueError: 4 channels, at most 3"
    with pytest.raises(PluginFailure, match=message):
        lowered(ProbeCreator(configure_plugin=refuses), tensor(["n", 4]))
    with pytest.raises(PluginFailure, match=r"configure_plugin .*: it returned the status 7"):
        lowered(ProbeCreator(configure_plugin=lambda *_: 7), tensor(["n", 4]))


def test_get_nb_tactics() -> None:
    creator = ProbeCreator(get_nb_tactics=lambda: 2, get_valid_tactics=lambda: [1])
    with pytest.raises(
        PluginFailure, match=r"get_valid_tactics returned \[1\], expected 2 tactics, as get_nb_tactics says"
    ):
        lowered(creator, tensor([2]))


def test_get_valid_tactics() -> None:
    creator = ProbeCreator(get_valid_tactics=lambda: [5, 3])
    lowered(creator, tensor([2]))
    assert creator.arguments("set_tactic") == [(5,)], "without measurements the first"
    for wrong in ([0], [1, 1], ["one"]):
        with pytest.raises(PluginFailure, match="expected distinct integers of at least 1"):
            lowered(ProbeCreator(get_valid_tactics=lambda wrong=wrong: wrong), tensor([2]))


def test_get_timing_cache_id() -> None:
    """The id names the problem in the timing cache; each candidate is a tactic with a combination of formats."""
    asked: list[tuple[str, list[str]]] = []

    class LastIsFastest(Tuner):
        def choice(self, ctx: Any, step: Any, choices: Any) -> None:
            raise AssertionError(f"an operator is measured, and no step: got {step}")

        def fastest(self, ctx: Any, problem: str, inputs: Any, names: Sequence[str], make: Any) -> Tactic:
            asked.append((problem, list(names)))
            return Tactic(names[-1], "measured")

    def run(**methods: Any) -> tuple[Any, ...]:
        ctx, creator = context(), ProbeCreator(get_valid_tactics=lambda: [4, 2], **methods)
        ctx.tuner = LastIsFastest()
        lowered(creator, tensor([2]), ctx=ctx)
        ((tactic,),) = creator.arguments("set_tactic")
        return tactic, launches(ctx)[0].note

    assert run(get_timing_cache_id=lambda: "doubling") == (2, "tactic 2, LINEAR/LINEAR: measured")
    assert asked == [("plugin Probe-1 doubling", ["4, LINEAR/LINEAR", "2, LINEAR/LINEAR"])]
    assert run() == (4, "tactic 4, LINEAR/LINEAR: not measured, since it has no get_timing_cache_id")


# ---- runtime ----


def test_set_tactic() -> None:
    creator = ProbeCreator()
    lowered(creator, tensor([2]))
    assert creator.arguments("set_tactic") == [(0,)]
    with pytest.raises(PluginFailure, match="set_tactic 0: it returned the status 1"):
        lowered(ProbeCreator(set_tactic=lambda tactic: 1), tensor([2]))


def test_on_shape_change() -> None:
    creator = ProbeCreator()
    lowered(creator, tensor(["n"]))
    order = ["attach_to_context", "set_tactic", "on_shape_change", "enqueue"]
    assert [name for name, _ in creator.notes if name in order] == order
    (((given,), _),) = creator.arguments("on_shape_change")
    assert given.dims[0] * 2 == 12, "the sizes at hand"


def test_enqueue() -> None:
    """`enqueue` is called once per plan, and its launches become the plan's."""
    ctx, x = context(), tensor(["n"])
    creator = ProbeCreator()
    (y,) = lowered(creator, x, ctx=ctx)
    (launch,) = launches(ctx)
    assert launch.kernel == DOUBLE.spec(("*f32", "*f32", "i64"), 1)
    assert [buffer.kind for buffer in launch.reads] == [BufferKind.SCRATCH, BufferKind.INPUT]
    assert launch.writes == (y.buffer,)
    ((*_, stream),) = creator.arguments("enqueue")
    for ask in (lambda: stream.handle, lambda: stream.read(y), stream.synchronize):
        with pytest.raises(TypeError, match="enqueue_is_recorded = True, enqueue\\(\\) has no"):
            ask()

    def refuses(*_: Any) -> None:
        raise ValueError("a value of 7")

    with pytest.raises(PluginFailure, match=r"plugin Probe-1: enqueue for inputs of \[n.*\]: ValueError: a value of 7"):
        lowered(ProbeCreator(enqueue=refuses), x)


def test_enqueue_in_each_run() -> None:
    ctx = context()
    lowered(ProbeCreator(), tensor(["n"]), ctx=ctx, each_run=1)
    (call,) = ctx.trace.steps
    assert isinstance(call, HostCall)
    assert call.callback.name == "enqueue of plugin Probe-1"
    text = ProgramText(["x"], ["y"]).program("lowered", ctx.trace.steps)
    assert re.search(r"Python, in each Run +%0 f32\[n\] 24 B <- x f32\[n\] 24 B", text), text
    assert "enqueue of plugin Probe-1" in text
    assert "each Run calls enqueue of plugin Probe-1 in Python" in next(iter(ctx.notes.values()))


def test_attach_to_context() -> None:
    creator = ProbeCreator()
    lowered(creator, tensor([2]))
    ((resources,),) = creator.arguments("attach_to_context")
    assert resources.is_emulated
    with resources.resources.acquire("shared by plugins", lambda: 3) as shared:
        assert shared == 3
    with pytest.raises(PluginFailure, match="attach_to_context returned no plugin with a RUNTIME capability"):
        lowered(ProbeCreator(attach_to_context=lambda context: None), tensor([2]))


def test_get_fields_to_serialize() -> None:
    ctx, creator = context(), ProbeCreator()
    lowered(creator, tensor(["n"]), ctx=ctx, each_run=1, scale=0.5, data="\u00e4")
    (call,) = ctx.trace.steps
    assert isinstance(call, HostCall)
    assert call.callback.stored is not None
    stored = fields_from_json(call.callback.stored["fields"])
    assert {field.name: field.value for field in stored} == {"each_run": 1, "scale": 0.5, "data": "\u00e4".encode()}


def test_fields_of_every_type_are_stored() -> None:
    values: dict[PluginFieldType, Any] = {
        PluginFieldType.CHAR: "text",
        PluginFieldType.UNKNOWN: b"\0bytes",
        PluginFieldType.DIMS: (2, -1),
    }
    fields = [PluginField.of(kind.name, values.get(kind, (1, 3)), kind) for kind in PluginFieldType]
    again = fields_from_json(fields_to_json(fields))
    assert [(x.name, x.type, x.value) for x in again] == [(x.name, x.type, x.value) for x in fields]


def test_sizes_that_are_guessed_are_no_reason_to_refuse_a_node() -> None:
    """A claim holds for all sizes, so a check that fails for guessed sizes must not decline the node."""

    def refuses(inputs: Any, outputs: Any) -> None:
        if inputs[0].dims[0] != 5:
            raise ValueError("not 5")

    ctx = Lowering(context().device, try_step=lambda *_: None, speculative=True)
    lowered(ProbeCreator(on_shape_change=refuses), tensor(["n"]), ctx=ctx)
    with pytest.raises(PluginFailure, match="ValueError: not 5"):
        lowered(ProbeCreator(on_shape_change=refuses), tensor([6]), ctx=ctx)
