"""Checks of single driver calls in the selftest: each passes, and names the call that the driver does not support."""

from __future__ import annotations

import pytest

from device_faults import faults
from ort_cuda_plugin.selftest.device import Device
from ort_cuda_plugin.selftest.driver_calls import CALL_CHECKS
from ort_cuda_plugin.selftest.driver_table import Wrong

CALLS = {
    "a memory pool": [
        "MemPoolCreate",
        "MemPoolSetAttribute",
        "MemPoolGetAttribute",
        "MemPoolTrimTo",
        "MemAllocFromPoolAsync",
        "MemFreeAsync",
    ],
    "queries of memory, streams and events": ["PointerGetAttribute", "StreamGetCtx", "StreamQuery", "EventQuery"],
    "a captured graph": [
        "StreamBeginCapture",
        "StreamEndCapture",
        "StreamIsCapturing",
        "GraphGetNodes",
        "GraphNodeGetType",
        "GraphInstantiate",
        "GraphLaunch",
    ],
    "nodes of memory in a graph": [
        "GraphCreate",
        "GraphAddMemsetNode",
        "GraphAddMemcpyNode",
        "GraphAddChildGraphNode",
        "GraphExecMemsetNodeSetParams",
        "GraphExecMemcpyNodeSetParams",
        "GraphExecChildGraphNodeSetParams",
    ],
    "a loop in a graph": ["GraphConditionalHandleCreate", "GraphAddNode"],
    "a kernel in a graph": ["FuncSetAttribute", "GraphAddKernelNode", "GraphExecKernelNodeSetParams"],
}
"""The driver calls that each check makes."""


@pytest.mark.parametrize("name", CALL_CHECKS)
def test_a_check_of_calls_names_each_that_is_unsupported(name: str) -> None:
    device = Device(True)
    CALL_CHECKS[name](device)
    for call in CALLS[name]:
        with faults(f"unsupported={call}"), pytest.raises(Wrong, match=rf"^cu{call} failed: CUDA_ERROR_NOT_SUPPORTED"):
            CALL_CHECKS[name](device)
        CALL_CHECKS[name](device)
