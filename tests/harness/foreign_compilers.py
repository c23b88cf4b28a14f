"""Compiles the kernels of tests/ptx/foreign to PTX with NVRTC and Triton; no GPU is needed.

``PYTHONPATH=tests/harness python -m foreign_compilers`` writes the folder's PTX files again, with the compilers that
are installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "ptx" / "foreign"
CUDA = {
    "kernels": (
        *("reverse_in_shared", "histogram", "sum_rows", "compact", "by_struct", "count_and_limits", "chain"),
        "integers",
    ),
    "headers": ("halves", "quantize", "special", "groups"),
    "cub": ("cub_sum", "cub_scan", "cub_sort"),
}
"""The kernels of each CUDA C++ source."""
TRITON = ("add", "softmax", "layer_norm", "matmul_fp16", "matmul_bf16", "matmul_fp32", "attention")
STORED = ("kernels", "softmax", "matmul_fp16")
"""CUDA C++ sources and Triton kernels whose PTX is stored in the folder."""


def cccl() -> Path | None:
    """Return the folder of CUB's headers, if the package nvidia-cuda-cccl is installed."""
    for entry in sys.path:
        for folder in Path(entry).glob("nvidia/*/**/cub"):
            if (folder / "block" / "block_reduce.cuh").is_file():
                return folder.parent
    return None


def nvrtc_ptx(source: str, arch: str = "80") -> str:
    """Compile one of the folder's CUDA C++ sources. Raises RuntimeError with NVRTC's log."""
    from cuda.bindings import nvrtc
    from cuda.pathfinder import find_nvidia_header_directory

    folders = [find_nvidia_header_directory("cudart"), *([str(folder)] if (folder := cccl()) else [])]
    options = [f"--gpu-architecture=compute_{arch}", "--std=c++17", "-default-device"]
    options += [f"--include-path={each}" for each in folders if each]
    text = (FOLDER / f"{source}.cu").read_bytes()
    _, program = nvrtc.nvrtcCreateProgram(text, f"{source}.cu".encode(), 0, [], [])
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log, size = ("PTX", nvrtc.nvrtcGetPTXSize) if failed == 0 else ("ProgramLog", nvrtc.nvrtcGetProgramLogSize)
    data = b" " * size(program)[1]
    getattr(nvrtc, f"nvrtcGet{log}")(program, data)
    nvrtc.nvrtcDestroyProgram(program)
    result: str = data.rstrip(b"\0 \n").decode() + "\n"
    if failed != 0:
        raise RuntimeError(result)
    return result


def triton_ptx(kernel: str, capability: int = 80) -> str:
    """Compile a kernel of the folder's Triton source for a compute capability; return its PTX."""
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    triton = importlib.import_module("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    spec = importlib.util.spec_from_file_location("triton_kernels", FOLDER / "triton_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    name, _, kind = kernel.partition("_") if kernel.startswith("matmul") else (kernel, "", "")
    columns = {"columns": "i32", "BLOCK": "constexpr"}
    blocks = dict.fromkeys("MNK", "constexpr")
    signatures = {
        "add": {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"},
        "softmax": {"x": "*fp32", "out": "*fp32", **columns},
        "layer_norm": {"x": "*fp16", "w": "*fp32", "b": "*fp32", "out": "*fp16", "eps": "fp32", **columns},
        "matmul": {"a": f"*{kind}", "b": f"*{kind}", "c": "*fp32", "m": "i32", "n": "i32", "k": "i32", **blocks},
        "attention": {
            **dict.fromkeys(("q", "k", "v", "out"), "*fp16"),
            "scale": "fp32",
            "length": "i32",
            "D": "constexpr",
            "M": "constexpr",
            "N": "constexpr",
        },
    }
    constants = {
        "softmax": {"BLOCK": 512},
        "matmul": {"M": 64, "N": 64, "K": 32},
        "attention": {"D": 64, "M": 64, "N": 32},
    }.get(name, {"BLOCK": 256})
    source = triton.compiler.ASTSource(fn=getattr(kernels, name), signature=signatures[name], constexprs=constants)
    options = {"num_warps": 4, "num_stages": 2 if name == "attention" else 3}
    return str(triton.compile(source, target=target, options=options).asm["ptx"])


def without_comments(ptx: str) -> str:
    """Return PTX without comments, debugging sections and blank lines."""
    text = re.sub(r"//[^\n]*|^\s*\.section[^{]*\{[^}]*\}|^\s*\.(?:file|loc)[^\n]*", "", ptx, flags=re.MULTILINE)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"


def main() -> None:
    for name in STORED:
        try:
            ptx = nvrtc_ptx(name) if name in CUDA else triton_ptx(name)
        except ImportError as error:
            print(f"{name}: not written: {error}")
            continue
        (FOLDER / f"{name}.ptx").write_text(without_comments(ptx))


if __name__ == "__main__":
    main()
