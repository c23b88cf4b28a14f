"""ONNX sequences and optional values of tensors, which exist only during lowering.

A plan contains only the tensors in them. So a sequence costs nothing in a Run, but it cannot be an input or output of a
cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...model.ir import DType
from .tensor import Tensor


@dataclass(frozen=True)
class TensorSequence:
    """An ONNX sequence: tensors of one element type, with any shapes and ranks."""

    dtype: DType
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class TensorOptional:
    """An ONNX optional value; ``content`` is None for an empty one, whose ``dtype`` is undefined."""

    dtype: DType
    content: Tensor | TensorSequence | None


Operand: TypeAlias = Tensor | TensorSequence | TensorOptional
