"""The numbers of the model that no data sheet has. `fit` finds them from measurements of a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Shares of peak rates that kernels reach at best, latencies, and the floor of a launch.

    Until a GPU has been measured they are round numbers from published microbenchmarks; `SOURCES` says which.
    """

    dram: float = 0.92  # of the peak rate, of long runs of reads and writes
    l2: float = 0.60
    l2_share: float = 0.80  # of the L2's bytes that hold what comes again
    tensor_kernel: float = 0.80  # of our kernels' mma, of what the device's largest products reach
    tensor_library: float = 1.0  # of a library's largest tiles, of the same
    float32_library: float = 0.85
    issue: float = 0.80  # of four instructions a clock
    launch_seconds: float = 1.6e-6  # from a kernel in a CUDA graph to the next one that depends on it
    library_seconds: float = 1.8e-6  # what a library's kernel takes beside: filling its pipeline, the last tile's end
    dram_latency: float = 560e-9
    l2_latency: float = 200e-9
    shared_cycles: float = 30.0
    barrier_cycles: float = 30.0
    dependent_cycles: float = 6.0  # from an instruction to one that needs its result


SOURCES = {
    "dram": "https://github.com/NVIDIA/cccl/pull/9722 (H200, sums: 90 %), https://github.com/NVIDIA/cccl/pull/9881",
    "l2, latencies": "https://chipsandcheese.com/2023/07/02/nvidias-h100-funny-l2-and-tons-of-bandwidth/",
    "shared_cycles, dependent_cycles": "https://arxiv.org/abs/2402.13499",
    "launch_seconds": "https://developer.nvidia.com/blog/constant-time-launch-for-straight-line-cuda-graphs-and-other-"
    "performance-enhancements/",
    "tensor_library": "the devices' tensor_share",
}
