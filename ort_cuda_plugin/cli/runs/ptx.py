"""Run a kernel of a PTX file on the emulated device, with each access to memory checked.

FILE is PTX of nvcc, NVRTC, Triton, Numba or another compiler. Without --kernel the command lists the kernels with
their parameters. An argument of the kernel is one of:

  x.npy        an array that NumPy has saved
  f32:64x100   an array of zeros, of a type (f16, f32, f64, i8 to i64, u8 to u64) and shape
  i32=100      a number
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from ort_cuda_plugin import emulator
from ort_cuda_plugin.cli.common import output_console
from ort_cuda_plugin.cli.exit_codes import ExitCode, UserError

SHOWN = 6
"""Maximum number of elements of an array that the command prints."""
ELEMENT = re.compile(r"(f(?:16|32|64)|[iu](?:8|16|32|64))([:=])(.*)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="a PTX file")
    parser.add_argument(
        "--args",
        metavar="ARGUMENT",
        nargs="*",
        default=[],
        help="the kernel's arguments, in their order: each a .npy file, a type and a shape of zeros (f32:64x100), "
        "or a type and a number (i32=100)",
    )
    parser.add_argument(
        "--kernel", metavar="NAME", help="the kernel to launch; default: none, which prints the kernels of the file"
    )
    parser.add_argument(
        "--grid", metavar="X[,Y[,Z]]", type=sizes, default=(1, 1, 1), help="blocks of the grid (default: 1)"
    )
    parser.add_argument(
        "--block", metavar="X[,Y[,Z]]", type=sizes, default=(32, 1, 1), help="threads of a block (default: 32)"
    )
    parser.add_argument(
        "--shared", metavar="BYTES", type=int, default=0, help="bytes of dynamic shared memory (default: 0)"
    )
    parser.add_argument("--no-check", action="store_true", help="run faster, without checks of accesses to memory")
    parser.add_argument("--save", metavar="FOLDER", type=Path, help="save each array afterwards, as argument0.npy, ...")


def execute(arguments: argparse.Namespace) -> int:
    console = output_console()
    try:
        module = emulator.load(arguments.file, check=not arguments.no_check)
    except OSError as error:
        raise UserError(ExitCode.USAGE, f"{arguments.file}: {error.strerror or error}") from error
    except (emulator.EmulatorError, UnicodeDecodeError) as error:
        raise UserError(ExitCode.USAGE, f"{arguments.file}: {error}") from error
    if arguments.kernel is None:
        for name in module.kernels:
            console.print(Text(f"{name}({', '.join(module.parameters(name))})"))
        return ExitCode.OK
    values = [argument(text) for text in arguments.args]
    try:
        module.launch(arguments.kernel, arguments.grid, arguments.block, values, arguments.shared)
    except emulator.EmulatorError as error:
        raise UserError(ExitCode.MISMATCH if error.findings else ExitCode.MODEL_FAILED, str(error)) from error
    except TypeError as error:
        raise UserError(ExitCode.USAGE, str(error)) from error
    print_arrays(console, values, arguments.save)
    return ExitCode.OK


def sizes(text: str) -> tuple[int, ...]:
    """Parse the sizes of a grid or a block: one to three numbers, separated by commas."""
    numbers = tuple(int(part) for part in text.split(","))
    if not 1 <= len(numbers) <= 3 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected one to three numbers of at least 1, such as 32,4")
    return numbers


def argument(text: str) -> npt.NDArray[Any] | np.generic:
    """Parse an argument of a kernel, as the module describes it. Raises UserError."""
    try:
        if match := ELEMENT.fullmatch(text):
            dtype = np.dtype(f"{match[1][0]}{int(match[1][1:]) // 8}")
            if match[2] == ":":
                return np.zeros([int(size) for size in match[3].split("x")], dtype)
            number: np.generic = np.array([float(match[3]) if dtype.kind == "f" else int(match[3], 0)], dtype)[0]
            return number
        loaded: npt.NDArray[Any] = np.ascontiguousarray(np.load(text, allow_pickle=False))
        return loaded
    except OSError as error:
        raise UserError(ExitCode.USAGE, f"{text}: {error.strerror or error}") from error
    except (ValueError, OverflowError) as error:
        expected = "expected a .npy file, a type and a shape (f32:64x100), or a type and a number (i32=100)"
        raise UserError(ExitCode.USAGE, f"{text}: {error}; {expected}") from error


def print_arrays(console: Console, values: list[npt.NDArray[Any] | np.generic], folder: Path | None) -> None:
    """Print what the arrays hold after the launch, and save them to the folder if there is one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for index, value in enumerate(values):
        if not isinstance(value, np.ndarray):
            continue
        first = ", ".join(str(element) for element in value.reshape(-1)[:SHOWN])
        more = ", ..." if value.size > SHOWN else ""
        console.print(Text(f"argument {index}: {value.dtype} {list(value.shape)}: {first}{more}"))
        if folder is not None:
            np.save(folder / f"argument{index}.npy", value)
