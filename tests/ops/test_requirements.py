"""Error messages of operators: they name the input or attribute, the expected value, and the actual one."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ort_cuda_plugin
from ort_cuda_plugin.model.ir import DType, InvalidModel, Unsupported
from ort_cuda_plugin.ops import registry
from ort_cuda_plugin.ops import requirements as require
from ort_cuda_plugin.program.expressions.symbolic import Dim, symbol
from ort_cuda_plugin.program.lowering.context import DeviceProperties, Lowering, Tensor

OPERATORS = Path(ort_cuda_plugin.__file__).parent / "ops"

EXPECTED = re.compile(
    r"(add up to|agree|be|broadcast|divide|fit|give|have|hold|leave|name|not be|rotate|stay within)\b.*[^.]", re.DOTALL
)
"""Pattern of the text that follows "must" in a message."""
PLACES = {
    "that": (1, 2),
    "violation": (0, 1),
    "holds": (2, 3),
    "unsupported": (1, 3),
    "supported": (2, 4),
    "given": (1, 2),
}
"""Indices of the subject and of the expected value among the arguments of each helper."""
OTHERS = {"registry.py": 6}
"""File -> number of messages written without the helpers: missing inputs and operators. May only decrease."""


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def text(argument: ast.expr) -> str:
    """Return the text of a string literal, with {} for the fields of an f-string; "" for other expressions."""
    if isinstance(argument, ast.Constant):
        return str(argument.value)
    if isinstance(argument, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in argument.values)
    return ""


def texts(argument: ast.expr, function: ast.FunctionDef | None) -> list[str]:
    """Return the `text` of an argument; of a variable, that of each value that the function assigns to it."""
    if function is None or not isinstance(argument, ast.Name):
        return [text(argument)]
    found = []
    for assignment in ast.walk(function):
        if isinstance(assignment, ast.Assign):
            target, value = assignment.targets[0], assignment.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            found += [text(x) for name, x in pairs if isinstance(name, ast.Name) and name.id == argument.id]
    return found or [""]


def calls_of_functions(path: Path) -> dict[ast.Call, ast.FunctionDef | None]:
    """Return the calls in a file, with the innermost function that contains each."""
    tree = ast.parse(path.read_text())
    found: dict[ast.Call, ast.FunctionDef | None] = {x: None for x in ast.walk(tree) if isinstance(x, ast.Call)}
    for function in ast.walk(tree):  # outer functions come first
        if isinstance(function, ast.FunctionDef):
            found.update({x: function for x in ast.walk(function) if isinstance(x, ast.Call)})
    return found


def test_messages_of_operators_are_written_by_the_helpers() -> None:
    others = {}
    for path in sorted(OPERATORS.rglob("*.py")):
        direct = [ast.unparse(call.func) for call in calls(path)]
        count = sum(direct.count(name) for name in ("InvalidModel", "Unsupported", "ctx.require"))
        if count and path.name != "requirements.py":
            others[str(path.relative_to(OPERATORS))] = count
    assert others == OTHERS


def test_messages_say_what_must_be_and_what_is_supported() -> None:
    """The caller puts the operator's name before each message, so the message must not repeat it."""
    operators = {row.name for row in registry.operators()}
    wrong = []
    for path in sorted(OPERATORS.rglob("*.py")):
        for call, function in calls_of_functions(path).items():
            name = ast.unparse(call.func).removeprefix("require.")
            places = PLACES.get(name)
            if places is None or not ast.unparse(call.func).startswith("require."):
                continue
            if any(isinstance(argument, ast.Starred) for argument in call.args):
                continue
            subject_at, expected_at = places
            subjects = texts(call.args[subject_at], function)
            expectations = [t for x in call.args[expected_at : expected_at + 1] for t in texts(x, function)] or [""]
            for subject, expected in itertools.product(subjects, expectations):
                fits = name in ("unsupported", "supported") or not expected or EXPECTED.fullmatch(expected)
                names_operator = operators & set(re.findall(r"\bof ([A-Z]\w+)", subject + " " + expected))
                if not fits or names_operator or subject[:1].isdigit() or subject.endswith((".", ":")):
                    wrong.append(f"{path.relative_to(OPERATORS)}:{call.lineno}: {subject} must {expected}")
    assert wrong == []


@pytest.mark.parametrize("condition", [0, symbol(0, "n", 3) - 3])
def test_sizes_are_checked_when_a_plan_is_made_or_in_the_run(condition: Dim) -> None:
    ctx = Lowering(DeviceProperties())
    if isinstance(condition, int):
        with pytest.raises(InvalidModel, match=r"^depth must be positive, got -1$"):
            require.holds(ctx, condition, "depth", "be positive", -1)
    else:
        require.holds(ctx, condition, "depth", "be positive", condition)
        assert [each.message for each in ctx.trace.requirements] == [f"depth must be positive, got {condition!r}"]


