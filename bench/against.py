"""Compares the speed of two installations: steady Runs, session creation with the first Run, and numbers of compiled
kernels.

    python bench/against.py OTHER_PYTHON [MODEL ...] [--runs N] [--sessions N] [--device emulated|cuda] [--json]

OTHER_PYTHON is the interpreter of an environment with another version of ort-cuda-plugin. Each installation loads the
model in a process of its own, and the two processes alternate, one Run each. Both begin with an empty kernel cache, so
*kernels* counts all kernels of the model. Later sessions of a process find these kernels in the cache, so *session* is
the time of the claim, the plan and one Run. Models are the onnx wheel's light models, ``encoder``, ``decoder``, and
``nodes1000``, an encoder of 14 narrow layers with about 1,000 nodes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "harness"))

OWN_MODELS = ["encoder", "decoder", "nodes1000"]
WORKER = """
import sys, time
import numpy as np
import onnxruntime as ort, ort_cuda_plugin
model, feeds, output, emulate = sys.argv[1], dict(np.load(sys.argv[2])), sys.argv[3], sys.argv[4] == "emulated"
options = {"provider_options": {"automatic_cuda_graphs": 0}}
created = []
def create():
    begun = time.perf_counter()
    created.append(ort_cuda_plugin.session(model, emulate=emulate, **options))
    created[-1].run([output], feeds)
    passed = time.perf_counter() - begun
    del created[1:]
    return passed
def run():
    begun = time.perf_counter()
    created[0].run([output], feeds)
    return time.perf_counter() - begun
create()
print(ort_cuda_plugin.counters()["kernels_compiled"], flush=True)
for line in sys.stdin:
    print({"run": run, "create": create}[line.strip()](), flush=True)
"""


class Side:
    """A process with one installation's session of a model."""

    def __init__(self, python: str, model: Path, feeds: Path, output: str, device: str, cache: Path) -> None:
        environment = os.environ | {"ORT_CUDA_PLUGIN_CACHE_DIR": str(cache)}
        self.process = subprocess.Popen(
            [python, "-I", "-c", WORKER, str(model), str(feeds), output, device],
            env=environment,
            cwd=cache.parent,  # Older versions import modules from the working folder.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.kernels = int(self._answer())

    def seconds(self, command: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args!r} ended with {self.process.wait()}")
        return line

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def source_of(name: str) -> tuple[bytes, dict[str, Any], str]:
    """Return the model, its feeds, and its output's name."""
    import onnx

    from ort_cuda_plugin import models

    if name == "decoder":
        from decoder import decoder, decoder_inputs

        step = decoder(6, 384, 6)
        return step.SerializeToString(), decoder_inputs(step, 1, 1, 64), "last_hidden_state"
    if name in OWN_MODELS:
        from encoder import encoder, encoder_inputs

        model = encoder() if name == "encoder" else encoder(14, hidden=48, heads=4)
        return model.SerializeToString(), encoder_inputs(1, 64), "last_hidden_state"
    model, output = models.before_softmax(onnx.load(models.wheel_models()[name]))
    model = models.with_noise_weights(model)
    return model.SerializeToString(), models.random_inputs(model), output


def measure(name: str, pythons: tuple[str, str], device: str, runs: int, sessions: int) -> dict[str, Any]:
    """Return the figures of a model for this installation and for the other one."""
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        source, feeds, output = source_of(name)
        model, feeds_path = Path(folder, "model.onnx"), Path(folder, "feeds.npz")
        model.write_bytes(source)
        np.savez(feeds_path, allow_pickle=False, **feeds)
        sides = [
            Side(python, model, feeds_path, output, device, Path(folder, f"cache{number}"))
            for number, python in enumerate(pythons)
        ]
        figures = {}
        for command, count in (("run", runs), ("create", sessions)):
            passed: list[list[float]] = [[], []]
            for _ in range(count):
                for side, times in zip(sides, passed, strict=True):
                    times.append(side.seconds(command))
            figures[command] = [statistics.median(times) * 1e3 for times in passed]
        for side in sides:
            side.close()
    return {
        "model": name,
        "run_ms": figures["run"],
        "session_ms": figures["create"],
        "kernels": [side.kernels for side in sides],
    }


def main() -> None:
    from ort_cuda_plugin import models

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other_python")
    parser.add_argument("models", nargs="*", default=[*sorted(models.wheel_models()), *OWN_MODELS])
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--sessions", type=int, default=5)
    parser.add_argument("--device", choices=["emulated", "cuda"], default="emulated")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.json:
        print(f"{'':20}{'run ms':>10}{'other':>10}{'ratio':>7}{'session ms':>12}{'other':>10}{'ratio':>7}", end="")
        print(f"{'kernels':>9}{'other':>7}")
    logs = []
    for name in arguments.models:
        pythons = sys.executable, arguments.other_python
        line = measure(name, pythons, arguments.device, arguments.runs, arguments.sessions)
        if arguments.json:
            print(json.dumps(line), flush=True)
            continue
        (run, other_run), (session, other_session), (kernels, other_kernels) = (
            line[key] for key in ("run_ms", "session_ms", "kernels")
        )
        logs.append(math.log(other_run / run))
        print(f"{name:20}{run:10.2f}{other_run:10.2f}{other_run / run:7.2f}", end="")
        print(f"{session:12.1f}{other_session:10.1f}{other_session / session:7.2f}", end="")
        print(f"{kernels:9}{other_kernels:7}", flush=True)
    if logs:
        print(f"{'geometric mean':20}{'':20}{math.exp(statistics.mean(logs)):7.2f}")


if __name__ == "__main__":
    main()
