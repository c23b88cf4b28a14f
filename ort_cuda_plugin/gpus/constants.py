"""Constants of the performance model that data sheets lack. `estimate.fit` fits them to measurements of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

_FITTED_CLOCK = 1.83e9
"""Clock of the GPU whose measured times ``product_seconds`` and ``library_seconds`` were fitted to, hertz."""


@dataclass(frozen=True)
class Constants:
    """Attainable fractions of peak rates, latencies, and launch overheads.

    The defaults apply to a GPU without calibration. They are rounded values from published microbenchmarks (`SOURCES`).
    """

    dram: float = 0.92  # fraction of the peak rate that long sequential reads and writes reach
    l2: float = 1.0  # fraction of the L2 rates in the GPU's description that kernels reach
    l2_share: float = 0.80  # fraction of the L2's capacity that holds reused data
    tensor_kernel: float = 0.80  # fraction of the sustained tensor rate that the plugin's mma kernels reach
    tensor_library: float = 1.0  # fraction of the sustained tensor rate that a library's largest tiles reach
    float32_library: float = 0.85
    issue: float = 0.80  # issue rate of a multiprocessor, as a fraction of four instructions per clock
    launch_seconds: float = 1.6e-6  # gap between dependent kernels in a CUDA graph
    product_seconds: float = 4.9e-6  # fixed time of a tensor-core kernel: it fetches instructions and first operands
    library_seconds: float = 0.9e-6  # pipeline fill and last tile of a library's kernel
    dram_latency: float = 420e-9
    l2_latency: float = 200e-9
    shared_cycles: float = 30.0
    barrier_cycles: float = 30.0
    dependent_cycles: float = 6.0  # latency from an instruction to a dependent one

    @classmethod
    def at(cls, clock: float) -> Constants:
        """Return the defaults for a clock, in hertz: starting a kernel takes the same number of cycles at any clock."""
        scale = _FITTED_CLOCK / clock
        return replace(cls(), product_seconds=cls.product_seconds * scale, library_seconds=cls.library_seconds * scale)


SOURCES = {
    "dram": "https://github.com/NVIDIA/cccl/pull/9722 (H200, sums: 90 %), https://github.com/NVIDIA/cccl/pull/9881",
    "l2": "the devices' l2_bytes_per_clock",
    "l2_latency": "https://github.com/te42kyfo/gpu-benches/tree/master/gpu-latency (H100: 151 ns, 271 in its far half)",
    "dram_latency": "https://github.com/caps-tum/mt4g (H100: 421 ns); 370 ns by gpu-latency, as above",
    "shared_cycles, dependent_cycles": "https://arxiv.org/abs/2402.13499",
    "launch_seconds": "https://developer.nvidia.com/blog/constant-time-launch-for-straight-line-cuda-graphs-and-other-"
    "performance-enhancements/; https://github.com/te42kyfo/gpu-benches/tree/master/gpu-small-kernels has 1.26 us and,"
    " with another driver, 2.26 us for a kernel on an H200 that itself takes about 0.25 us",
    "product_seconds, library_seconds": "fitted to gpus/published.json (docs/estimates.md)",
    "tensor_library": "the devices' tensor_share",
}
