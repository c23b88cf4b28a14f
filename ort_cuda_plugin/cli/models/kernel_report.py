"""Reports registers, shared memory, stack and spills of kernels, compiled for GPU architectures without a GPU.

The ``kernels`` command prints it. Kernels come from a manifest that a test run recorded, or from `sample_specs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.library.kernel_library import KernelLibrary
from ort_cuda_plugin.compiler.targets import KernelImage, Target
from ort_cuda_plugin.model.ir import AttrValue, Constant, DType, Graph, Node, Value
from ort_cuda_plugin.ops.registry import NEWEST_OPSETS
from ort_cuda_plugin.program.lowering.context import DeviceProperties

ARCHITECTURES = tuple(Target.cuda(major, minor) for major, minor in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)))

ALLOWED_SPILLS: dict[tuple[str, str], str] = {}
"""(kernel name, architecture such as "sm_80", or "*" for all) -> why the kernel's spills are accepted."""


@dataclass(frozen=True)
class KernelUsage:
    """Resource usage of one kernel on one architecture; all sizes in bytes.

    ``stack`` is the stack of a thread, including local arrays and spills. ``static_shared`` includes the 1024 bytes
    that the system reserves on some architectures. ``reason`` says why spills of the kernel are accepted, "" if they
    are not.
    """

    kernel: str
    arch: str
    registers: int
    static_shared: int
    stack: int
    spill_stores: int
    spill_loads: int
    reason: str

    @property
    def is_failure(self) -> bool:
        return self.spill_stores + self.spill_loads > 0 and not self.reason


def is_for_gpus(spec: KernelSpec) -> bool:
    """Return whether a GPU runs the kernel. Kernels with blocks of 2 to 31 threads, less than a warp, are for the
    emulated device only.
    """
    return not 1 < spec.launch_bounds < 32


def usage_of(spec: KernelSpec, image: KernelImage) -> KernelUsage:
    """Return the resource usage of a kernel. Raises KeyError if the linker did not report it."""
    arch, found = image.target.arch, image.metadata
    reason = ALLOWED_SPILLS.get((spec.name, arch)) or ALLOWED_SPILLS.get((spec.name, "*"), "")
    return KernelUsage(
        kernel=spec.symbol,
        arch=arch,
        registers=found["registers"],
        static_shared=found["static_shared_bytes"],
        stack=found["stack_bytes"],
        spill_stores=found["spill_store_bytes"],
        spill_loads=found["spill_load_bytes"],
        reason=reason,
    )


