"""Annotations for parameters and results of an author's function.

``T``, ``T1``, ``U`` and so on name a type constraint: inputs and outputs with the same name have the same element type.
``Float32``, ``Int64`` and so on stand for one type. ``HostInt64`` and ``HostInt32`` are inputs whose contents decide
shapes: the function reads them with ``ctx.host_values``. ``Alias("name")`` in a result's annotation names the input
whose memory the result shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from ..model.ir import DType
from ..program.lowering.context import Tensor


@dataclass(frozen=True)
class OnHost:
    """Marks an input that the host reads."""


@dataclass(frozen=True)
class Alias:
    """Marks a result that shares the memory of the input with this name."""

    name: str


T: TypeAlias = Annotated[Tensor, "T"]
T1: TypeAlias = Annotated[Tensor, "T1"]
T2: TypeAlias = Annotated[Tensor, "T2"]
T3: TypeAlias = Annotated[Tensor, "T3"]
U: TypeAlias = Annotated[Tensor, "U"]
V: TypeAlias = Annotated[Tensor, "V"]

Float16: TypeAlias = Annotated[Tensor, DType.FLOAT16]
BFloat16: TypeAlias = Annotated[Tensor, DType.BFLOAT16]
Float32: TypeAlias = Annotated[Tensor, DType.FLOAT32]
Float64: TypeAlias = Annotated[Tensor, DType.FLOAT64]
Int8: TypeAlias = Annotated[Tensor, DType.INT8]
Int16: TypeAlias = Annotated[Tensor, DType.INT16]
Int32: TypeAlias = Annotated[Tensor, DType.INT32]
Int64: TypeAlias = Annotated[Tensor, DType.INT64]
UInt8: TypeAlias = Annotated[Tensor, DType.UINT8]
UInt16: TypeAlias = Annotated[Tensor, DType.UINT16]
UInt32: TypeAlias = Annotated[Tensor, DType.UINT32]
UInt64: TypeAlias = Annotated[Tensor, DType.UINT64]
Bool: TypeAlias = Annotated[Tensor, DType.BOOL]
HostInt32: TypeAlias = Annotated[Tensor, DType.INT32, OnHost()]
HostInt64: TypeAlias = Annotated[Tensor, DType.INT64, OnHost()]
