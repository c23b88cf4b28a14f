"""Owner of an ``ocp_cluster`` and of the kernels, weights and library problems that were added to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from ...abi.core import check, core, ffi, new_error
from ...clusters.cluster import Variant
from ...model.ir import Constant
from ...plan.decoder import decode
from ...plan.format import Plan
from ...plan.placement import WeightPlacement
from ...plan.tables import Precomputation, Precomputed, Weight
from ...program.steps.callbacks import Callback, CallFunction
from ...program.steps.libraries import LibraryProblem
from .cluster_handles import NewWeights, add_kernels, add_plan, move_to_host, precompute
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
    ``placement`` decides which weights are in host memory; None: all are in device memory.
    """

    def __init__(
        self,
        name: str,
        device: OpenDevice,
        handle: int = 0,
        *,
        are_stored: bool = False,
        placement: WeightPlacement | None = None,
    ) -> None:
        self._name = name
        self._placement = placement
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
        plans = self._plans(variant)
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
        for plan in plans:
            add_plan(self.pointer, plan)

    def _plans(self, variant: Variant) -> list[Plan | bytes]:
        """Assign the variant's weights to device or host memory; return its plans with the needed uploads."""
        plans: list[Plan | bytes] = [*variant.stored, *([] if variant.plan is None else [variant.plan])]
        if self._placement is None:
            return plans
        read = [decode(plan) if isinstance(plan, bytes) else plan for plan in plans]
        first = len(self.weights)
        likely = read if variant.likely is None else [variant.likely]
        self._placement.assign(dict(enumerate(variant.weights, first)), read, likely)
        return [self._placement.apply(plan) for plan in read]

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
            constants = {index: weight for index, weight in enumerate(weights) if isinstance(weight, Constant)}
            on_host = {position for position, index in enumerate(constants) if self._is_streamed(index)}
            acquired = new.acquire_all([*constants.values()], on_host)
            pointers = dict(zip(constants, acquired, strict=True))
            first = 0
            for program in programs:
                # Programs run one after the other: device memory never holds all results that move to host memory.
                results = {
                    weight.number: (index, new.empty(weight.nbytes))
                    for index, weight in enumerate(weights)
                    if isinstance(weight, Precomputed) and weight.program is program
                }
                pointers.update(results.values())
                own = kernels[first : first + len(program.kernels)]
                first += len(program.kernels)
                precompute(self._name, self._device, program, own, [results[i][1] for i in range(len(results))])
                for index, pointer in results.values():
                    if self._is_streamed(index):
                        move_to_host(pointer)
            order = [pointers[index] for index in range(len(weights))]
            new.give(self.pointer, order)
        self.weights += [(pointer, weight.nbytes) for pointer, weight in zip(order, weights, strict=True)]

    def _is_streamed(self, index: int) -> bool:
        """Return whether the new weight ``index`` is in host memory."""
        return self._placement is not None and self._placement.is_streamed(len(self.weights) + index)
