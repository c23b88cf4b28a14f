"""Run a Python program in which the plugin is registered under its own name.

`ort-cuda-plugin with -- python app.py` is for programs that select CudaPluginExecutionProvider themselves, or that use
all of get_available_providers(); `exec` is for programs that select CUDAExecutionProvider. It works with every wheel of
ONNX Runtime.
"""

from __future__ import annotations

import argparse

from ort_cuda_plugin.cli.runs import drop_in
from ort_cuda_plugin.ep.device.identity import Identity

add_arguments = drop_in.add_arguments


def execute(arguments: argparse.Namespace) -> int:
    """Replace this process by the program."""
    return drop_in.start(arguments, Identity.OWN)
