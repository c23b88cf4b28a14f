"""Patches of Numba's front end that skip work which kernels do not need: half of its passes, repeated look-ups,
lifetimes of variables.

Kernels compute with numbers and pointers, without closures, exceptions or array expressions. A test checks that all of
Numba's passes would give kernels the same PTX.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from numba.core import errors as core_errors
from numba.core.types.functions import BaseFunction
from numba.cuda import compiler, dispatcher, extending, lowering, types
from numba.cuda.core import base, errors, interpreter, ir, postproc, transforms, typeinfer, untyped_passes
from numba.cuda.core.compiler_machinery import PassManager
from numba.cuda.cudadrv import nvvm
from numba.cuda.typing import BaseContext

from ort_cuda_plugin.compiler import type_propagation
from ort_cuda_plugin.compiler.lowering import find_singly_assigned, lower_block, lower_statement, store
from ort_cuda_plugin.compiler.single_assignment import reconstruct_ssa

compute_capability = (8, 0)
"""The architecture that Numba compiles for. Newer architectures and the emulated device have the same LLVM IR."""

ir_version = (2, 0, 3, 2)
"""Versions of NVVM IR and of its debug metadata, (major, minor) of each, in the kernels' metadata. NVVM 13.0 has these;
newer versions of NVVM read older IR."""

passes_without_effect = frozenset(
    [
        "WithLifting",
        "InlineClosureLikes",
        "RewriteSemanticConstants",
        "DeadBranchPrune",
        "RewriteDynamicRaises",
        "MakeFunctionToJitFunction",
        "InlineInlinables",
        "FindLiterallyCalls",
        "LiteralUnroll",
        "LiteralPropagationSubPipelinePass",
        "InlineOverloads",
        "NopythonRewrites",
        "AnnotateTypes",
    ]
)


class KernelCompiler(compiler.CUDACompiler):  # type: ignore[misc]
    """Compiles with only those of Numba's passes that generated kernels and their device functions need."""

    def define_pipelines(self) -> list[PassManager]:
        (complete,) = super().define_pipelines()
        needed = PassManager(complete.pipeline_name)
        for implementation, description in complete.passes:
            if implementation.__name__ not in passes_without_effect:
                needed.add_pass(implementation, description)
        needed.finalize()
        return [needed]


@dataclass(frozen=True)
class ComputeCapability:
    """Stands in for the current device, which numba-cuda asks for its compute capability when it compiles a device
    function.
    """

    compute_capability: tuple[int, int]


data_types = (types.Number, types.Boolean, types.CPointer, types.Array)


@cache
def is_of_data(kind: type) -> bool:
    """Return whether ``kind`` is a class of Numba types of data, as opposed to functions or modules."""
    return issubclass(kind, data_types)


signatures: dict[tuple[Any, Any, tuple[types.Type, ...]], tuple[Any, Any]] = {}
"""Cache of `remembered`: (signature, key of the overload) by (function, typing context, argument types)."""

resolve = BaseFunction.get_call_type


def remembered(function: Any, context: Any, args: tuple[types.Type, ...], kws: dict[str, types.Type]) -> Any:
    """Replace `BaseFunction.get_call_type`, which tries all overloads at each use of an operator, by a
    cached version.
    """
    if kws or not all(is_of_data(each.__class__) for each in args):
        return resolve(function, context, args, kws)
    # Numba creates a new function object for each conversion to a number type, so the type serves as the key.
    conversion = function.typing_key if isinstance(function.typing_key, types.Number) else None
    key = (conversion or function, context, tuple(args))
    if key not in signatures:
        signature = resolve(function, context, args, kws)
        signatures[key] = signature, function.get_impl_key(signature)
    signature, overload = signatures[key]
    function._impl_keys[signature.args] = overload
    return signature


resolve_value = BaseContext.resolve_value_type
values: dict[tuple[Any, int], tuple[Any, Any]] = {}
"""Cache of `remembered_value`, by (typing context, id of the object): (Numba's type, the object, which keeps the id
valid).
"""
kinds_of_names = (FunctionType, BuiltinFunctionType, ModuleType, type, types.Type, extending._Intrinsic)


def remembered_value(context: Any, value: Any) -> Any:
    """Replace `BaseContext.resolve_value_type`, which tries a dozen protocols for each called function, by a cached
    version.
    """
    if not isinstance(value, kinds_of_names):
        return resolve_value(context, value)
    key = (context, id(value))
    found = values.get(key)
    if found is None:
        found = values[key] = (resolve_value(context, value), value)
    return found[0]


