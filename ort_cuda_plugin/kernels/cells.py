"""What a direction of an RNN, GRU or LSTM is made of, for the kernels of `recurrent` and `recurrent_strips`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..program import scalar as s
from ..program.lowering import Tensor
from ..program.scalar import Scalar
from .codegen import KernelBuilder, load_text, offset_text

__all__ = ["Cell", "Elements", "Gates", "Sequences"]

Gates = Sequence[Scalar]


@dataclass(frozen=True)
class Cell:
    """What a step computes. Scalars are of the accumulation type: float32, or float64 for float64.

    ``update(inputs, products, hidden, state)`` gives (new hidden, new state): ``inputs`` are the input products and
    ``products`` the recurrent products of each gate, both with their biases, ``state`` is an LSTM's cell and None for
    others. With ``reset``, the last gate's product is not of the hidden state but of ``reset(inputs, products)`` times
    it, which takes a second pass over the weights.
    """

    gates: int
    update: Callable[[Gates, Gates, Scalar, Scalar | None], tuple[Scalar, Scalar | None]]
    has_state: bool = False
    reset: Callable[[Gates, Gates], Scalar] | None = None


@dataclass(frozen=True)
class Sequences:
    """The tensors of one direction; "hidden" is the hidden size. Results have any strides.

    ``inputs`` [time, batch, gates * hidden], ``weights`` [hidden, gates * hidden], of any strides, and ``parameters``
    (vectors of hidden elements) are in the operator's order of gates. ``lengths`` (int32 [batch]), ``hidden`` and
    ``state`` ([batch, hidden]: the start) may be None: all steps, and zeros.
    """

    inputs: Tensor
    weights: Tensor
    biases: Tensor | None
    recurrent_biases: Tensor | None
    lengths: Tensor | None
    hidden: Tensor | None
    state: Tensor | None


class Elements:
    """A tensor as a parameter of a kernel in the making, whose elements are read and written by int64 coordinates."""

    def __init__(self, builder: KernelBuilder, tensor: Tensor, *, written: bool = False) -> None:
        self._emit = builder.emit
        self._dtype = tensor.dtype
        self._pointer = builder.tensor(tensor, written=written)
        self._strides = [builder.stride(stride) for stride in tensor.strides]

    def _offset(self, at: Sequence[str]) -> str:
        return offset_text(list(zip(at, self._strides, strict=True)))

    def load(self, *at: str) -> str:
        """The name of the element in the type that recurrences compute in."""
        leaf = Scalar(self._dtype, "leaf")
        self._emit.bind(leaf, self._emit.assign(load_text(self._pointer, self._offset(at), self._dtype)))
        return self._emit.value(s.cast(leaf, s.accumulation_type(self._dtype)))

    def store(self, value: Scalar, *at: str) -> None:
        self._emit.store(self._pointer, self._offset(at), s.cast(value, self._dtype))
