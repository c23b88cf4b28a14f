"""The names under which ONNX Runtime may know the execution provider."""

from __future__ import annotations

from enum import IntEnum


class Identity(IntEnum):
    """``ocp_identity`` of ``csrc_shim/base/host.h``."""

    OWN = 0
    CUDA = 1

    @property
    def ep_name(self) -> str:
        """The name of the execution provider."""
        return ("CudaPluginExecutionProvider", "CUDAExecutionProvider")[self]
