"""Installs the functions that C calls in Python.

``attach`` installs them as the table ``ocp_python``. `register` calls ``attach``. If an application registered the
library with ONNX Runtime itself, without importing this package, the library's first call into Python calls ``attach``.
"""

from __future__ import annotations

import atexit
from functools import partial
from typing import Any

from ..abi import core as abi_core
from ..abi import host
from ..abi.core import ffi, lib
from ..abi.emulation import configuration
from ..compiler.caches.plan_cache import plan_cache
from ..compiler.library.isolation import import_compiler
from ..compiler.library.ptx_image import object_of
from ..compiler.targets import Target
from ..context.compatibility import Fit, fit
from ..model.ir import DType
from ..program.steps.libraries import LibraryProblem, ProblemFlags
from .contexts.context_session import allows_host_code
from .device.devices import DeviceInfo
from .device.identity import Identity
from .device.open_device import target_of
from .device.substitutes import RefusedCall, substitutes_of
from .device.tracing import tracing
from .nodes import custom_domains, kernel_registry
from .nodes.fused_node import FUSED_NODES
from .nodes.handles import HandleTable
from .provider import Provider, last_verdicts
from .session.guards import error_guard, status_guard, void_guard

PROVIDERS: HandleTable[Provider] = HandleTable("execution provider")

_table: Any = None


def attach(address: int) -> None:
    """Connect this interpreter with the library whose ``ocp_core`` is at ``address``. Idempotent.

    Raises:
        PluginError: Python uses another copy of the library, or one of another build.
    """
    global _table
    abi_core.attach(address)
    if _table is None:
        table = ffi.new("ocp_python *")
        table.abi = lib.OCP_CORE_ABI
        for name, _ in ffi.typeof("ocp_python").fields[1:]:
            setattr(table, name, getattr(lib, f"ocp_py_{name}"))
        _table = table
        atexit.register(abi_core.core().shut_down)
    error = abi_core.new_error()
    abi_core.core().set_python(_table, error)
    abi_core.check(error)


def attach_own() -> None:
    """Connect this interpreter with this package's copy of the library (`attach`)."""
    attach(int(ffi.cast("uintptr_t", abi_core.core())))


@status_guard
def custom_op_domains(domains: Any, count: Any) -> None:
    domains[0], count[0] = custom_domains.custom_op_domains()


@void_guard
def infer_custom_op(op: int, context: Any) -> None:
    custom_domains.infer(custom_domains.SCHEMAS[op], context)


@status_guard
def explain_custom_op(op: int, info: Any) -> None:
    raise NotImplementedError(custom_domains.why_nobody_runs(custom_domains.SCHEMAS[op], info, last_verdicts()))


@status_guard
def validate_compatibility(devices: Any, num_devices: int, info: Any, out: Any) -> None:
    infos = [DeviceInfo.from_c(devices[index]) for index in range(num_devices)]
    fits = [fit(host.text(info), target_of(known), allows_host_code(), known.driver_version) for known in infos]
    out[0] = max(fits, default=Fit.NOT_APPLICABLE)  # the worst fit of all devices: larger values of `Fit` are worse


@status_guard
def compatibility_info(ep: int, info: Any) -> None:
    info[0] = PROVIDERS[ep].compatibility_info


@partial(status_guard, forgiven=True, begins_session=True)
def create_ep(identity: int, metadata: Any, num_devices: int, options: Any, logger: Any, config: Any) -> None:
    provider = Provider(list(metadata[0:num_devices]), options, logger, Identity(identity))
    config.device = provider.device.pointer
    config.device_memory = provider.device_memory
    config.stream = provider.stream
    options = provider.options
    config.capture_warm_runs = options.min_num_runs_before_cuda_graph_capture if options.enable_cuda_graph else 0
    config.channels_last = provider.channels_last
    config.operators = provider.operators_with_kernels
    config.handle = PROVIDERS.add(provider)


