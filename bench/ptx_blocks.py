"""Runs blocks of every kernel of the benchmark networks from PTX and from LLVM IR, and compares what they write.

    python bench/ptx_blocks.py --arch sm_90 [--models resnet50-1,bert-32-float16]

Each model of `bench/estimates.py` is planned for the GPU without NVIDIA's libraries. The first and the last block of
each of its kernels run in the checking mode, once from PTX and once from LLVM IR, on equal memory: noise for floats and
8-bit codes, 0 for indices, and the model's own values for small integer weights. Prints the kernels that differ by more
than `TOLERANCE` or have a finding, and a line of totals; exits with 1 if there is such a kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from estimates import suite  # noqa: E402

from ort_cuda_plugin import gpus  # noqa: E402
from ort_cuda_plugin.abi.core import core, ffi  # noqa: E402
from ort_cuda_plugin.abi.device import Device, DeviceArray, Module  # noqa: E402
from ort_cuda_plugin.abi.emulation import clear_findings, configuration, configure, findings  # noqa: E402
from ort_cuda_plugin.compiler.kernel import KernelSpec  # noqa: E402
from ort_cuda_plugin.compiler.library.kernel_library import KernelLibrary  # noqa: E402
from ort_cuda_plugin.compiler.targets import Target  # noqa: E402
from ort_cuda_plugin.estimate.gather import work_of_model  # noqa: E402
from ort_cuda_plugin.estimate.work import KernelStep, Number, Pointer, Work  # noqa: E402

TOLERANCE = 2e-3
"""Maximum difference of a float, relative to the largest magnitude that the block writes: NVVM and LLVM contract and
approximate differently, and float16 has 11 bits."""
GPUS = {"sm_80": "a100", "sm_90": "h100", "sm_120": "rtx5090"}
"""By architecture: the described GPU for which models are planned."""

Bytes = NDArray[np.uint8]
FLOATS: Mapping[str, Any] = {
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f8e4m3fn": ml_dtypes.float8_e4m3fn,
    "f8e5m2": ml_dtypes.float8_e5m2,
}
"""By parameter type of a kernel: the elements of arrays that are compared as floats."""
SCALARS: Mapping[str, Any] = {"i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64}


@dataclass(frozen=True)
class Comparison:
    """Comparison of a kernel from PTX with the kernel from LLVM IR: the largest relative difference of what they wrote
    (0: equal bits), and the findings of both.
    """

    difference: float
    findings: tuple[str, ...] = ()


@contextmanager
def checking() -> Iterator[None]:
    """Turn on the checking mode of this process's emulated devices."""
    before, config = configuration(), configuration()
    config.check = 1
    configure(config)
    try:
        yield
    finally:
        configure(before)


