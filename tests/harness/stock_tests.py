"""Runs test files of ONNX Runtime's own sources on the plugin.

    python tests/harness/stock_tests.py FOLDER [FILE...] [--only EXPRESSION] [--seconds N] [--log FOLDER]

FOLDER is onnxruntime/test/python of ONNX Runtime's sources; the files are by default those for the operators of
language models. They need torch, einops, parameterized, onnx==1.18.0 (newer versions write models that ONNX Runtime
does not read) and onnx_ir, which PYTHONPATH may contain. A copy of each file runs in a process of its own, started by
`ort-cuda-plugin exec`. In it this module is a plugin of pytest, which gives the plugin to sessions that a test creates
for the CPU provider. A line for each file has the number of passed tests, and the number of the plugin's Runs; if there
was no Run, the file has tested nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EDITS: dict[str, list[tuple[str, str]]] = {
    # Binds the buffer that past and present K/V caches share on the device.
    "test_gqa_cpu.py": [
        (r'(numpy\(\), )"cpu"(, 0\))', r'\1"cuda"\2'),
        (r'("past_(?:key|value)",\s+)"cpu"', r'\1"cuda"'),
    ],
    # Removes an attribute that released versions of QMoE lack. With it, ONNX Runtime would refuse the models, and
    # these tests accept a refusal silently.
    "test_qmoe_cpu.py": [(r"\n *swiglu_interleaved=1 if swiglu_interleaved else 0,.*", "")],
    # ONNX Runtime 1.22 renamed the module and its class.
    "test_op_matmul_4bits.py": [
        (r"import matmul_4bits_quantizer", "import matmul_nbits_quantizer as matmul_4bits_quantizer"),
        (r"MatMul4BitsQuantizer", "MatMulNBitsQuantizer"),
    ],
}
"""Edits by file name: regular expressions and their replacements."""

ON_A_GPU = [(r"([\"'])cuda(?::0)?\1", '"cpu"'), (r"\.cuda\(\)", ".cpu()")]
"""Edits of files for CUDAExecutionProvider: torch computes references, and keeps bound tensors, on the CPU."""

SAYS_GPU = "STOCK_TESTS_ON_A_GPU"
"""Environment variable: torch pretends that there is a GPU. Without it tests and quantizers do not try to use one."""

FILES = (
    "transformers/test_gqa_cpu.py",
    "transformers/test_mha.py",
    "transformers/test_sparse_attention.py",
    "transformers/test_moe_cpu.py",
    "transformers/test_moe_cuda.py",
    "transformers/test_qmoe_cpu.py",
    "transformers/test_parity_moe.py",
    "transformers/test_parity_rotary_embedding.py",
    "transformers/test_parity_t5_mha.py",
    "transformers/test_onnx_attention.py",
    "transformers/test_paged_attention_cuda.py",
    "quantization/test_op_attention.py",
    "quantization/test_op_embed_layernorm.py",
    "quantization/test_op_matmul_2bits.py",
    "quantization/test_op_matmul_4bits.py",
    "quantization/test_op_matmul_8bits.py",
    "quantization/test_op_matmul_bnb4.py",
)


def is_for_a_gpu(text: str) -> bool:
    return 'device="cuda"' in text or '"cuda:0"' in text


def edited(name: str, text: str) -> str:
    needed = EDITS.get(name, []) + (ON_A_GPU if is_for_a_gpu(text) else [])
    for pattern, replacement in needed:
        text = re.sub(pattern, replacement, text)
    return text


def copied(folder: Path, target: Path) -> None:
    """Copy all Python files below ``folder`` to ``target``, with edits."""
    for path in folder.rglob("*.py"):
        place = target / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(edited(path.name, path.read_text()))


def pytest_configure(config: Any) -> None:
    """Replace ``InferenceSession``, and functions of torch, before pytest imports a test file."""
    ort: Any = importlib.import_module("onnxruntime")

    class Session(ort.InferenceSession):  # type: ignore[misc]
        def __init__(self, *arguments: Any, providers: Sequence[Any] | None = None, **named: Any) -> None:
            if providers is not None and list(providers) == ["CPUExecutionProvider"]:
                providers = ["CUDAExecutionProvider"]
            super().__init__(*arguments, providers=providers, **named)

    ort.InferenceSession = Session
    if SAYS_GPU not in os.environ:
        return
    torch: Any = importlib.import_module("torch")
    torch.cuda.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda: True
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counters = importlib.import_module("ort_cuda_plugin").counters()
    terminalreporter.write_line(f"the plugin ran {counters['runs']} times")


def outcome(output: str, seconds: int, code: int | None) -> str:
    """Return pytest's summary and the number of Runs as a line, and up to five errors of failed tests."""
    if code is None:
        return f"not done after {seconds} s"
    runs = re.findall(r"^the plugin ran (\d+) times", output, flags=re.M)
    summary = re.findall(r"^(?:=+ )?(.*(?:passed|failed|skipped|error|no tests ran).* in [\d.]+s)", output, flags=re.M)
    reasons = dict.fromkeys(line[4:160] for line in re.findall(r"^E   +\w*(?:Error|Exception|Fail)\b.*", output, re.M))
    lines = [f"{summary[-1] if summary else f'no summary, exit status {code}'}; {runs[-1] if runs else 0} Runs"]
    return "\n    ".join(lines + list(reasons)[:5])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--only", default="", help="pytest's -k")
    parser.add_argument("--seconds", type=int, default=900, help="for each file")
    parser.add_argument("--log", type=Path, help="a folder that gets the whole output of each file")
    arguments = parser.parse_args()
    here = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}
    with tempfile.TemporaryDirectory() as temporary:
        copied(arguments.folder, Path(temporary))
        for name in arguments.files or FILES:
            file = Path(temporary, name)
            if not file.exists():
                print(f"{name}: there is none", flush=True)
                continue
            says = {SAYS_GPU: "1"} if is_for_a_gpu((arguments.folder / name).read_text()) else {}
            command = [sys.executable, "-m", "ort_cuda_plugin", "exec", "--", sys.executable, "-m", "pytest", "-q"]
            command += ["--no-header", "-p", "no:cacheprovider", "-p", "stock_tests", file.name]
            command += ["-k", arguments.only] if arguments.only else []
            try:
                done = subprocess.run(
                    command, cwd=file.parent, env=environment | says, capture_output=True, text=True,
                    timeout=arguments.seconds, check=False,
                )  # fmt: skip
                output, code = done.stdout + done.stderr, done.returncode
            except subprocess.TimeoutExpired as late:
                output, code = str(late.stdout), None
            if arguments.log:
                arguments.log.mkdir(parents=True, exist_ok=True)
                (arguments.log / f"{file.stem}.log").write_text(output)
            print(f"{name}: {outcome(output, arguments.seconds, code)}", flush=True)


if __name__ == "__main__":
    main()
