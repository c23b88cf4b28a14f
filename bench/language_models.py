"""Tokens per second of a Llama-like decoder with 4-bit weights, and the launches and bytes of a token.

    python bench/language_models.py [--device emulated|cuda] [--layers N] [--hidden N] [--heads N] [--kv-heads N]
                                    [--vocabulary N] [--prompt N] [--tokens N] [--batch N] [--json]

The model is that of tests/harness/genai_decoder.py, with random weights. Sampling is part of its graph, past and
present K/V caches share a buffer, and the mask has full width, as in `ort_cuda_plugin.generate`. The CPU provider, and
CUDAExecutionProvider if ONNX Runtime has it, run the same model in the same loop. *prefill* and *decode* are tokens per
second: of CPU time on the emulated device, so that other load matters little, and of wall time on a GPU. *launches*,
*graphs* (replays), *copies back* (device to host) and *Python* (calls from C) are counts for one decoded token.

*bytes* is the memory traffic of a token's launches. *compulsory* is its minimum: weights and a cache of full length are
read once each. Both figures are the same for a GPU and for the emulated device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "harness")]

import ort_cuda_plugin  # noqa: E402
from genai_decoder import compulsory_bytes, genai_decoder  # noqa: E402
from ort_cuda_plugin.ep.provider import last_provider  # noqa: E402
from ort_cuda_plugin.generate import Decoder  # noqa: E402
from ort_cuda_plugin.model import token_choice as choice  # noqa: E402

clock = time.process_time
WARM = 8
"""Tokens before the counted ones: the fourth token makes the CUDA graph."""


class OtherLoop:
    """The decoding loop of `Decoder` on another provider of ONNX Runtime, with memory of the CPU or of a GPU."""

    def __init__(self, model: Path, provider: str, place: str, batch: int, longest: int) -> None:
        whole = choice.with_token(model.read_bytes(), 0)
        self.session = ort.InferenceSession(whole, providers=[provider])
        self.place, self.batch, self.longest = place, batch, longest
        self.cache = {
            x.name: self.value(np.zeros((batch, x.shape[1], longest, x.shape[3]), np.float32))
            for x in self.session.get_inputs()
            if x.name.startswith("past")
        }

    def value(self, array: np.ndarray[Any, Any]) -> Any:
        return ort.OrtValue.ortvalue_from_numpy(array, self.place, 0)

    def seconds(self, prompt: np.ndarray[Any, Any], tokens: int) -> tuple[float, float]:
        """Return the seconds of prefill, and of decoding ``tokens`` tokens after the first `WARM` ones."""
        token = self.value(np.zeros((self.batch, 1), np.int64))
        count = prompt.shape[1]
        begun = clock()
        first = self.bound(self.value(prompt), self.value(np.ones_like(prompt)), token)
        self.session.run_with_iobinding(first)
        token.numpy()
        prefill = clock() - begun
        passed = 0.0
        for number in range(WARM + tokens):
            mask = (np.arange(self.longest) <= count + number).astype(np.int64)
            bound = self.bound(token, self.value(np.tile(mask, (self.batch, 1))), token)
            begun = clock()
            self.session.run_with_iobinding(bound)
            token.numpy()
            passed += clock() - begun if number >= WARM else 0.0
        return prefill, passed

    def bound(self, ids: Any, mask: Any, token: Any) -> Any:
        bound = self.session.io_binding()
        bound.bind_ortvalue_input(choice.IDS, ids)
        bound.bind_ortvalue_input(choice.ATTENTION, mask)
        bound.bind_ortvalue_output(choice.TOKEN, token)
        for name, value in self.cache.items():
            bound.bind_ortvalue_input(name, value)
            bound.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        return bound


def plugin(path: Path, model: onnx.ModelProto, prompt: np.ndarray[Any, Any], arguments: Any) -> dict[str, float]:
    """Return the figures of ort_cuda_plugin."""
    longest = prompt.shape[1] + WARM + arguments.tokens + 1
    emulate = arguments.device == "emulated"
    decoder = Decoder(path, max_length=longest, batch=arguments.batch, emulate=emulate)
    next(decoder.generate(prompt[:, :1], new_tokens=1))  # builds the plan for one token
    provider = last_provider()
    assert provider is not None
    moved = sum(fused.traffic.asked.total for fused in provider.fused_nodes if fused.traffic)
    for _ in range(2):  # the first pass compiles kernels; the second is timed
        decoder.rewind(0)
        begun = clock()
        tokens = decoder.generate(prompt, new_tokens=1 + WARM + arguments.tokens)
        next(tokens)
        prefill = clock() - begun
        for _ in range(WARM):
            next(tokens)
        before, begun = ort_cuda_plugin.counters(), clock()
        for _ in tokens:
            pass
        decode = clock() - begun
        after = ort_cuda_plugin.counters()
    each = {name: (after[name] - before[name]) / arguments.tokens for name in after}
    least = compulsory_bytes(model, longest, arguments.batch)
    return rates(prefill, decode, arguments) | {
        "launches": each["launches"] + each["library_calls"],
        "graphs": each["graph_replays"],
        "copies back": each["copies_d2h"],
        "Python": each["python_calls"],
        "bytes": moved,
        "compulsory": least,
        "ratio": moved / least,
    }


def rates(prefill: float, decode: float, arguments: Any) -> dict[str, float]:
    many = arguments.batch * arguments.prompt
    return {"prefill": many / prefill, "decode": arguments.batch * arguments.tokens / decode}


def other(path: Path, provider: str, prompt: np.ndarray[Any, Any], arguments: Any) -> dict[str, float]:
    """Return the figures of another provider of ONNX Runtime."""
    place = "cuda" if provider == "CUDAExecutionProvider" else "cpu"
    longest = prompt.shape[1] + WARM + arguments.tokens + 1
    loop = OtherLoop(path, provider, place, arguments.batch, longest)
    loop.seconds(prompt, 1)
    return rates(*loop.seconds(prompt, arguments.tokens), arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["emulated", "cuda"], default="emulated")
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "kv-heads": 2, "vocabulary": 2048}
    for name, default in (sizes | {"prompt": 64, "tokens": 32, "batch": 1}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        global clock
        clock = time.perf_counter
    given = [getattr(arguments, name.replace("-", "_")) for name in sizes]
    prompt = np.random.default_rng(0).integers(0, arguments.vocabulary, (arguments.batch, arguments.prompt))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        model = genai_decoder(*given, longest=arguments.prompt + arguments.tokens + 2 * WARM)
        onnx.save(model, path)
        figures = {"plugin": plugin(path, model, prompt, arguments)}
        for provider in ("CPUExecutionProvider", "CUDAExecutionProvider"):
            if provider in ort.get_available_providers():
                figures[provider] = other(path, provider, prompt, arguments)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, row in figures.items():
        print(f"{name:22}" + "".join(f"  {column} {value:,.4g}" for column, value in row.items()))


if __name__ == "__main__":
    main()
