"""Numba kernels whose tensors are arrays with a shape."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...program.lowering.context import Tensor
from ...program.steps.callbacks import DeviceArray
from .kernel_source import kernel_source
from .kernels import Function, Kernel

_DEFINITION = re.compile(r"^def kernel\(", re.MULTILINE)


@dataclass(frozen=True)
class ArrayKernel(Kernel):
    """A Numba kernel that gets, for each tensor, an array of its rank. Made by `array_kernel`."""

    def for_arguments(self, args: Sequence[Any]) -> tuple[Kernel, list[Any]]:
        """Return a kernel whose parameters are pointers and sizes, and its arguments: tensors and their sizes."""
        parameters, passed = [], []
        flat: list[Any] = []
        for number, arg in enumerate(args):
            name = f"p{number}"
            parameters.append(name)
            flat.append(arg)
            if isinstance(arg, Tensor | DeviceArray):
                sizes = [f"{name}_{axis}" for axis in range(len(arg.shape))]
                parameters += sizes
                flat += arg.shape
                name = f"as_array({name}, ({''.join(size + ', ' for size in sizes)}))"
            passed.append(name)
        author = _DEFINITION.sub("@cuda.jit(device=True)\ndef author(", self.source, count=1)
        entry = f"def kernel({', '.join(parameters)}):\n    author({', '.join(passed)})\n"
        return Kernel(self.name, source=f"{author}\n{entry}"), flat


def array_kernel(function: Function) -> ArrayKernel:
    """Make a Numba kernel from a function, decorated with ``numba.cuda.jit`` or not.

    The function gets each tensor as an array with the tensor's rank, ``shape`` and ``size``. Elements of 16-bit floats
    are uint16; elements of smaller floats and of bool are uint8.

    Raises:
        KernelSourceError: the function cannot be a kernel.
    """
    source, _ = kernel_source(function)
    return ArrayKernel(re.sub(r"\W", "_", str(getattr(function, "__name__", "kernel"))), source=source)
