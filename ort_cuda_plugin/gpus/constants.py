"""Constants of the performance model that data sheets lack; `estimate.fit` derives them from measurements."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Attainable fractions of peak rates, latencies, and launch overheads.

    The defaults, for a GPU without measurements, are rounded values from published microbenchmarks (`SOURCES`).
    """

    dram: float = 0.92  # fraction of the peak rate that long sequential reads and writes reach
    l2: float = 1.0  # fraction of the L2 rates in the GPU's description that kernels reach
    l2_share: float = 0.80  # fraction of the L2's capacity that holds reused data
    tensor_kernel: float = 0.80  # fraction of the sustained tensor rate that the plugin's mma kernels reach
    tensor_library: float = 1.0  # fraction of the sustained tensor rate that a library's largest tiles reach
    float32_library: float = 0.85
    issue: float = 0.80  # issue rate of a multiprocessor, as a fraction of four instructions per clock
    launch_seconds: float = 1.6e-6  # gap between dependent kernels in a CUDA graph
    library_seconds: float = 1.8e-6  # extra overhead of a library's kernel: pipeline fill and last tile
    dram_latency: float = 420e-9
    l2_latency: float = 200e-9
    shared_cycles: float = 30.0
    barrier_cycles: float = 30.0
    dependent_cycles: float = 6.0  # latency from an instruction to a dependent one


SOURCES = {
    "dram": "https://github.com/NVIDIA/cccl/pull/9722 (H200, sums: 90 %), https://github.com/NVIDIA/cccl/pull/9881",
    "l2": "the devices' l2_bytes_per_clock",
    "l2_latency": "https://github.com/te42kyfo/gpu-benches/tree/master/gpu-latency (H100: 151 ns, 271 in its far half)",
    "dram_latency": "https://github.com/caps-tum/mt4g (H100: 421 ns); 370 ns by gpu-latency, as above",
    "shared_cycles, dependent_cycles": "https://arxiv.org/abs/2402.13499",
    "launch_seconds": "https://developer.nvidia.com/blog/constant-time-launch-for-straight-line-cuda-graphs-and-other-"
    "performance-enhancements/; https://github.com/te42kyfo/gpu-benches/tree/master/gpu-small-kernels has 1.26 us and,"
    " with another driver, 2.26 us for a kernel on an H200 that itself takes about 0.25 us",
    "tensor_library": "the devices' tensor_share",
}
