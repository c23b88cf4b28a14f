"""The tables that a cluster's plans share and refer to by number: kernels, weights, library problems."""

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
from ..program.steps.tensor import Buffer
from .format import Plan

_LARGE_CONSTANT = 2**20
"""Bytes above which a constant is not compared by its contents."""
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Table(Generic[K, V]):
    """Numbered entries of a cluster that its plans share: those of earlier plans, and the new ones of one plan."""

    def __init__(self, known: dict[K, int]) -> None:
        self.known = known
        self.keys: dict[K, int] = {}
        self.new: list[V] = []
        self.used: dict[int, int] = {}

    def use(self, key: K, value: V) -> int:
        """Return the plan's own number of an entry; ``used`` maps the cluster's numbers to these."""
        number = self.number(key, value)
        return self.used.setdefault(number, len(self.used))

    def number(self, key: K, value: V) -> int:
        """Return the cluster's number of an entry."""
        number = self.known.get(key)
        if number is None:
            number = self.keys.get(key)
        if number is None:
            number = self.keys[key] = len(self.known) + len(self.new)
            self.new.append(value)
        return number

    def commit(self) -> None:
        """Add the new entries to the cluster."""
        self.known.update(self.keys)


@dataclass(frozen=True, eq=False)
class Precomputation:
    """A plan without inputs and the entries that it refers to: a computation on weights only, done once on the device.

    Its outputs are bytes. Equal computations have equal ``key``.
    """

    plan: Plan
    kernels: tuple[KernelSpec, ...]
    weights: tuple[Constant, ...]
    key: Hashable


@dataclass(frozen=True, eq=False)
class Precomputed:
    """A weight that is output ``number`` of ``program``."""

    program: Precomputation
    number: int
    nbytes: int


Weight: TypeAlias = Constant | Precomputed


class KnownEntries:
    """The numbers that a cluster has assigned to kernels, weights, library problems and callbacks."""

    def __init__(self) -> None:
        self.kernels: dict[KernelSpec, int] = {}
        self.weights: dict[Hashable, int] = {}
        self.problems: dict[LibraryProblem, int] = {}
        self.callbacks: dict[Callback, int] = {}


class Tables:
    """Kernels, weights, library problems and callbacks of a cluster while one plan is made.

    ``precomputed`` maps intermediates that became weights.
    """

    def __init__(self, known: KnownEntries) -> None:
        self.kernels: Table[KernelSpec, KernelSpec] = Table(known.kernels)
        self.weights: Table[Hashable, Weight] = Table(known.weights)
        self.problems: Table[LibraryProblem, LibraryProblem] = Table(known.problems)
        self.callbacks: Table[Callback, Callback] = Table(known.callbacks)
        self.precomputed: dict[Buffer, Precomputed] = {}

    def weight(self, buffer: Buffer) -> int:
        """Return the number of a WEIGHT's or STATE's contents."""
        weight = buffer.data or buffer.state or self.precomputed[buffer]
        return self.weights.use(weight_key(weight), weight)


def weight_key(weight: Weight) -> Hashable:
    """Return the key under which equal weights of a cluster are shared.

    Initializers and states are the same object in every plan, and derived constants have a recipe. Constants that
    operators compute are compared by contents if they are small; the weight store of the device finds equal large ones,
    since it hashes them anyway.
    """
    if isinstance(weight, Precomputed):
        return weight.program.key, weight.number
    if weight.recipe is not None:
        return weight.recipe, weight.dtype, weight.shape
    if weight.is_initializer or weight.is_state or weight.nbytes > _LARGE_CONSTANT:
        return weight
    array = np.ascontiguousarray(weight.array)
    return weight.dtype, weight.shape, hashlib.blake2b(array.data, digest_size=16).digest()
