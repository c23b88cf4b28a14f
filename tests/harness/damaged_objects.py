"""Fuzzer of the two readers of ELF objects: the emulator's loader in C, and the class `Elf` in Python.

Objects of the kernel compiler and of a C compiler are damaged in fields that a reader interprets. ``python
tests/harness/damaged_objects.py --rounds 100000`` loads that many in C under AddressSanitizer and
UndefinedBehaviorSanitizer, and reads as many in Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from c_programs import build_program, run_program
from emulator_harness import compile_kernels
from kernel_launch import kernel
from kernel_objects import KERNEL_FLAGS, OTHER_CODE_MODELS
from ort_cuda_plugin.compiler.compile import compile_kernel
from ort_cuda_plugin.compiler.elf import Elf
from ort_cuda_plugin.compiler.targets import Target

SUM = kernel(
    "sum",
    ("*f32", "*f32", "i32"),
    """
def kernel(x, y, n):
    shared = cuda.shared.array(32, float32)
    i = cuda.grid(1)
    shared[cuda.threadIdx.x] = math.exp(x[i]) if i < n else float32(0)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        total = float32(0)
        for k in range(32):
            total += shared[k]
        y[cuda.blockIdx.x] = total
""",
)
CODE_MODELS = [KERNEL_FLAGS, *OTHER_CODE_MODELS.values()]


def write_objects(folder: Path) -> list[Path]:
    """Write undamaged objects: of the kernel compiler, without and with checking mode, and of the C compiler.

    The latter have relocations of every kind that the loader supports.
    """
    images = [compile_kernel(SUM, Target.emulated(check)).data for check in (False, True)]
    images += [compile_kernels(folder, model) for model in CODE_MODELS]
    paths = [folder / f"{index}.o" for index in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        path.write_bytes(image)
    return paths


def program() -> Path:
    return build_program("loader_fuzz", ["loader_fuzz.c", "damage_object.c"], "address")


def load_damaged(seed: int, rounds: int) -> dict[str, int]:
    """Load damaged objects in C. Return how many were refused and loaded, and how many kernels were found in them.

    Raises AssertionError with a sanitizer's report.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = run_program(program(), "load", str(seed), str(rounds), *write_objects(Path(folder)), timeout=7200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    words = done.stdout.split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


def damaged_objects(seed: int, rounds: int) -> Iterator[bytes]:
    """Yield the damaged objects that `load_damaged` loads for this seed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(program()), "print", str(seed), str(rounds), *map(str, write_objects(Path(folder)))]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(rounds):
                length = int.from_bytes(process.stdout.read(4), "little")
                yield process.stdout.read(length)
        assert process.returncode == 0


def read_damaged(seed: int, rounds: int) -> dict[str, int]:
    """Read damaged objects in Python. Return how many were refused with ValueError and read; raise other errors."""
    outcome = {"refused": 0, "read": 0}
    for data in damaged_objects(seed, rounds):
        try:
            elf = Elf(data)
            for section in elf.sections:
                elf.contents(section)
            for symbol in elf.symbols():
                if symbol.section < len(elf.sections):  # larger numbers, such as SHN_ABS, name no section
                    elf.symbol_offset(symbol)
            outcome["read"] += 1
        except ValueError:
            outcome["refused"] += 1
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description="Loads and reads damaged kernel objects.")
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print("loaded in C:", load_damaged(arguments.seed, arguments.rounds))
    print("read in Python:", read_damaged(arguments.seed, arguments.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