literal_or_omitted = lowering._lit_or_omitted
omitted = types.Omitted(ir.UNDEFINED)


def literal_if_known(value: Any) -> Any:
    """Replace `lowering._lit_or_omitted`, which raises and catches an exception per operand that is not constant."""
    return omitted if value is ir.UNDEFINED else literal_or_omitted(value)


takes_location = base._has_loc
location_takers: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def remembered_location(function: Any) -> bool:
    """Replace `base._has_loc`, which inspects the signature of an implementation at each use, by a cached version."""
    try:
        known = location_takers.get(function)
        if known is None:
            known = location_takers[function] = takes_location(function)
    except TypeError:  # the function is not hashable, or does not support weak references
        return bool(takes_location(function))
    return known


size_of = base.BaseContext.get_abi_sizeof
sizes: dict[str, int] = {}
"""Cache of `remembered_size`: bytes of LLVM types, by their text. All kernels have the same data layout."""


def remembered_size(context: Any, kind: Any) -> int:
    """Replace `BaseContext.get_abi_sizeof`, which lets LLVM parse a module for each variable, by a cached version."""
    text = str(kind)
    if text not in sizes:
        sizes[text] = size_of(context, kind)
    return sizes[text]


def unmarked(scheme: Any, text: str, *colors: Any) -> str:
    """Replace the coloring of error messages: Numba catches most of these errors, and coloring takes most of their
    time.
    """
    return text


def without_lifetimes(processor: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """Replace `PostProcessor.run` for functions without generators, whose variables need no release."""
    processor.func_ir.blocks = transforms.canonicalize_cfg(processor.func_ir.blocks)
    processor.func_ir.generator_info = None


def unchanged(func_ir: Any) -> Any:
    """Replace Numba's searches for ``with`` statements and for dictionary updates, which kernels do not contain."""
    return func_ir


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector, which would visit all objects repeatedly while Numba creates new ones.

    It would take a third of the front end's time. Cycles of other threads are not collected meanwhile either.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class KernelNvvm(nvvm.NVVM):  # type: ignore[misc]  # Numba has no types
    """Tells Numba the version of NVVM IR while Numba generates LLVM IR. The base class would load NVVM for this.

    The extra ``cpu`` does not install the library, and the IR of a kernel must not depend on the library's version.
    """

    def __new__(cls) -> KernelNvvm:
        return object.__new__(cls)

    def __init__(self) -> None:
        pass

    def get_ir_version(self) -> tuple[int, int, int, int]:
        return ir_version


def patches() -> list[tuple[Any, str, object]]:
    """Return the patches of Numba: (object, name of its attribute, replacement)."""
    device = ComputeCapability(compute_capability)
    return [
        # Device functions, including Numba's own, ask for the current device's compute capability.
        (dispatcher, "get_current_device", lambda: device),
        (compiler, "CUDACompiler", KernelCompiler),
        (nvvm, "NVVM", KernelNvvm),
        (BaseFunction, "get_call_type", remembered),
        (postproc.PostProcessor, "run", without_lifetimes),
        (interpreter, "peep_hole_delete_with_exit", unchanged),
        (interpreter, "peep_hole_fuse_dict_add_updates", unchanged),
        (typeinfer, "TypeVarMap", type_propagation.RecordedTypes),
        (typeinfer.ConstraintNetwork, "propagate", type_propagation.propagate),
        (lowering.Lower, "_find_singly_assigned_variable", find_singly_assigned),
        (lowering.Lower, "lower_block", lower_block),
        (lowering.Lower, "lower_inst", lower_statement),
        (lowering.Lower, "storevar", store),
        (lowering, "_lit_or_omitted", literal_if_known),
        (BaseContext, "resolve_value_type", remembered_value),
        (base, "_has_loc", remembered_location),
        (base.BaseContext, "get_abi_sizeof", remembered_size),
        (untyped_passes, "reconstruct_ssa", reconstruct_ssa),
    ]


@contextmanager
def front_end_of_kernels() -> Iterator[None]:
    """Apply the patches of this module to Numba for a ``with`` block. The caller must hold Numba's compiler lock."""
    with ExitStack() as stack:
        stack.enter_context(collection_paused())
        for patched, name, replacement in patches():
            stack.enter_context(patch.object(patched, name, replacement))
        for colors in (type(errors.termcolor()), type(core_errors.termcolor())):
            stack.enter_context(patch.object(colors, "_markup", unmarked, create=True))
        yield