def contents(work: Work, number: int, kind: str, rng: np.random.Generator) -> Bytes:
    """Return the initial bytes of a region whose elements have the parameter type ``kind``, "f16" for instance."""
    region = work.regions[number]
    if region.contents:
        times = -(-region.nbytes // len(region.contents))
        return np.frombuffer((region.contents * times)[: region.nbytes], np.uint8).copy()
    if kind in FLOATS:
        dtype = np.dtype(FLOATS[kind])
        # A block of noise is repeated: regions have up to hundreds of megabytes.
        noise = rng.standard_normal(min(region.nbytes // dtype.itemsize + 1, 1 << 20), np.float32)
        return np.resize(noise.astype(dtype).view(np.uint8), region.nbytes)
    if kind in ("i8", "u8", "i4", "u4"):
        return rng.integers(0, 256, region.nbytes, np.uint8)
    return np.zeros(region.nbytes, np.uint8)


def difference(one: Bytes, other: Bytes, kind: str) -> float:
    """Return the largest difference of two arrays, relative to the largest finite magnitude; infinity if they differ
    in a NaN, an infinity or an integer.
    """
    if np.array_equal(one, other):
        return 0.0
    if kind not in FLOATS:
        return float("inf")
    dtype = np.dtype(FLOATS[kind])
    a, b = (
        part[: len(part) // dtype.itemsize * dtype.itemsize].view(dtype).astype(np.float64) for part in (one, other)
    )
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    scale = max(float(np.abs(a[finite]).max(initial=0)), float(np.finfo(np.float32).tiny))
    return float(np.abs(a[finite] - b[finite]).max(initial=0)) / scale


class Blocks:
    """Launches single blocks of a model's kernels on an emulated device."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.device = Device.emulated(0)

    def compare(self, step: KernelStep, forms: Mapping[str, Module]) -> Comparison:
        """Run the first and the last block of a launch in both ``forms``, "IR" and "PTX"."""
        kinds = {
            argument.region: kind.removeprefix("*")
            for argument, kind in zip(step.arguments, step.kernel.signature, strict=True)
            if isinstance(argument, Pointer)
        }
        rng = np.random.default_rng(7)
        before = {region: contents(self.work, region, kind, rng) for region, kind in kinds.items()}
        arrays = {region: self.device.upload(data) for region, data in before.items()}
        written = {access.region for access in step.writes} & kinds.keys()
        results, found = [], []
        try:
            for name, module in forms.items():
                for region in written:
                    arrays[region].copy_from(before[region])
                clear_findings()
                self._launch(step, module, arrays)
                found += [f"{name}: {each}" for each in findings()]
                results.append({region: self.device.download(arrays[region]) for region in written})
        finally:
            for array in arrays.values():
                array.free()
        changed = any(not np.array_equal(results[0][region], before[region]) for region in written)
        if not changed and not found:
            found.append("the blocks write nothing")
        worst = max(
            (difference(results[0][region], results[1][region], kinds[region]) for region in written), default=0
        )
        return Comparison(worst, tuple(found))

    def _launch(self, step: KernelStep, module: Module, arrays: Mapping[int, DeviceArray]) -> None:
        blocks = np.unique(np.array([0, step.grid[0] * step.grid[1] * step.grid[2] - 1], np.uint64))
        count = ffi.new("ocp_emu_count *")
        count.blocks, count.num_blocks = ffi.from_buffer("uint64_t[]", blocks), len(blocks)
        arguments: list[Any] = []
        for argument in step.arguments:
            if isinstance(argument, Number):
                arguments.append(SCALARS[argument.kind](argument.value))
            else:
                base = arrays[argument.region]
                view = DeviceArray(self.device, base.address + argument.offset, (1,), np.dtype(np.uint8))
                arguments.append(view)
        if step.shared_bytes:
            self.device.call("FuncSetAttribute", module.function(step.kernel.symbol), 8, step.shared_bytes)
        core().emu_count_launches(count)
        try:
            module.launch(step.kernel.symbol, step.grid, step.block, arguments, shared=step.shared_bytes)
            self.device.synchronize()
        finally:
            core().emu_count_launches(ffi.NULL)
            for view in arguments:
                if isinstance(view, DeviceArray):
                    view.address = 0  # the view does not own its memory


def compare_model(name: str, arch: str, known: set[KernelSpec]) -> Iterator[tuple[KernelSpec, Comparison]]:
    """Add a model's kernels to ``known``; yield each one that was not in it, with the comparison of its two forms."""
    model, shapes = suite()[name]()
    gpu = gpus.gpu(GPUS[arch])
    work = work_of_model(model, shapes, libraries=frozenset(), gpu=gpu)
    steps = {step.kernel: step for step in reversed(work.steps) if isinstance(step, KernelStep)}
    new = [spec for spec in steps if spec not in known]
    known.update(new)
    library = KernelLibrary(count=lambda name, by: None)
    images = [
        library.get_many(new, Target.emulated(check=True, ptx=capability))
        for capability in ((0, 0), gpu.compute_capability)
    ]
    blocks = Blocks(work)
    with checking():
        for spec, *pair in zip(new, *images, strict=True):
            forms = {name: blocks.device.load(image.data) for name, image in zip(("IR", "PTX"), pair, strict=True)}
            yield spec, blocks.compare(steps[spec], forms)
            for module in forms.values():
                module.unload()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=list(GPUS), default="sm_90")
    parser.add_argument("--models", help="names of models of bench/estimates.py; default: all")
    arguments = parser.parse_args()
    known: set[KernelSpec] = set()
    totals: Counter[str] = Counter()
    names = arguments.models.split(",") if arguments.models else list(suite())
    for name in names:
        start, before = time.perf_counter(), totals.total()
        for spec, found in compare_model(name, arguments.arch, known):
            wrong = found.difference > TOLERANCE or found.findings
            totals["wrong" if wrong else "close" if found.difference else "equal"] += 1
            if wrong:
                print(f"  {name}: {spec.symbol}: differs by {found.difference:.3g} {'; '.join(found.findings)}"[:400])
        print(f"{name}: {totals.total() - before} kernels, {time.perf_counter() - start:.0f} s", flush=True)
    print(
        f"{arguments.arch}: {len(names)} models, {totals.total()} kernels: {totals['equal']} equal bits,"
        f" {totals['close']} within {TOLERANCE:g}, {totals['wrong']} wrong"
    )
    return int(totals["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