def test_shapes_are_checked_by_the_names_of_sizes() -> None:
    ctx, n = Lowering(DeviceProperties()), symbol(0, "n", 3)
    x = ctx.empty((n, 2), DType.FLOAT32)
    require.shape(ctx, (n, 2), x=x, left_out=None)
    require.size(ctx, 2 * n, x=x)
    require.broadcast(ctx, (4, n, 2), x=x)
    require.multiple_of(ctx, 6 * n, 3, "a size")
    assert ctx.trace.requirements == []
    checks: list[tuple[Callable[[], None], str]] = [
        (lambda: require.shape(ctx, (n, 3), x=x), r"x must have the shape \[n, 3\], got \[n, 2\]"),
        (lambda: require.shape(ctx, (n,), x=x), r"x must have the shape \[n\], got \[n, 2\]"),
        (lambda: require.dim(ctx, 1, 4, x=x), r"x must have the size 4 in dimension 1, got \[n, 2\]"),
        (lambda: require.broadcast(ctx, (n, 3), x=x), r"x must broadcast to \[n, 3\], got \[n, 2\]"),
        (lambda: require.multiple_of(ctx, 7, 2, "a size"), "a size must be a multiple of 2, got 7"),
        (lambda: require.least_dim(ctx, 0, depth=-1), "depth must be at least 0, got -1"),
    ]
    for broken, message in checks:
        with pytest.raises(InvalidModel, match=f"^{message}$"):
            broken()
    require.scalar(ctx, x=x)
    assert [each.message for each in ctx.trace.requirements] == ["x must have one element, got [n, 2]"]


def test_a_declined_node_says_which_operator_has_what_and_what_is_supported() -> None:
    row, ctx = registry.lookup("", "RoiAlign", 16), Lowering(DeviceProperties())
    x, rois, of_image = (ctx.empty(shape, DType.FLOAT32) for shape in ((1, 1, 4, 4), (1, 4), (1,)))
    with pytest.raises(Unsupported, match=r"^RoiAlign: sampling_ratio is 4096; supported: up to 1024$"):
        row.lower(ctx, [x, rois, Tensor(DType.INT64, (1,), of_image.buffer)], {"sampling_ratio": 4096})
    with pytest.raises(
        Unsupported,
        match=r"^RoiAlign: the type of input 0 \(type constraint T1\) is i32; supported: bf16, f16, f32, f64$",
    ):
        row.lower(ctx, [Tensor(DType.INT32, x.shape, x.buffer), rois, of_image], {})


def tensor(rank: int, dtype: DType = DType.FLOAT32) -> Any:
    return SimpleNamespace(rank=rank, dtype=dtype)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda: require.that(False, "pads", "have 4 entries", 3), "pads must have 4 entries, got 3"),
        (lambda: require.rank(2, router_probs=tensor(3)), "router_probs must have rank 2, got rank 3"),
        (lambda: require.rank((2, 3), x=tensor(2), y=tensor(4)), "y must have rank 2 or 3, got rank 4"),
        (lambda: require.least_rank(1, gate=tensor(0)), "gate must have at least rank 1, got rank 0"),
        (lambda: require.least(1, max_distance=0), "max_distance must be at least 1, got 0"),
        (lambda: require.within(0, 1, ratio=1.5), r"ratio must be in \[0, 1\], got 1.5"),
        (lambda: require.one_of(("a", "b"), mode="c"), "mode must be one of 'a', 'b', got 'c'"),
        (lambda: require.all_or_none(key=1, value=None), "key and value must be given together .*, got key alone"),
        (
            lambda: require.heads(6, 4),
            "num_heads must be a positive multiple of kv_num_heads, got num_heads = 6 and kv_num_heads = 4",
        ),
        (lambda: require.block(24), "block_size must be a power of two of at least 16, got 24"),
        (lambda: require.element_type({DType.UINT8}, zeros=tensor(1)), "zeros must have the type u8, got f32"),
        (lambda: require.count((0, 2), base_values=[1]), "base_values must have 0 or 2 entries, got 1"),
        (lambda: require.multiple_count(3, inputs=[1]), "inputs must have a positive multiple of 3 entries, got 1"),
    ],
)
def test_a_message_names_what_is_expected_and_what_was_found(broken: Callable[[], None], text: str) -> None:
    with pytest.raises(InvalidModel, match=f"^{text}$"):
        broken()


def test_what_fits_passes() -> None:
    require.rank(2, given=tensor(2), left_out=None)
    require.all_or_none(key=None, value=None)
    require.all_or_none(key=1, value=2)
    require.heads(6, 3)
    require.count(range(3), names=["a", "b"])


def test_inputs_that_a_newer_schema_lets_differ_are_declined() -> None:
    half, single = (SimpleNamespace(dtype=each) for each in (DType.FLOAT16, DType.FLOAT32))
    wanted: dict[str, Any] = {"query": single, "key": None, "past_key": half}
    with pytest.raises(Unsupported, match="the type of past_key is f16; supported: f32, that of query"):
        require.one_type(**wanted)
    require.one_type(**wanted | {"past_key": single})


def test_messages_name_the_attributes_and_inputs_that_are_wrong() -> None:
    ctx = Lowering(DeviceProperties())
    x, weight = (ctx.empty(shape, DType.FLOAT32) for shape in ((1, 2, 4), (2, 1, 3)))
    convolution = registry.lookup("com.microsoft", "CausalConvWithState", 1)
    names = "input_channel_offset, input_channels, state_channels_last, state_length, state_update_capacity"
    expected = f"({names}) is (0, 0, -1, 2, 0); supported: the defaults (0, 0, -1, 0, 0)"
    with pytest.raises(Unsupported, match=f"^CausalConvWithState: {re.escape(expected)}$"):
        convolution.lower(ctx, [x, weight], {"state_length": 2})
    attention = registry.lookup("com.microsoft", "GroupQueryAttention", 1)
    lengths = Tensor(DType.INT32, (1,), ctx.empty((1,), DType.INT32).buffer)
    inputs = [x, x, None, None, None, lengths, ctx.empty((), DType.INT32)]
    with pytest.raises(
        InvalidModel, match=r"^key and value must be given together or left out together, got key alone$"
    ):
        attention.lower(ctx, inputs, {"num_heads": 1, "kv_num_heads": 1})
