"""Run a Python program in which the plugin is registered under its own name.

`ort-cuda-plugin with -- python app.py` is for programs that select CudaPluginExecutionProvider themselves, or that use
all of get_available_providers(). It works with every wheel of ONNX Runtime. `exec` is for programs that select
CUDAExecutionProvider, and needs a wheel without that provider.
"""

from __future__ import annotations

import argparse

from ort_cuda_plugin.cli.runs import drop_in
from ort_cuda_plugin.ep.device.identity import Identity

add_arguments = drop_in.add_arguments


def execute(arguments: argparse.Namespace) -> int:
    """Replace this process by the program."""
    return drop_in.start(arguments, Identity.OWN)
