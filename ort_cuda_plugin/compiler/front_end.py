"""Numba's front end without what kernels have no use for: half of its passes, most look-ups and lifetimes.

Kernels are straight code over numbers and pointers: no closures, exceptions or array expressions. The IR is the same
as with all passes; a test compares the two.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from numba.core.types.functions import BaseFunction
from numba.cuda import compiler, dispatcher, lowering, types
from numba.cuda.core import analysis, ir, postproc, transforms
from numba.cuda.core.compiler_machinery import PassManager

compute_capability = (8, 0)
"""The architecture that Numba gets: the IR is the same for all from here on, and for the emulated device."""

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
    """Runs the passes that generated kernels and their device functions need."""

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
    """Stands in for the device whose compute capability numba-cuda asks for when it compiles a device function."""

    compute_capability: tuple[int, int]


data_types = (types.Number, types.Boolean, types.CPointer, types.Array)

signatures: dict[tuple[Any, Any, tuple[types.Type, ...]], tuple[Any, Any]] = {}
"""What functions of such types were resolved to, and by which overload: by function, typing context and arguments."""

resolve = BaseFunction.get_call_type


def remembered(function: Any, context: Any, args: tuple[types.Type, ...], kws: dict[str, types.Type]) -> Any:
    """`BaseFunction.get_call_type`, which tries every overload of an operator each time that one appears."""
    if kws or not all(isinstance(each, data_types) for each in args):
        return resolve(function, context, args, kws)
    # Numba makes a new function for each conversion to a type of numbers.
    conversion = function.typing_key if isinstance(function.typing_key, types.Number) else None
    key = (conversion or function, context, tuple(args))
    if key not in signatures:
        signature = resolve(function, context, args, kws)
        signatures[key] = signature, function.get_impl_key(signature)
    signature, overload = signatures[key]
    function._impl_keys[signature.args] = overload
    return signature


find_lifetimes = postproc.PostProcessor.run


def find_lifetimes_once(processor: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """`PostProcessor.run` for functions that are no generators: only the last of five passes uses what it finds."""
    if emit_dels:
        find_lifetimes(processor, emit_dels, extend_lifetimes)
    else:
        processor.func_ir.blocks = transforms.canonicalize_cfg(processor.func_ir.blocks)
        processor.func_ir.generator_info = None


def find_singly_assigned(lower: Any) -> None:
    """`Lower._find_singly_assigned_variable`, whose time grows with the square of a block's length."""
    blocks = lower.func_ir.blocks
    uses = analysis.compute_use_defs(blocks)
    used_elsewhere = set().union(*uses.usemap.values())
    assignments = Counter(each.target.name for block in blocks.values() for each in block.find_insts(ir.assign_types))
    excluded = used_elsewhere | analysis.must_use_alloca(blocks)
    lower._singly_assigned_vars = {name for name, count in assignments.items() if count == 1 and name not in excluded}
    lower._blk_local_varmap = {}


@contextmanager
def collection_paused() -> Iterator[None]:
    """Holds back the collection of cycles, which goes over all objects again and again while Numba makes its own.

    A third of the time of a kernel's front end goes there. Other threads of the process free their cycles later.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def front_end_of_kernels() -> Iterator[None]:
    """Numba compiles kernels so while this lasts. The caller holds Numba's lock."""
    device = ComputeCapability(compute_capability)
    with (
        collection_paused(),
        # The device functions of a kernel, Numba's own among them, ask for the current device's compute capability.
        patch.object(dispatcher, "get_current_device", lambda: device),
        patch.object(compiler, "CUDACompiler", KernelCompiler),
        patch.object(BaseFunction, "get_call_type", remembered),
        patch.object(postproc.PostProcessor, "run", find_lifetimes_once),
        patch.object(lowering.Lower, "_find_singly_assigned_variable", find_singly_assigned),
    ):
        yield
