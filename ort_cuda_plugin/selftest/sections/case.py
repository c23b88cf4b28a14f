"""Cases and results of the selftest, as plain data."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper, parser

from ...conformance.cases import newest_ir_version
from ...model.ir import DType

Array = NDArray[Any]

BOUNDS: Mapping[str, float] = {"float64": 1e-11, "float32": 1.5e-5, "float16": 4e-3, "bfloat16": 3.2e-2}
"""Maximum |a-b| / max(|b|, 1) by element type, for kernels whose summation order or math functions vary by device."""

_NUMPY_NAMES: Mapping[str, str] = {"float": "float32", "double": "float64"}
"""NumPy's names of the element types of ONNX's text format, if they differ."""


class Verdict(enum.StrEnum):
    """The result of a check."""

    PASS = "pass"
    FAIL = "FAIL"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Result:
    """The result of one check.

    ``type`` is the short name of the element type, as "f16". ``schedule`` is the schedule that was forced, as text; ""
    for the one that rules prefer. ``case`` is the name of the `Case`. If the check fails, its schedule is quarantined
    (``family``, ``operand``: the type of the first operand, ``engine``, ``tile``, ``epilogue``: that of a library
    call), or its ``operators``; neither if there is no alternative. With ``is_refusal`` a library has refused a call:
    the device's stored refusals contain the call, and later sessions read them. ``seconds`` are of CPU time.
    """

    name: str
    verdict: Verdict
    type: str = ""
    schedule: str = ""
    reason: str = ""
    seconds: float = 0.0
    family: str = ""
    operand: str = ""
    engine: str = ""
    tile: str = ""
    epilogue: str = ""
    operators: tuple[str, ...] = ()
    case: str = ""
    is_refusal: bool = False


@dataclass(frozen=True)
class Case:
    """A small model that the device computes.

    Attributes:
        text: a graph in ONNX's text format, in which ``{T}`` stands for the element type ``type``.
        weights: the shapes of the graph's constants, by name.
        ranges: by input, the smallest and the largest integer of its elements, if -2 to 2 does not suit.
        operators: the operators to quarantine if the model is wrong with the schedules that the rules choose.
        is_exact: inputs and weights are small integers, so no sum is rounded and any summation order gives the same
            bits. Otherwise they are normally distributed. Both are seeded.
        each_schedule: check every candidate schedule of the device too.
        by_output: each output is named after an operator; only the operators of wrong outputs are quarantined.
    """

    name: str
    text: str
    type: str
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    operators: tuple[str, ...] = ()
    is_exact: bool = True
    each_schedule: bool = False
    by_output: bool = False
    opset: int = 23

    def model(self, type_name: str = "") -> onnx.ModelProto:
        """Return the model, by default with the case's element type."""
        name = type_name or self.type
        text = self.text.replace("{T}", name)
        head = f'<ir_version: 10, opset_import: ["": {self.opset}, "com.microsoft": 1]>'
        made: onnx.ModelProto = parser.parse_model(f"{head} selftest {text}")
        made.ir_version = min(made.ir_version, newest_ir_version())
        for weight, shape in self.weights.items():
            made.graph.initializer.append(
                numpy_helper.from_array(self._values(weight, shape, numpy_type(name)), weight)
            )
        return made

    def feeds(self, model: onnx.ModelProto) -> dict[str, Array]:
        """Return the inputs of ``model``, a result of `model`. Their values are the same for every element type."""
        feeds = {}
        for value in model.graph.input:
            kind = value.type.tensor_type
            shape = tuple(dim.dim_value for dim in kind.shape.dim)
            feeds[value.name] = self._values(value.name, shape, helper.tensor_dtype_to_np_dtype(kind.elem_type))
        return feeds

    def _values(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an input's elements. Noise is rounded to the case's type first, so wider types get equal values."""
        dtype = np.dtype(dtype)
        rng = np.random.default_rng(zlib.crc32(f"{self.name} {name}".encode()))
        low, high = self.ranges.get(name, (0, 1) if dtype == np.bool_ else (-2, 2))
        if self.is_exact or name in self.ranges or dtype.kind in "biu":
            low = max(low, 0) if dtype.kind == "u" else low
            return np.asarray(rng.integers(low, high + 1, shape)).astype(dtype)
        return np.asarray(rng.standard_normal(shape)).astype(numpy_type(self.type)).astype(dtype)


def numpy_type(name: str) -> np.dtype[Any]:
    """Return NumPy's type for the name of an ONNX element type."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else _NUMPY_NAMES.get(name, name))


def short_type(name: str) -> str:
    """Return the plugin's short name for the name of an ONNX element type, as "f16" for "float16"."""
    return DType[_NUMPY_NAMES.get(name, name).upper()].short


def difference(actual: Array, expected: Array, is_exact: bool) -> str:
    """Describe the difference of two results in one line; "" if they agree: in each bit with ``is_exact``, except for
    the sign of zeros and the bits of NaN, else within `BOUNDS`.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"got {actual.dtype} {actual.shape}, expected {expected.dtype} {expected.shape}"
    bound = 0.0 if is_exact else BOUNDS.get(expected.dtype.name, 0.0)
    if expected.dtype.kind == "b":
        is_close = actual.view(np.uint8) == expected.view(np.uint8)  # any other byte than 0 and 1 is wrong
    elif expected.dtype.kind in "iu":
        is_close = actual == expected
    else:
        a, b = actual.astype(np.float64), expected.astype(np.float64)
        with np.errstate(invalid="ignore"):
            is_close = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= bound * np.maximum(np.abs(b), 1))
    if np.all(is_close):
        return ""
    index = tuple(int(i) for i in np.unravel_index(int(np.argmin(is_close)), actual.shape))
    wrong = int(is_close.size - np.count_nonzero(is_close))
    limit = "" if bound == 0.0 else f", tolerance {bound:.1e}"
    where = f"element {list(index)}" if index else "the element"
    return (
        f"{wrong} of {is_close.size} elements are wrong; {where} is {actual[index]}, expected {expected[index]}{limit}"
    )
