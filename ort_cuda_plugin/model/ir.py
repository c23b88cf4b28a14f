"""Intermediate representation of a model: values, nodes and graphs, independent of ONNX Runtime's objects."""

from __future__ import annotations

import enum
import functools
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from ..abi.errors import Error

Array: TypeAlias = "npt.NDArray[Any]"
Parameter: TypeAlias = "int | float | bool | tuple[int, ...]"
"""An argument of a recipe other than its operands; a compiled model can store it."""

_storage: Final[Mapping[int, tuple[str, str, str]]] = {
    1: ("f32", "float32", "float"),
    2: ("u8", "uint8", "integer"),
    3: ("i8", "int8", "integer"),
    4: ("u16", "uint16", "integer"),
    5: ("i16", "int16", "integer"),
    6: ("i32", "int32", "integer"),
    7: ("i64", "int64", "integer"),
    9: ("b1", "bool", "bool"),
    10: ("f16", "float16", "float"),
    11: ("f64", "float64", "float"),
    12: ("u32", "uint32", "integer"),
    13: ("u64", "uint64", "integer"),
    16: ("bf16", "uint16", "float"),
    17: ("f8e4m3fn", "uint8", "float"),
    18: ("f8e4m3fnuz", "uint8", "float"),
    19: ("f8e5m2", "uint8", "float"),
    20: ("f8e5m2fnuz", "uint8", "float"),
    21: ("u4", "uint8", "integer"),
    22: ("i4", "int8", "integer"),
    23: ("f4e2m1", "uint8", "float"),
    24: ("f8e8m0", "uint8", "float"),
    25: ("u2", "uint8", "integer"),
    26: ("i2", "int8", "integer"),
}
"""Element types that tensors in device memory can have.

Number in ONNX's TensorProto -> short name, NumPy type of the stored element, kind of arithmetic.
"""
_packed_bits: Final[Mapping[int, int]] = {21: 4, 22: 4, 23: 4, 25: 2, 26: 2}
_ort_numbers: Final[Mapping[int, int]] = {24: 26, 25: 24, 26: 25}
"""Numbers in ONNXTensorElementDataType of the element types that have another number in ONNX's TensorProto."""


class DType(enum.Enum):
    """Element types. The value of a member is its number in ONNX's TensorProto.

    In inputs and outputs of a cluster, elements of fewer than 8 bits are packed, the first in the lowest bits. Inside a
    cluster, and in `Constant`, each element has its own byte, and integers are sign-extended. See `model.packed`.
    """

    FLOAT32 = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    STRING = 8
    BOOL = 9
    FLOAT16 = 10
    FLOAT64 = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BFLOAT16 = 16
    FLOAT8E4M3FN = 17
    FLOAT8E4M3FNUZ = 18
    FLOAT8E5M2 = 19
    FLOAT8E5M2FNUZ = 20
    UINT4 = 21
    INT4 = 22
    FLOAT4E2M1 = 23
    FLOAT8E8M0 = 24
    UINT2 = 25
    INT2 = 26

    def __init__(self, number: int) -> None:
        short, numpy_name, kind = _storage.get(number, ("", "", ""))
        self.onnx: int = number
        self.ort: int = _ort_numbers.get(number, number)  # number in ONNXTensorElementDataType
        self.short: str = short  # "f32", "bf16", "i64", "b1", ...; "" if device memory cannot hold the type
        self.itemsize: int = np.dtype(numpy_name).itemsize if numpy_name else 0
        self.bits: int = _packed_bits.get(number, 8 * self.itemsize)
        self.is_packed: bool = number in _packed_bits
        self.is_float: bool = kind == "float"
        self.is_integer: bool = kind == "integer"
        self.is_supported: bool = bool(short)  # device memory can hold tensors of this type

    __hash__ = object.__hash__  # faster than enum.Enum's, which hashes the name in Python code

    @property
    def numpy(self) -> np.dtype[Any]:
        """Return the NumPy type that stores an element.

        It is uint16 for bfloat16, uint8 for smaller floats, and (u)int8 for small integers. Raises ValueError if
        tensors in device memory cannot have the type.
        """
        if not self.is_supported:
            raise ValueError(f"{self.name}: tensors in device memory cannot have this element type")
        return np.dtype(_storage[self.onnx][1])

    @staticmethod
    @functools.cache
    def from_ort(number: int) -> DType:
        """Return the type with this number in ONNXTensorElementDataType. Raises ValueError if there is none."""
        return next((dtype for dtype in DType if dtype.ort == number), None) or DType(number)

    @staticmethod
    def of_attribute(number: int, what: str = "a result of element type") -> DType:
        """Return the type with this number in TensorProto; ``what`` comes before its name in messages.

        Raises InvalidModel if no type has the number, Unsupported if tensors in device memory cannot have the type.
        """
        if number not in DType._value2member_map_:
            raise InvalidModel(f"ONNX defines no element type with the number {number}")
        dtype = DType(number)
        if not dtype.is_supported:
            raise Unsupported("dtype", f"{what} {dtype.name} is not supported")
        return dtype

    @staticmethod
    def from_numpy(dtype: npt.DTypeLike) -> DType:
        """Return the element type for one of NumPy's own types. Raises ValueError if there is none."""
        name = np.dtype(dtype).name.upper()
        if np.dtype(dtype).isbuiltin == 2 or name not in DType.__members__:
            raise ValueError(f"no tensor element type corresponds to NumPy's {np.dtype(dtype)}")
        return DType[name]

    def __repr__(self) -> str:
        return self.name


