"""The short form: what a signature says, and what it may not say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_origin

import pytest

from custom_operators import kept_registry
from ort_cuda_plugin import custom
from ort_cuda_plugin.clusters.claims.claims import analyze
from ort_cuda_plugin.custom import (
    T1,
    Alias,
    Constant,
    DType,
    Float32,
    HostInt64,
    Int64,
    Lowering,
    T,
    Tensor,
    op,
    registry,
    tensor_types,
)
from ort_cuda_plugin.model.ir import Graph, Node, Value
from ort_cuda_plugin.ops.registry import FLOATS, INTS
from ort_cuda_plugin.program.lowering.context import DeviceProperties


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with kept_registry():
        yield


def everything(
    ctx: Lowering,
    x: T,
    index: T1,
    sizes: HostInt64,
    plain: Tensor,
    bias: Float32 | None = None,
    *rest: Int64,
    alpha: float,
    count: int = 3,
    flag: bool = False,
    mode: str = "linear",
    pads: tuple[int, ...] = (),
    scales: list[float] | None = None,
    names: Sequence[str] = ("a",),
    table: Constant | None = None,
    unit: str = None,  # type: ignore[assignment]  # noqa: RUF013
) -> tuple[T, Annotated[Int64, Alias("sizes")]]:
    raise AssertionError


def test_the_signature_is_the_schema() -> None:
    made = op("a.b::Everything", version=7, types={"T1": INTS}, outputs=("y", "z"), priority=2)(everything).operator
    assert (made.name, made.domain, made.version, made.priority) == ("Everything", "a.b", 7, 2)
    assert made.origin == __name__
    rows = [(p.name, p.constraint, len(p.types), p.kind.name, p.on_host) for p in made.inputs]
    assert rows == [
        ("x", "T", len(FLOATS), "REQUIRED", False),
        ("index", "T1", len(INTS), "REQUIRED", False),
        ("sizes", "", 1, "REQUIRED", True),
        ("plain", "T", len(FLOATS), "REQUIRED", False),
        ("bias", "", 1, "OPTIONAL", False),
        ("rest", "", 1, "VARIADIC", False),
    ]
    assert made.inputs[4].types == {DType.FLOAT32}
    assert [(p.name, p.constraint, p.alias) for p in made.outputs] == [("y", "T", None), ("z", "", 2)]
    kinds = {a.name: (a.kind.name, a.default, a.optional) for a in made.attributes}
    assert kinds == {
        "alpha": ("FLOAT", None, False),
        "count": ("INT", 3, False),
        "unit": ("STRING", None, True),
        "flag": ("INT", False, False),
        "mode": ("STRING", "linear", False),
        "pads": ("INTS", (), False),
        "scales": ("FLOATS", None, True),
        "names": ("STRINGS", ("a",), False),
        "table": ("TENSOR", None, True),
    }
    assert made.attributes[2].is_flag


def test_all_types_of_tensors_are_there_to_import() -> None:
    public = {name for name, value in vars(tensor_types).items() if get_origin(value) is Annotated}
    assert public - set(custom.__all__) == set()
    assert all(getattr(custom, name) is getattr(tensor_types, name) for name in public)


def test_an_operator_that_is_not_registered_at_once_can_be_later() -> None:
    made = op("a.b::Later", register=False)(everything)
    assert made.operator not in registry.current().operators
    made.register()
    assert made.operator in registry.current().operators
    made.unregister()
    assert made.operator not in registry.current().operators
    with pytest.raises(AssertionError):  # calling the operator runs the author's function
        made(*[None] * 5, alpha=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def f(ctx, x: int) -> T: ...", "'x' is annotated with <class 'int'>, which is not a tensor type"),
        ("def f(ctx, x: T, *, a: dict) -> T: ...", "attribute 'a' is annotated with <class 'dict'>, expected int"),
        (
            "def f(ctx, x: T, **more: int) -> T: ...",
            r"\*\*more is not allowed: declare each attribute as a parameter after \*",
        ),
        ("def f(ctx, x: T): ...", "'y' is annotated with None"),
        ("def f(*, a: int) -> T: ...", "first parameter: got .*, expected the context"),
        ("def f(ctx, x: Unheard) -> T: ...", "an annotation cannot be read: name 'Unheard' is not defined"),
        (
            "def f(ctx, x: T) -> Annotated[T, Alias('z')]: ...",
            "'y' is declared as an alias of 'z', expected the",
        ),
    ],
)
def test_signatures_that_no_operator_has_are_refused(source: str, why: str) -> None:
    namespace: dict[str, Any] = {"T": T, "Annotated": Annotated, "Alias": Alias}
    exec(source, namespace)
    with pytest.raises(TypeError, match=r"a\.b::F: .*" + why):
        op("a.b::F")(namespace["f"])


def test_an_alias_has_the_shape_of_its_input() -> None:
    @op("a.b::Half")
    def half(ctx: Lowering, x: T) -> Annotated[T, Alias("x")]:
        return ctx.empty([2], x.dtype)

    x = Value("x", DType.FLOAT32, (4,))
    node = Node("here", "Half", "a.b", 1, (x,), (Value("y", None, None),))
    (verdict,) = analyze(Graph("g", [node], [x], [], {"a.b": 1}), DeviceProperties())
    assert "output 'y', an alias of 'x', is FLOAT32[2], expected FLOAT32[4]" in verdict.reason