def report(
    specs: Sequence[KernelSpec],
    targets: Sequence[Target] = ARCHITECTURES,
    library: KernelLibrary | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[KernelUsage]:
    """Compile every kernel for every architecture. ``progress`` is called with the number of kernels just done.

    The result is ordered by kernel, then by architecture.

    Raises KernelCompileError for a kernel that does not compile.
    """
    library = library or KernelLibrary(count=lambda name, by: None)
    jobs = [(spec, target) for spec in specs for target in targets]
    return [usage_of(spec, image) for (spec, _), image in zip(jobs, library.get_jobs(jobs, progress), strict=True)]


# ---- the sample: operators lowered for a GPU at typical sizes ----


@dataclass(frozen=True)
class Case:
    """A node with the shapes of its inputs; constant inputs have contents instead."""

    op_type: str
    inputs: tuple[tuple[int, ...] | list[int], ...]
    attributes: tuple[tuple[str, AttrValue], ...] = ()
    dtype: DType = DType.FLOAT32


half = DType.FLOAT16
SAMPLE = (
    Case("Add", ((8, 384), (384,))),
    Case("Add", ((8, 384), (8, 384)), dtype=half),
    Case("Mul", ((4, 64, 56, 56), (64, 1, 1))),
    Case("Relu", ((4, 64, 56, 56),)),
    Case("Erf", ((8, 1536),)),
    Case("Gelu", ((8, 1536),), dtype=half),
    Case("Tanh", ((8, 384),), dtype=DType.BFLOAT16),
    Case("Pow", ((8, 384), (1,))),
    Case("MatMul", ((8, 128, 384), (384, 1536))),
    Case("MatMul", ((8, 128, 384), (384, 1536)), dtype=half),
    Case("MatMul", ((8, 12, 128, 32), (8, 12, 32, 128))),
    Case("MatMul", ((1, 2048), (2048, 1000))),
    Case("Gemm", ((64, 2048), (1000, 2048), (1000,)), (("transB", 1),)),
    Case("Gemm", ((64, 2048), (1000, 2048), (1000,)), (("transB", 1),), half),
    Case("Conv", ((4, 3, 224, 224), (64, 3, 7, 7), (64,)), (("strides", (2, 2)), ("pads", (3, 3, 3, 3)))),
    Case("Conv", ((4, 64, 56, 56), (64, 64, 3, 3)), (("pads", (1, 1, 1, 1)),)),
    Case("Conv", ((4, 64, 56, 56), (64, 64, 3, 3)), (("pads", (1, 1, 1, 1)),), half),
    Case("Conv", ((4, 64, 56, 56), (256, 64, 1, 1))),
    Case("Conv", ((4, 64, 56, 56), (64, 1, 3, 3)), (("pads", (1, 1, 1, 1)), ("group", 64))),
    Case("Conv", ((1, 64, 256, 256), (1, 64, 3, 3), (1,)), (("pads", (1, 1, 1, 1)),)),
    Case("Conv", ((1, 64, 256, 256), (16, 64, 3, 3), (16,)), (("pads", (2, 2, 2, 2)), ("dilations", (2, 2))), half),
    Case("ConvTranspose", ((1, 64, 64, 64), (64, 32, 4, 4), (32,)), (("pads", (1, 1, 1, 1)), ("strides", (2, 2)))),
    Case("MaxPool", ((4, 64, 112, 112),), (("kernel_shape", (3, 3)), ("strides", (2, 2)), ("pads", (1, 1, 1, 1)))),
    Case("AveragePool", ((4, 64, 56, 56),), (("kernel_shape", (2, 2)), ("strides", (2, 2)))),
    Case("GlobalAveragePool", ((4, 2048, 7, 7),)),
    Case("LRN", ((4, 64, 56, 56),), (("size", 5),)),
    Case("BatchNormalization", ((4, 64, 56, 56), (64,), (64,), (64,), (64,))),
    Case("Softmax", ((8, 12, 128, 128),)),
    Case("Softmax", ((8, 12, 128, 128),), dtype=half),
    Case("LayerNormalization", ((8, 128, 384), (384,), (384,))),
    Case("LayerNormalization", ((8, 128, 384), (384,), (384,)), dtype=half),
    Case("ReduceMean", ((8, 128, 384), [-1])),
    Case("ReduceSum", ((8, 128, 384), [0, 1])),
    Case("ReduceSum", ((1, 1 << 20), [1])),
    Case("Softmax", ((64, 16000),)),
    Case("Transpose", ((8, 128, 12, 32),), (("perm", (0, 2, 1, 3)),)),
    Case("Transpose", ((8, 512, 196),), (("perm", (0, 2, 1)),)),
    Case("Concat", ((8, 128, 32), (8, 128, 64)), (("axis", 2),)),
    Case("Gather", ((1000, 384), [3, 1, 2]), (("axis", 0),)),
)


WITHOUT_TF32 = (
    Case("MatMul", ((8, 128, 384), (384, 1536))),
    Case("Conv", ((4, 64, 56, 56), (64, 64, 3, 3)), (("pads", (1, 1, 1, 1)),)),
)
"""Cases that are compiled with ``use_tf32=0`` as well."""


def lower_case(case: Case, device: DeviceProperties) -> list[KernelSpec]:
    """Return the kernels of a graph of one node. The node's result is made contiguous, so that views are copied."""
    inputs = []
    for index, given in enumerate(case.inputs):
        if isinstance(given, list):
            contents = np.array(given, np.int64)
            constant = Constant.of(contents, DType.INT64)
            inputs.append(Value(f"x{index}", DType.INT64, contents.shape, initializer=constant))
        else:
            inputs.append(Value(f"x{index}", case.dtype, given))
    version = NEWEST_OPSETS[""]
    output = Value("y", case.dtype, None)
    node = Node(case.op_type.lower(), case.op_type, "", version, tuple(inputs), (output,), dict(case.attributes), 0)
    graph_inputs = [value for value in inputs if value.initializer is None]
    graph = Graph("sample", [node], graph_inputs, [output], {"": version})
    return CompiledCluster(graph, device).prepare().kernels


def sample_specs() -> list[KernelSpec]:
    """Return kernels of the most common operators, as a GPU without NVIDIA's libraries would run them."""
    cases = [(case, True) for case in SAMPLE] + [(case, False) for case in WITHOUT_TF32]
    devices = {tf32: DeviceProperties(emulated=False, tf32=tf32) for tf32 in (True, False)}
    return list(dict.fromkeys(spec for case, tf32 in cases for spec in lower_case(case, devices[tf32])))