HALVES: Final = frozenset({DType.FLOAT16, DType.BFLOAT16})
"""Floats of 16 bits."""
FLOATS_8: Final = frozenset({DType.FLOAT8E4M3FN, DType.FLOAT8E4M3FNUZ, DType.FLOAT8E5M2, DType.FLOAT8E5M2FNUZ})
"""Floats of 8 bits, for which ONNX defines only conversions, with and without saturation."""
NARROW_FLOATS: Final = HALVES | FLOATS_8 | {DType.FLOAT4E2M1, DType.FLOAT8E8M0}
"""Float types that kernels convert to float32 when they load an element."""


_KEPT_BYTES: Final = 1 << 16
"""Maximum bytes of a constant that stays in host memory after it was read from a file; larger ones are read again."""


class Constant:
    """A constant tensor, for example an initializer, whose contents are loaded on first use.

    ``load`` returns an array of ``dtype.numpy`` and ``shape``. With ``borrowed`` the array is a view of memory that ORT
    frees after Compile: call `keep` before that, or do not read the array again. ``is_initializer`` is true for the
    model's constants, which are the same object in every plan, and false for constants that operators make.
    ``is_state`` marks the initial contents of a node's state (see `Lowering.state`), which Runs change.

    With ``is_file``, contents above 64 KiB are read from a file each time, because host memory may not hold all weights
    at once. Attributes: name: the initializer's name, "" for other constants. recipe: derives the contents from other
    constants (``model.recipes``); None: they are not derived. decides: a plan or kernel depends on them (see `look`).
    derived: the constants that recipes derived from this one.
    """

    __slots__ = (
        "_array",
        "_borrowed",
        "_load",
        "_recent",
        "decides",
        "derived",
        "dtype",
        "is_file",
        "is_initializer",
        "is_state",
        "name",
        "recipe",
        "shape",
    )

    def __init__(
        self,
        dtype: DType,
        shape: tuple[int, ...],
        load: Callable[[], Array],
        *,
        borrowed: bool = False,
        is_initializer: bool = True,
        is_state: bool = False,
        is_file: bool = False,
        name: str = "",
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.name = name
        self._load = load
        self._borrowed = borrowed
        self.is_initializer = is_initializer
        self.is_state = is_state
        self.is_file = is_file
        self._array: Array | None = None
        self._recent: weakref.ref[Array] | None = None
        self.recipe: Recipe | None = None
        self.decides = False
        self.derived: dict[Hashable, Constant] = {}

    @staticmethod
    def of(array: Array, dtype: DType | None = None) -> Constant:
        """Return a constant with the contents of an array; ``dtype`` is needed for types that NumPy lacks."""
        return Constant(dtype or DType.from_numpy(array.dtype), array.shape, lambda: array, is_initializer=False)

    @property
    def array(self) -> Array:
        """Return the contents. Raises OSError or InvalidModel if they cannot be read."""
        recent = self._recent
        found = self._array if recent is None else recent()
        if found is None:
            found = self._load()
            assert found.shape == self.shape
            assert found.dtype == self.dtype.numpy
            if self.is_file and self.nbytes > _KEPT_BYTES:
                self._recent = weakref.ref(found)
            else:
                self._array = found
        return found

    def look(self) -> Array:
        """Return the contents and set ``decides``: later plans and kernels may depend on these contents."""
        self.decides = True
        for part in self.recipe.parts if self.recipe is not None else ():
            part.constant.look()
        return self.array

    def drop(self) -> None:
        """Free the contents; the next use loads them again."""
        self._array = self._recent = None

    def keep(self) -> None:
        """Copy borrowed contents, so that they stay valid after ORT frees the borrowed memory."""
        if self._borrowed:
            self._array = self.array.copy()
            self._borrowed = False

    def forget_borrowed(self) -> None:
        """Make reading borrowed contents an error, because ORT is about to free them."""

        def gone() -> Array:
            raise RuntimeError(f"initializer {self.name!r} was read after ONNX Runtime freed it. Report the model")

        if self._borrowed:
            self.release(gone)

    def release(self, load: Callable[[], Array]) -> None:
        """Free the contents; the next use loads them with ``load``."""
        self.drop()
        self._load = load
        self._borrowed = self.is_file = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def dense_strides(shape: Sequence[int]) -> list[int]:
    """Return the strides, in elements, of an array of the shape in C order."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


@dataclass(frozen=True)
class ConstantView:
    """A strided view of a constant; strides and ``offset`` count elements."""

    constant: Constant
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def array(self) -> Array:
        """Return the elements, which may share memory with the constant."""
        whole = self.constant.array
        flat = np.ascontiguousarray(whole).reshape(-1)[self.offset :]
        steps = [stride * flat.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)

    @property
    def is_whole(self) -> bool:
        """Return whether the view has all elements of the constant, in their order."""
        return (
            self.offset == 0
            and self.strides == tuple(dense_strides(self.shape))
            and self.shape == self.constant.shape
            and self.constant.size > 0
        )

    @property
    def is_inside(self) -> bool:
        """Return whether all elements of the view are elements of the constant."""
        if len(self.shape) != len(self.strides) or min((*self.shape, *self.strides, self.offset), default=0) < 0:
            return False
        if 0 in self.shape:
            return self.offset <= self.constant.size
        last = sum((dim - 1) * stride for dim, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + last < self.constant.size


@dataclass(frozen=True)
class Recipe:
    """Derivation of a constant from other constants (see ``model.recipes``).

    function: a key of ``recipes.FUNCTIONS``. parts: the function's operands. parameters: its other arguments. Equal
    recipes make equal contents for the same type and shape.
    """

    function: str
    parts: tuple[ConstantView, ...]
    parameters: tuple[Parameter, ...] = ()


@dataclass(eq=False)
class Value:
    """A named value of a graph.

    ``dtype`` is None if unknown or if the value is not a tensor; ``shape`` is None if the rank is unknown.

    A dimension is an int, a symbolic name, or None if unknown. ``is_container`` is set for a sequence, an optional
    value or a map.
    """

    name: str
    dtype: DType | None
    shape: tuple[int | str | None, ...] | None
    initializer: Constant | None = None
    is_container: bool = False

    @property
    def constant(self) -> Array | None:
        """Return the initializer's contents; None for other values. Plans may depend on them (see `Constant.look`)."""
        return None if self.initializer is None else self.initializer.look()

    def __repr__(self) -> str:
        dims = "?" if self.shape is None else ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        return f"{self.name}: {self.dtype.name if self.dtype else 'unknown'}[{dims}]"


class LongList(Sequence[float]):
    """A long list attribute, stored as an array: an array takes a tenth of a tuple's memory and time.

    A tree ensemble may have millions of elements in each of a dozen attributes.
    """

    def __init__(self, array: Array) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> LongList: ...
    def __getitem__(self, index: int | slice) -> float | LongList:
        if isinstance(index, slice):
            return LongList(self._array[index])
        number: float = self._array[index].item()
        return number

    def __iter__(self) -> Iterator[float]:
        return iter(self._array.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LongList):
            return np.array_equal(self._array, other._array)
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if dtype is None and self._array.dtype == np.float32:
            dtype = np.float64  # NumPy's type for a tuple of Python floats
        return np.array(self._array, dtype, copy=copy)


AttrValue: TypeAlias = "int | float | str | Constant | tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | LongList"


MAX_SUBGRAPH_DEPTH: Final = 16
"""Maximum nesting depth of subgraphs (bodies of control-flow nodes) that are read."""


@dataclass(eq=False)
class Node:
    """A node of a graph. ``domain`` is "" for ai.onnx. None stands for an omitted optional input or output.

    ``implicit_inputs`` are the values of outer scopes that the node's bodies read. ``subgraphs`` has the bodies by
    attribute name, without those nested deeper than `MAX_SUBGRAPH_DEPTH`. ``provider`` is the execution provider to
    which ORT has assigned the node, "" before the assignment.
    """

    name: str
    op_type: str
    domain: str
    since_version: int
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value | None, ...]
    attributes: Mapping[str, AttrValue] = field(default_factory=dict)
    index: int = 0
    implicit_inputs: tuple[Value, ...] = ()
    has_subgraphs: bool = False
    subgraphs: Mapping[str, Graph] = field(default_factory=dict)
    unreadable_attributes: tuple[str, ...] = ()
    provider: str = ""

    @property
    def own_name(self) -> str:
        """Return the node's name; if it has none, the name of its first output, or "(unnamed)" without outputs."""
        return self.name or next((value.name for value in self.outputs if value is not None), "") or "(unnamed)"

    @property
    def label(self) -> str:
        """Return the node's name in messages: `own_name`, then the operator's type."""
        return f"{self.own_name} ({self.op_type})"

    def reads(self) -> Iterator[Value]:
        """Yield every input of the node, implicit inputs included."""
        for value in self.inputs:
            if value is not None:
                yield value
        yield from self.implicit_inputs


