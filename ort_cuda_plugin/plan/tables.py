"""Tables of kernels, weights and library problems that the plans of a cluster share and refer to by index."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from ..compiler.kernel import KernelSpec
from ..model.ir import Constant
from ..program.steps.callbacks import Callback
from ..program.steps.libraries import LibraryProblem
from ..program.steps.quarantine import ScheduleKind
from ..program.steps.tensor import Buffer
from .format import Plan

_LARGE_CONSTANT = 2**20
"""Size in bytes above which constants are not compared by their contents here (see `weight_key`)."""
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Table(Generic[K, V]):
    """A cluster's entries of one kind, such as kernels: ``known`` ones of earlier plans, ``new`` ones of this plan.

    An entry has an index in the cluster, and another one in each plan that uses it.
    """

    def __init__(self, known: dict[K, int]) -> None:
        self.known = known
        self.keys: dict[K, int] = {}
        self.new: list[V] = []
        self.used: dict[int, int] = {}

    def use(self, key: K, value: V) -> int:
        """Return an entry's index in the current plan. ``used`` maps indices in the cluster to indices in the plan."""
        number = self.number(key, value)
        return self.used.setdefault(number, len(self.used))

    def number(self, key: K, value: V) -> int:
        """Return an entry's index in the cluster; add the entry ``value`` if ``key`` is new."""
        number = self.known.get(key)
        if number is None:
            number = self.keys.get(key)
        if number is None:
            number = self.keys[key] = len(self.known) + len(self.new)
            self.new.append(value)
        return number

    def commit(self) -> None:
        """Make the new entries known to the cluster's later plans."""
        self.known.update(self.keys)


@dataclass(frozen=True, eq=False)
class Precomputation:
    """A computation on weights only, which runs once on the device: a plan without inputs, its kernels and weights.

    Its outputs are tensors of bytes. Equal computations have equal ``key``.
    """

    plan: Plan
    kernels: tuple[KernelSpec, ...]
    weights: tuple[Constant, ...]
    key: Hashable


@dataclass(frozen=True, eq=False)
class Precomputed:
    """A weight that is output ``number`` of the precomputation ``program``."""

    program: Precomputation
    number: int
    nbytes: int


Weight: TypeAlias = Constant | Precomputed


class KnownEntries:
    """The indices that a cluster has assigned to kernels, weights, library problems and callbacks."""

    def __init__(self) -> None:
        self.kernels: dict[KernelSpec, int] = {}
        self.weights: dict[Hashable, int] = {}
        self.problems: dict[LibraryProblem, int] = {}
        self.callbacks: dict[Callback, int] = {}


class Tables:
    """The tables of a cluster while one plan is made.

    ``precomputed`` has the weights that replace buffers of constant folding (`precompute`), by buffer.

    ``schedules`` are the kinds of the schedules of the plan's kernels and library calls.
    """

    def __init__(self, known: KnownEntries) -> None:
        self.kernels: Table[KernelSpec, KernelSpec] = Table(known.kernels)
        self.weights: Table[Hashable, Weight] = Table(known.weights)
        self.problems: Table[LibraryProblem, LibraryProblem] = Table(known.problems)
        self.callbacks: Table[Callback, Callback] = Table(known.callbacks)
        self.precomputed: dict[Buffer, Precomputed] = {}
        self.schedules: frozenset[ScheduleKind] = frozenset()

    def weight(self, buffer: Buffer) -> int:
        """Return the index, in the current plan, of the weight that a WEIGHT or STATE buffer holds."""
        weight = buffer.data or buffer.state or self.precomputed[buffer]
        return self.weights.use(weight_key(weight), weight)


def weight_key(weight: Weight) -> Hashable:
    """Return the key by which plans of a cluster share equal weights.

    Initializers and states are the same object in every plan, so that the object is the key. Derived constants are
    compared by the computation that derives them. Other constants, which operators create, are compared by their
    contents if they are small; the device's weight store hashes large ones, and so shares equal contents.
    """
    if isinstance(weight, Precomputed):
        return weight.program.key, weight.number
    if weight.recipe is not None:
        return weight.recipe, weight.dtype, weight.shape
    if weight.is_initializer or weight.is_state or weight.nbytes > _LARGE_CONSTANT:
        return weight
    array = np.ascontiguousarray(weight.array)
    return weight.dtype, weight.shape, hashlib.blake2b(array.data, digest_size=16).digest()
