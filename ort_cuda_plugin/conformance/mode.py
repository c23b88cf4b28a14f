"""The settings of a test run: ONNX Runtime's optimizations, checking mode and adversarial streams of the device."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """The settings of a test run.

    ``check``: the emulated device's checking mode, whose findings fail a test. ``seed``: adversarial streams, which
    defer and interleave work by this seed and the test's name; None for streams that run work at once.
    ``single_nodes``: a kernel of the registry runs each node, and nothing is fused. ``lowering``: the GPU for which
    kernels are lowered, as "sm_90" or "sm_90:132"; "": as ``ORT_CUDA_PLUGIN_EMULATE_LOWERING`` says. Without
    ``emulate`` the tests run on a GPU, where ``check`` and ``seed`` have no effect.
    """

    optimized: bool = False
    check: bool = False
    seed: int | None = None
    single_nodes: bool = False
    lowering: str = ""
    emulate: bool = True

    def environment(self, jobs: int) -> dict[str, str]:
        """Return the environment variables of a worker process, one of ``jobs`` that run at once."""
        cores = len(os.sched_getaffinity(0))
        return {
            "ALLOW_RELEASED_ONNX_OPSET_ONLY": "0",
            "ORT_CUDA_PLUGIN_EMULATE_CHECK": str(int(self.check)),
            "ORT_CUDA_PLUGIN_EMULATE_STREAMS": "inline" if self.seed is None else "adversarial",
            "ORT_CUDA_PLUGIN_EMULATE_WORKERS": str(max(1, cores // jobs)),
            **({"ORT_CUDA_PLUGIN_EMULATE_LOWERING": self.lowering} if self.lowering else {}),
        }

    def apply(self, key: str) -> None:
        """Prepare the emulated devices of this process for the test ``key``."""
        from ort_cuda_plugin.abi.emulation import clear_findings, configuration, configure

        clear_findings()
        if self.seed is None:
            return
        config = configuration()
        config.seed = (self.seed << 32) | zlib.crc32(key.encode())
        configure(config)
