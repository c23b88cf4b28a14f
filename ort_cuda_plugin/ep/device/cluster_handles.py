"""Registers the kernels, weights and plans that an ``ocp_cluster`` refers to by index."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ...abi.core import check, core, ffi, lib, new_error
from ...context.storage.hashing import in_threads
from ...model.ir import Constant
from ...plan.format import Plan, encode
from ...plan.tables import Precomputation
from .open_device import LoadedKernel, OpenDevice


def add_kernels(cluster: Any, kernels: Sequence[LoadedKernel]) -> None:
    """Add kernels to the cluster. The caller must hold them as long as the cluster exists."""
    references = ffi.new("ocp_kernel_ref[]", len(kernels))
    for reference, kernel in zip(references, kernels, strict=True):
        reference.function = kernel.function
        reference.name = kernel.name
        reference.num_params, reference.params = len(kernel.params), kernel.params
    error = new_error()
    core().cluster_add_kernels(cluster, references, len(kernels), error)
    check(error)


def add_plan(cluster: Any, plan: Plan | bytes) -> None:
    """Add a plan, or its encoded form. The kernels, weights and problems of the plan must have been added."""
    blob = encode(plan) if isinstance(plan, Plan) else plan
    error = new_error()
    core().cluster_add_plan(cluster, ffi.from_buffer(blob), len(blob), error)
    check(error)


class NewWeights:
    """Weights (``ocp_weight *``) that no cluster owns yet.

    The end of a ``with`` block releases the weights that no cluster took over. ``are_stored``: a file has the contents,
    so constants with a recipe (computed from other constants) are dropped from host memory after the upload.
    """

    def __init__(self, device: OpenDevice, are_stored: bool = False) -> None:
        self._device = device
        self._are_stored = are_stored
        self.pointers: list[Any] = []

    def __enter__(self) -> NewWeights:
        return self

    def __exit__(self, *_: object) -> None:
        for pointer in self.pointers:
            core().weight_release(pointer)

    def acquire_all(self, weights: Sequence[Constant], streamed: Collection[int] = ()) -> list[Any]:
        """Return an ``ocp_weight *`` for each of ``weights``, in pinned host memory if its index is in ``streamed``."""

        def acquire(indexed: tuple[int, Constant]) -> Any:
            index, constant = indexed
            return self.acquire(constant, index in streamed)

        return in_threads(acquire, [*enumerate(weights)], sum(weight.nbytes for weight in weights))

    def acquire(self, constant: Constant, on_host: bool = False) -> Any:
        """Return the weight with the contents of a constant, or with the initial value of a state.

        With ``on_host`` a constant's weight is in pinned host memory.
        """
        array = np.ascontiguousarray(constant.array)
        data = ffi.from_buffer(array) if array.nbytes else ffi.NULL
        subject = f"a constant of {constant.dtype!r}{list(constant.shape)}"
        if constant.is_state:
            made = self._made(core().weight_create_state, data, array.nbytes, subject)
        else:
            memory = lib.OCP_WEIGHT_ON_HOST if on_host else lib.OCP_WEIGHT_ON_DEVICE
            made = self._made(core().weight_acquire, data, array.nbytes, subject, memory)
        if self._are_stored and constant.recipe is not None:
            constant.drop()
        return made

    def empty(self, nbytes: int) -> Any:
        """Return an uninitialized weight, which is not shared between clusters, for `precompute` to fill."""
        return self._made(core().weight_create_state, ffi.NULL, nbytes, "a value computed from constants")

    def _made(self, function: Any, data: Any, nbytes: int, subject: str, *memory: int) -> Any:
        slot: Any = ffi.new("ocp_weight **")
        error = new_error()
        function(self._device.pointer, *memory, data, nbytes, slot, error)
        check(error, subject)
        self.pointers.append(slot[0])
        return slot[0]

    def give(self, cluster: Any, order: Sequence[Any]) -> None:
        """Transfer ownership of the weights, in this order, to a cluster."""
        error = new_error()
        core().cluster_add_weights(cluster, ffi.new("ocp_weight *[]", order), len(order), error)
        check(error)
        self.pointers.clear()


def move_to_host(weight: Any) -> None:
    """Move a weight that `NewWeights.empty` made to pinned host memory.

    Raises: PluginError: the memory cannot be allocated, or the copy fails.
    """
    error = new_error()
    core().weight_move_to_host(weight, error)
    check(error)


def read_weight(weight: Any, nbytes: int, device: OpenDevice) -> bytes:
    """Return a copy of the contents of a weight, from device or host memory."""
    address = core().weight_address(weight)
    if core().weight_memory_of(weight) == lib.OCP_WEIGHT_ON_HOST:
        return bytes(ffi.buffer(ffi.cast("char *", address), nbytes))
    data = bytearray(nbytes)
    device.read(address, data)
    return bytes(data)


def precompute(
    name: str, device: OpenDevice, program: Precomputation, kernels: Sequence[LoadedKernel], results: Sequence[Any]
) -> None:
    """Run a precomputation once, which fills the weights ``results``, and wait for it. ``kernels`` are its kernels.

    Raises: PluginError: memory was exhausted, or a kernel failed.
    """
    cluster = core().cluster_create(device.pointer, name.encode(), 0)
    if cluster == ffi.NULL:
        raise MemoryError(f"the host has no memory for the constants of {name}")
    try:
        add_kernels(cluster, kernels)
        with NewWeights(device) as weights:
            weights.give(cluster, weights.acquire_all(program.weights))
        add_plan(cluster, program.plan)
        error = new_error()
        core().cluster_precompute(cluster, ffi.new("ocp_weight *[]", results), len(results), error)
        check(error)
    finally:
        core().cluster_release(cluster)
