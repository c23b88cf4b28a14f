"""Parameters of lowering: device properties and session options."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ..gpus import typical_multiprocessors
from ..gpus.calibration import Calibration
from .steps.libraries import Refusals
from .steps.quarantine import Quarantine


@dataclass(frozen=True)
class DeviceProperties:
    """Device properties that lowering may depend on.

    ``emulated``: kernels are generated for the emulated device, otherwise for a GPU with this compute capability and
    number of multiprocessors. ``libraries`` may hold "cublaslt" and "cudnn". ``runs_cubins``: the device is a real GPU,
    and not the emulated device running GPU kernels. ``tf32``: kernels may round float32 to TF32 if the options allow
    it; the emulated device keeps float32 even in GPU kernels, so that its results can be compared with those of other
    providers. ``refusals``: library calls that plans avoid. ``quarantine``: schedules and operators that plans avoid.
    ``calibration``: measured rates of the GPU; None: there are none.
    """

    emulated: bool = True
    libraries: frozenset[str] = frozenset()
    compute_capability: tuple[int, int] = (9, 0)
    multiprocessors: int = field(default_factory=lambda: typical_multiprocessors((9, 0)))
    runs_cubins: bool = False
    tf32: bool = False
    refusals: Refusals = field(default_factory=Refusals, compare=False, repr=False)
    quarantine: Quarantine = field(default_factory=Quarantine)
    calibration: Calibration | None = None

    @staticmethod
    def gpu(
        compute_capability: tuple[int, int], multiprocessors: int = 0, libraries: frozenset[str] = frozenset()
    ) -> DeviceProperties:
        """Return the properties of a GPU. 0 ``multiprocessors`` means the number of a large GPU of the architecture."""
        count = multiprocessors or typical_multiprocessors(compute_capability)
        return DeviceProperties(False, libraries, compute_capability, count, runs_cubins=True, tf32=True)


class AttentionKernel(enum.IntFlag):
    """Attention kernels, as bits of ONNX Runtime's provider option ``sdpa_kernel``."""

    FLASH = 1
    EFFICIENT = 2
    TRT_FUSED = 4
    CUDNN = 8
    MATH = 16
    TRT_FLASH = 32
    TRT_CROSS = 64
    TRT_CAUSAL = 128
    LEAN = 256


@dataclass(frozen=True)
class LoweringOptions:
    """Session options that lowering reads; each field has the name of its option (docs/options.md).

    ``wide_indices`` is for tests only: it forces 64-bit index arithmetic below 2**31 elements.
    """

    use_tf32: bool = True
    deterministic: bool = False
    fusion: bool = True
    device_loops: bool = True
    prefer_nhwc: bool = False
    sdpa_kernel: int = 0
    cudnn_conv_algo_search: str = "HEURISTIC"
    cudnn_conv_use_max_workspace: bool = False
    cudnn_conv1d_pad_to_nc1d: bool = True
    fuse_conv_bias: bool = True
    tunable_op_enable: bool = False
    tunable_op_tuning_enable: bool = False
    tunable_op_max_tuning_duration_ms: int = 0
    keep_float32: tuple[str, ...] = ()
    wide_indices: bool = False

    @property
    def fuses_attention(self) -> bool:
        """Return whether attention may be one kernel, and not only two GEMMs with a softmax between them."""
        return self.sdpa_kernel != AttentionKernel.MATH

    @property
    def allows_cudnn_attention(self) -> bool:
        """Return whether cuDNN may compute attention."""
        return self.sdpa_kernel == 0 or bool(self.sdpa_kernel & AttentionKernel.CUDNN)