@dataclass(eq=False)
class Graph:
    """Nodes in topological order. A graph and the bodies (subgraphs) of its nodes share one Value object per name.

    ``parent`` is the control-flow node around a body that ORT presents without its outer graph; it does not share
    Values with the body. ``operators`` are the custom operators at the creation of the session, a snapshot of
    `custom.registry`; None stands for the operators that are registered now.
    """

    name: str
    nodes: list[Node]
    inputs: list[Value]
    outputs: list[Value]
    opsets: Mapping[str, int] = field(default_factory=dict)
    is_subgraph: bool = False
    parent: Node | None = None
    operators: object = None

    @cached_property
    def used_values(self) -> frozenset[Value]:
        """Return the values that nodes read or the graph outputs, in the graph and its bodies."""
        read = frozenset(value for node in self.nodes for value in node.reads())
        bodies = (body for node in self.nodes for body in node.subgraphs.values())
        return read.union(self.outputs, *(body.used_values for body in bodies))

    def all_nodes(self) -> Iterator[Node]:
        """Yield the nodes of the graph, each followed by the nodes of its bodies."""
        for node in self.nodes:
            yield node
            for body in node.subgraphs.values():
                yield from body.all_nodes()

    def producers(self) -> dict[Value, Node]:
        return {value: node for node in self.nodes for value in node.outputs if value is not None}


