"""Fuzzer of damaged compiled models: each must load and give right results, or be refused with a helpful error.

``python tests/harness/context_campaign.py`` flips bits of contexts, cuts and extends them, in context files and in
models that embed them. It does so 10,000 times, in child processes, and prints a count of each outcome. ``--count`` and
``--processes`` change the defaults. To repeat a part of a campaign in this process, give the number of its first damage
as ``--first``, its ``--count``, and ``--processes 0``.

The third kind of damage, ``plan``, changes a plan and then recomputes the context's hash. Such contexts are loaded but
not run: the parameters of kernels are not checked, and a kernel can write to any device memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime as ort  # noqa: E402
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidGraph  # noqa: E402

from contexts import BINARY, compile_model, load, two_clusters  # noqa: E402
from ort_cuda_plugin.context.describe import describe  # noqa: E402
from ort_cuda_plugin.context.storage.container import Builder, Container  # noqa: E402
from ort_cuda_plugin.context.storage.errors import ContextError  # noqa: E402

COUNT = 10_000
PART = 250
"""Number of damaged contexts that one process loads."""
HANG_SECONDS = 600
PLACES = ("file", "model", "plan")


def flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 1, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def flip_head(data: bytearray, rng: random.Random) -> None:
    """Flip a bit of the 72-byte header, which `flip` rarely hits."""
    data[rng.randrange(72)] ^= 1 << rng.randrange(8)


def erase(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice([1, 8, 64, 4096]))
    data[start:end] = bytes([rng.choice([0, 255])]) * (end - start)


def cut(data: bytearray, rng: random.Random) -> None:
    """Cut off the end, or remove a few bytes in the middle."""
    start = rng.choice([rng.randrange(len(data)), rng.randrange(200), len(data) - 1])
    del data[start : rng.choice([len(data), start + rng.choice([1, 8, 64])])]


def grow(data: bytearray, rng: random.Random) -> None:
    position = rng.choice([len(data), rng.randrange(len(data))])
    data[position:position] = rng.randbytes(rng.choice([1, 8, 64, 4096]))


DAMAGES: Mapping[str, Callable[[bytearray, random.Random], None]] = {
    function.__name__: function for function in (flip, flip_head, erase, cut, grow)
}


class Campaign:
    """Damages and loads the contexts of one model; ``folder`` is for its files."""

    def __init__(self, folder: Path) -> None:
        source = two_clusters()
        self.path = folder / "m_ctx.onnx"
        self.binary = folder / BINARY.format("m")
        compile_model(source, self.path)
        self.data = self.binary.read_bytes()
        self.embedded = compile_model(source, folder / "e_ctx.onnx", embed=True)
        cpu = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
        rng = np.random.default_rng(0)
        self.feeds = [{"x": rng.standard_normal((*shape, 16), dtype=np.float32)} for shape in ((2, 3), (1, 1))]
        self.expected = [cpu.run(None, feed)[0] for feed in self.feeds]

    def damage(self, seed: int) -> tuple[str, str]:
        """Damage the context by the seed; return the kind of damage, and whether it was ``refused`` or ``right``."""
        rng = random.Random(seed)
        place = rng.choices(PLACES, [5, 5, 1])[0]
        damage = rng.choice(list(DAMAGES))
        if place == "model":
            model = onnx.ModelProto()
            model.CopyFrom(self.embedded)
            nodes = [node for node in model.graph.node if node.op_type == "EPContext"]
            attribute = next(each for each in rng.choice(nodes).attribute if each.name == "ep_cache_context")
            data = bytearray(attribute.s)
            DAMAGES[damage](data, rng)
            attribute.s = bytes(data)
            outcome = self._load(model.SerializeToString(), runs=True)
        elif place == "file":
            data = bytearray(self.data)
            DAMAGES[damage](data, rng)
            self.binary.write_bytes(data)
            outcome = self._load(self.path, runs=True)
        else:
            data = bytearray(self._with_damaged_plan(damage, rng))
            self.binary.write_bytes(data)
            outcome = self._load(self.path, runs=False)
        with contextlib.suppress(ContextError):
            describe(Container(bytes(data), "it"))
        return f"{place} {damage}", outcome

    def _with_damaged_plan(self, damage: str, rng: random.Random) -> bytes:
        whole = Container(self.data, "it")
        plans = [n for row in whole.index["partitions"] for target in row["targets"] for n in target["plans"]]
        chosen = rng.choice(plans)
        builder = Builder()
        for number in range(len(whole.index["arrays"])):
            data = bytearray(whole.array(number))
            if number == chosen:
                DAMAGES[damage](data, rng)
            if builder.add(bytes(data)) != number:
                raise AssertionError("two arrays of a context became equal")
        return builder.to_bytes({key: value for key, value in whole.index.items() if key != "arrays"})

    def _load(self, model: Path | bytes, runs: bool) -> str:
        try:
            session = load(model, severity=4)
        except InvalidGraph as error:
            message = str(error)
            assert ".py:" not in message, message  # a source line in the message would mean a bug of the plugin
            assert re.search(r"[Cc]ompile the model again", message), message
            return "refused"
        for feed, expected in zip(self.feeds, self.expected, strict=True):
            if runs:
                np.testing.assert_allclose(session.run(None, feed)[0], expected, rtol=1e-5, atol=1e-5)
        return "right"


def run(first: int, count: int) -> Counter[str]:
    """Damage and load contexts with these seeds in this process; count the outcomes. Raises AssertionError."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder))
        for seed in range(first, first + count):
            try:
                found[" ".join(campaign.damage(seed))] += 1
            except Exception as error:
                raise AssertionError(f"damage {seed}: {error}") from error
    return found


def part(first: int, count: int) -> tuple[Counter[str], str]:
    """Call `run` for a range of seeds in a separate process; return the counts, and the text of a failure or ""."""
    command = [sys.executable, __file__, "--first", str(first), "--count", str(count), "--processes", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    except subprocess.TimeoutExpired:
        return Counter(), f"damages from {first} on take more than {HANG_SECONDS} s"
    if done.returncode or "Sanitizer" in done.stderr or "runtime error" in done.stderr:
        return Counter(), f"damages from {first} on: exit {done.returncode}\n{done.stderr[-8000:]}"
    return Counter(json.loads(done.stdout)), ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--first", "--seed", type=int, default=0, help="number of the first damage")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="0: all in this one")
    arguments = parser.parse_args()
    if not arguments.processes:
        print(json.dumps(run(arguments.first, arguments.count)))
        return 0
    total: Counter[str] = Counter()
    failures = []
    starts = range(arguments.first, arguments.first + arguments.count, PART)
    counts = [min(PART, arguments.first + arguments.count - start) for start in starts]
    with ThreadPoolExecutor(arguments.processes) as pool:
        for found, failure in pool.map(part, starts, counts):
            total += found
            failures += [failure] * bool(failure)
    for name, count in sorted(total.items()):
        print(f"{name:20} {count}")
    print(f"{total.total()} of {arguments.count}, {len(failures)} processes failed")
    print("\n".join(failures))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
