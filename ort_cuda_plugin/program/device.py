"""What lowering may depend on beside the model: the device that a plan is for, and the options of a session."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceProperties:
    """What lowering may depend on. ``libraries`` holds "cublaslt" and "cudnn" where the device offers them.

    ``emulated`` says that kernels have the form that is fastest on the emulated device; otherwise it is the one for a
    GPU of that compute capability with so many multiprocessors. ``runs_cubins`` says that it is one, and no emulated
    device in its place. ``tf32`` allows kernels to round float32 to TF32 where the options do: they do so on a GPU. An
    emulated device that runs a GPU's kernels keeps float32, so that its results compare with those of other providers.
    """

    emulated: bool = True
    libraries: frozenset[str] = frozenset()
    compute_capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    runs_cubins: bool = False
    tf32: bool = False

    @staticmethod
    def gpu(
        compute_capability: tuple[int, int], multiprocessors: int = 0, libraries: frozenset[str] = frozenset()
    ) -> DeviceProperties:
        """A GPU; without ``multiprocessors`` one with as many as the large ones of its architecture have."""
        count = multiprocessors or _MULTIPROCESSORS.get(compute_capability, _MULTIPROCESSORS[9, 0])
        return DeviceProperties(False, libraries, compute_capability, count, runs_cubins=True, tf32=True)


#: A100, GeForce RTX 3090, Jetson AGX Orin, GeForce RTX 4090, H100, B200, GeForce RTX 5090.
_MULTIPROCESSORS = {(8, 0): 108, (8, 6): 82, (8, 7): 16, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}


@dataclass(frozen=True)
class LoweringOptions:
    """Options of a session that change what is computed or how."""

    use_tf32: bool = True
    deterministic: bool = False
    wide_indices: bool = False  # 64-bit index arithmetic even below 2**31 elements
    fusion: bool = True
    channels_last: bool = False  # ORT gives operators their channels-last form
    attention: bool = True  # attention is one kernel where that is possible
    library_attention: bool = True  # that may be cuDNN's
    conv_search: str = "HEURISTIC"  # how cuDNN's engine is found
    large_workspace: bool = False  # cuDNN may use much scratch memory
    line_first: bool = True  # a convolution of one dimension is one line of a plane, not one column
    conv_epilogue: bool = True  # cuDNN adds a bias and what follows
    measure_products: bool = False  # cuBLASLt's algorithms are measured
    measuring_ms: int = 0  # how long that may take for one product; 0: any time