class Unsupported(Error):
    """The plugin does not run this node; ORT assigns it to another execution provider.

    ``kind`` is one of "op", "version", "dtype", "attribute", "shape", "control-flow", "cost", "quarantine". ``node`` is
    the node, if a pass of the compiler raises the error; lowering functions leave it out.
    """

    kinds: Final = ("op", "version", "dtype", "attribute", "shape", "control-flow", "cost", "quarantine")

    def __init__(self, kind: str, reason: str, node: Node | None = None) -> None:
        assert kind in self.kinds, kind
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.node = node


class UnknownRank(Unsupported):
    """A node cannot be lowered yet, because the rank of an input or of a result is unknown."""

    def __init__(self, reason: str) -> None:
        super().__init__("shape", reason)


class DeclinedLayout(Unsupported):
    """A node is declined only because of the layout of its tensors, so the types of its results are known.

    ``results`` has the element type and the dimensions of each result, None for a dimension that a Run computes. ONNX
    Runtime needs the types even of a node that no provider runs; without types, its error would not name the reason.
    """

    def __init__(self, reason: str, results: Sequence[tuple[DType, tuple[Any, ...]]]) -> None:
        super().__init__("dtype", reason)
        self.results = results


class InvalidModel(Error):
    """The model, or the inputs of a Run, contradict the operator's definition."""

    ort_code = 2  # ORT_INVALID_ARGUMENT

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NodeError(Error):
    """A node of a cluster could not be lowered; the message names the node and the reason."""

    def __init__(self, node: Node, reason: str, *, invalid_input: bool = False) -> None:
        reason = reason.removeprefix(f"{node.op_type}: ")  # the label already names the operator
        super().__init__(f"node {node.label}: {reason}")
        self.node = node
        self.reason = reason
        self.invalid_input = invalid_input
        self.ort_code = 2 if invalid_input else 1  # ORT_INVALID_ARGUMENT or ORT_FAIL
