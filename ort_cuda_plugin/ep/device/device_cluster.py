"""Owner of an ``ocp_cluster`` and of the kernels, weights and library problems that were added to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from ...abi.core import check, core, ffi, new_error
from ...clusters.cluster import Variant
from ...plan.tables import Precomputation, Precomputed, Weight
from ...program.steps.callbacks import Callback, CallFunction
from ...program.steps.libraries import LibraryProblem
from .cluster_handles import NewWeights, add_kernels, add_plan, precompute
from .open_device import LoadedKernel, OpenDevice


class Notes(Protocol):
    """Observer of `DeviceCluster.add`: called after each kind of entry is added, even if adding a later kind fails."""

    def kernels_added(self, variant: Variant) -> None: ...

    def problems_added(self, variant: Variant) -> None: ...

    def callbacks_added(self, variant: Variant) -> None: ...

    def weights_added(self, variant: Variant) -> None: ...


class Unnoted:
    """`Notes` that record nothing, for a cluster with a single variant."""

    def kernels_added(self, variant: Variant) -> None:
        """Do nothing."""

    def problems_added(self, variant: Variant) -> None:
        """Do nothing."""

    def callbacks_added(self, variant: Variant) -> None:
        """Do nothing."""

    def weights_added(self, variant: Variant) -> None:
        """Do nothing."""


class DeviceCluster:
    """Owns an ``ocp_cluster`` with its kernels, library problems and weights. Not thread safe.

    ``handle`` is the number that C passes to `build_variant`; ``are_stored`` as for `NewWeights`. A plan's records
    refer to ``callbacks`` by number. ``weights`` has each ``ocp_weight *`` of the cluster, and its size in bytes.
    """

    def __init__(self, name: str, device: OpenDevice, handle: int = 0, *, are_stored: bool = False) -> None:
        self._name = name
        self._device = device
        self._are_stored = are_stored
        self._kernels: list[LoadedKernel] = []
        self._problems: list[Any] = []  # ocp_problem *
        self.callbacks: list[tuple[Callback, CallFunction]] = []
        self.weights: list[tuple[Any, int]] = []
        self.pointer = core().cluster_create(device.pointer, name.encode(), handle)
        if self.pointer == ffi.NULL:
            raise MemoryError(f"the host has no memory for the fused node {name}")

    def close(self) -> None:
        """Release the cluster with its weights, library problems and kernels. No Run may be active."""
        core().cluster_release(self.pointer)
        for problem in self._problems:
            core().problem_release(problem)
        if self._problems:
            self._device.let_libraries_go()
        self._problems.clear()
        self.callbacks.clear()
        self._device.release_kernels(self._kernels)
        self._kernels.clear()

    def add(self, variant: Variant, notes: Notes) -> None:
        """Add the kernels, problems, callbacks and weights of a variant, and then its plan.

        Raises:
            PluginError: no device memory for the weights, or a plan is not valid.
        """
        with self._device.entered():
            self._add(variant, notes)

    def _add(self, variant: Variant, notes: Notes) -> None:
        programs = variant.precomputations
        needed_once = [kernel for program in programs for kernel in program.kernels]
        acquired = self._device.acquire_kernels([*variant.kernels, *needed_once])
        kept, once = acquired[: len(variant.kernels)], acquired[len(variant.kernels) :]
        try:
            self._kernels += kept
            add_kernels(self.pointer, kept)
            notes.kernels_added(variant)
            self._add_problems(variant.problems)
            notes.problems_added(variant)
            self._add_callbacks(variant.callbacks)
            notes.callbacks_added(variant)
            self._add_weights(variant.weights, programs, once)
            notes.weights_added(variant)
        finally:
            self._device.release_kernels(once)
        for stored in variant.stored:
            add_plan(self.pointer, stored)
        if variant.plan is not None:
            add_plan(self.pointer, variant.plan)

    def _add_problems(self, problems: Sequence[LibraryProblem]) -> None:
        error = new_error()
        created = []
        if problems and not self._problems:
            self._device.hold_libraries()
        for problem in problems:
            created.append(core().problem_create(ffi.new("ocp_problem_spec *", asdict(problem)), error))
            self._problems.append(created[-1])
            check(error)
        for pointer in created:
            core().cluster_add_problem(self.pointer, pointer, error)
            check(error)

    def _add_callbacks(self, callbacks: Sequence[Callback]) -> None:
        error = new_error()
        for callback in callbacks:
            numbers = callback.num_dims + callback.num_numbers
            self.callbacks.append((callback, callback.function()))
            core().cluster_add_callback(self.pointer, len(callback.tensors), numbers, error)
            check(error)

    def _add_weights(
        self, weights: Sequence[Weight], programs: Sequence[Precomputation], kernels: Sequence[LoadedKernel]
    ) -> None:
        """Add weights. ``kernels`` are those of the precomputations, one after the other."""
        with NewWeights(self._device, are_stored=self._are_stored) as new:
            pointers = new.acquire_all(weights)
            first = 0
            for program in programs:
                results = {
                    weight.number: pointer
                    for weight, pointer in zip(weights, pointers, strict=True)
                    if isinstance(weight, Precomputed) and weight.program is program
                }
                own = kernels[first : first + len(program.kernels)]
                first += len(program.kernels)
                precompute(self._name, self._device, program, own, [results[i] for i in range(len(results))])
            new.give(self.pointer, pointers)
        self.weights += [(pointer, weight.nbytes) for pointer, weight in zip(pointers, weights, strict=True)]
