"""What a cluster's plans share and refer to by number: kernels, weights, problems of libraries."""

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
"""Bytes."""
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Table(Generic[K, V]):
    """Numbered things of a cluster that its plans share: those of earlier plans, and the new ones of one plan."""

    def __init__(self, known: dict[K, int]) -> None:
        self.known = known
        self.keys: dict[K, int] = {}
        self.new: list[V] = []
        self.used: dict[int, int] = {}

    def use(self, key: K, value: V) -> int:
        """The plan's own number of an entry; ``used`` maps the cluster's numbers to these."""
        number = self.number(key, value)
        return self.used.setdefault(number, len(self.used))

    def number(self, key: K, value: V) -> int:
        """The cluster's number of an entry."""
        number = self.known.get(key)
        if number is None:
            number = self.keys.get(key)
        if number is None:
            number = self.keys[key] = len(self.known) + len(self.new)
            self.new.append(value)
        return number

    def commit(self) -> None:
        """The new entries are the cluster's from now on."""
        self.known.update(self.keys)


@dataclass(frozen=True, eq=False)
class Precomputation:
    """A plan without inputs, and all that it refers to: what depends on weights only, computed once on the device.

    Its outputs are bytes. ``key`` is the same for all that compute the same.
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
    """The numbers that a cluster has given to kernels, weights, library problems and callbacks."""

    def __init__(self) -> None:
        self.kernels: dict[KernelSpec, int] = {}
        self.weights: dict[Hashable, int] = {}
        self.problems: dict[LibraryProblem, int] = {}
        self.callbacks: dict[Callback, int] = {}


class Tables:
    """Kernels, weights, library problems and callbacks of a cluster while one plan is made.

    ``precomputed`` says which intermediates became weights.
    """

    def __init__(self, known: KnownEntries) -> None:
        self.kernels: Table[KernelSpec, KernelSpec] = Table(known.kernels)
        self.weights: Table[Hashable, Weight] = Table(known.weights)
        self.problems: Table[LibraryProblem, LibraryProblem] = Table(known.problems)
        self.callbacks: Table[Callback, Callback] = Table(known.callbacks)
        self.precomputed: dict[Buffer, Precomputed] = {}

    def weight(self, buffer: Buffer) -> int:
        """The number of what a WEIGHT or a STATE holds."""
        weight = buffer.data or buffer.state or self.precomputed[buffer]
        return self.weights.use(weight_key(weight), weight)


def weight_key(weight: Weight) -> Hashable:
    """What makes two weights of a cluster one.

    Initializers and states are the same object in every plan, and what is made of them is known by its recipe. What
    operators compute anew is known by its contents if it is small; of the large the device's store of weights finds the
    equal ones, which hashes them anyway.
    """
    if isinstance(weight, Precomputed):
        return weight.program.key, weight.number
    if weight.recipe is not None:
        return weight.recipe, weight.dtype, weight.shape
    if weight.is_initializer or weight.is_state or weight.nbytes > _LARGE_CONSTANT:
        return weight
    array = np.ascontiguousarray(weight.array)
    return weight.dtype, weight.shape, hashlib.blake2b(array.data, digest_size=16).digest()