@void_guard
def release_ep(ep: int) -> None:
    PROVIDERS.pop(ep).close()


@partial(status_guard, forgiven=True)
def get_capability(ep: int, graph: Any, info: Any) -> None:
    PROVIDERS[ep].get_capability(graph, info)


@status_guard
def compile(ep: int, graphs: Any, fused_nodes: Any, count: int, infos: Any, ep_context_nodes: Any) -> None:
    PROVIDERS[ep].compile(list(graphs[0:count]), list(fused_nodes[0:count]), infos, ep_context_nodes)


@status_guard
def add_kernels(registry: Any, ep_name: Any, operators: int) -> None:
    kernel_registry.add_kernels(registry, ffi.string(ep_name).decode(), operators)


@status_guard
def create_kernel(ep: int, info: Any, out: Any) -> None:
    out[0] = PROVIDERS[ep].create_kernel(info)


@status_guard
def set_dynamic_options(ep: int, keys: Any, values: Any, count: int) -> None:
    PROVIDERS[ep].set_dynamic_options({host.text(keys[i]): host.text(values[i]) for i in range(count)})


@error_guard
def transposition(ep: int, permutation: Any, rank: int, dtype: int, cluster: Any) -> None:
    axes = tuple(int(axis) for axis in permutation[0:rank])
    cluster[0] = PROVIDERS[ep].transposition(axes, DType.from_ort(dtype)).pointer


@error_guard
def trace_begin() -> None:
    tracing().begin()


@error_guard
def trace_collect() -> None:
    tracing().collect()


@void_guard
def trace_end() -> None:
    tracing().end()


@error_guard
def build_variant(
    cluster: int, inputs: Any, num_inputs: int, host_values: Any, host_counts: Any, num_host_inputs: int
) -> None:
    counts = list(host_counts[0:num_host_inputs])
    values = list(host_values[0 : sum(counts)]) if counts else []
    per_input, position = [], 0
    for length in counts:
        per_input.append(tuple(values[position : position + length]))
        position += length
    shapes = [tuple(inputs[i].dims[0 : inputs[i].rank]) for i in range(num_inputs)]
    FUSED_NODES[cluster].build(shapes, per_input)


@error_guard
def load_plan(key: Any, data: Any, capacity: int, nbytes: Any) -> None:
    plan = plan_cache().load(ffi.string(key)) or b""
    if len(plan) <= capacity:
        ffi.memmove(data, plan, len(plan))
        nbytes[0] = len(plan)


@error_guard
def keep_plan(key: Any, data: Any, nbytes: int) -> None:
    plan_cache().keep(ffi.string(key), ffi.buffer(data, nbytes)[:])


@error_guard
def make_substitute(
    device: Any, library: Any, spec: Any, values: Any, num_values: int, why: Any, lasts: int, substitute: Any
) -> None:
    fields = {field: getattr(spec, field) for field, _ in ffi.typeof("ocp_problem_spec").fields}
    problem = LibraryProblem(**fields | {"flags": ProblemFlags(spec.flags)})
    call = RefusedCall(host.text(library), problem, tuple(values[0:num_values]), host.text(why), bool(lasts))
    substitute[0] = substitutes_of(device).pointer(call)


@error_guard
def translate_image(image: Any, nbytes: int, deliver: Any, context: Any) -> None:
    target = Target.emulated(check=bool(configuration().check))
    compiled = object_of(import_compiler(), bytes(ffi.buffer(image, nbytes)), target)
    deliver(context, ffi.from_buffer(compiled), len(compiled))


@error_guard
def call_back(
    cluster: int, callback: int, addresses: Any, num_addresses: int, numbers: Any, num_numbers: int, stream: Any
) -> None:
    given = list(addresses[0:num_addresses]) if num_addresses else []
    FUSED_NODES[cluster].call_back(callback, given, list(numbers[0:num_numbers]) if num_numbers else [], stream)
