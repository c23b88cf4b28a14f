"""Times session creation from a compiled model, from its source with an empty kernel cache, and by the CPU provider.

    python bench/context_load.py [MODEL ...] [--processes N] [--pairs N] [--embed] [--json]

MODEL is a light model of the onnx wheel or ``encoder``; default: all. Each process creates pairs of sessions, one from
the compiled model and one on the CPU provider, in alternating order. ``first`` is the median over the processes' first
pairs, ``next`` the median over all other pairs. ``cold`` is one session from the source model in a fresh process with
an empty cache. Only the constructors are timed, not the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "harness"))

CHILD = """
import json, sys, time
import onnxruntime as ort, ort_cuda_plugin
task, source, compiled, pairs, turn = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
device = ort_cuda_plugin.register(emulate=True)[:1]
def options(**given):
    made = ort.SessionOptions()
    made.log_severity_level = 3
    made.add_provider_for_devices(device, given)
    return made
def seconds(make):
    begun = time.perf_counter()
    session = make()
    spent = time.perf_counter() - begun
    del session
    return spent
if task == "cold":
    print(json.dumps(seconds(lambda: ort.InferenceSession(source, options()))))
    ort.ModelCompiler(options(), source, embed_compiled_data_into_model=bool(pairs)).compile_to_file(compiled)
else:
    sides = [
        ("context", lambda: ort.InferenceSession(compiled, options(context_allow_host_code="1"))),
        ("cpu", lambda: ort.InferenceSession(source, providers=["CPUExecutionProvider"])),
    ]
    times = {"context": [], "cpu": []}
    for number in range(pairs):
        for name, make in sides[:: 1 if (number + turn) % 2 else -1]:
            times[name].append(seconds(make))
    counters = ort_cuda_plugin.counters()
    assert counters["kernels_compiled"] == counters["plan_variants_built"] == 0, counters
    print(json.dumps(times))
"""


def child(task: str, source: Path, compiled: Path, number: int, turn: int, cache: Path) -> Any:
    arguments = [sys.executable, "-c", CHILD, task, str(source), str(compiled), str(number), str(turn)]
    environment = os.environ | {"ORT_CUDA_PLUGIN_CACHE_DIR": str(cache)}
    done = subprocess.run(arguments, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def write_source(name: str, path: Path) -> None:
    import onnx

    from ort_cuda_plugin import models

    if name == "encoder":
        from encoder import encoder

        onnx.save(encoder(), path)
    else:
        onnx.save(models.with_noise_weights(onnx.load(models.wheel_models()[name])), path)


def measure(name: str, processes: int, pairs: int, embed: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        source, compiled, cache = folder / "m.onnx", folder / "m_ctx.onnx", folder / "cache"
        write_source(name, source)
        cold = child("cold", source, compiled, int(embed), 0, cache)
        contents = sum(path.stat().st_size for path in folder.glob("m_*"))
        rounds = [child("pairs", source, compiled, pairs, turn, cache) for turn in range(processes)]
        found: dict[str, Any] = {"model": name, "source_mb": source.stat().st_size / 1e6, "context_mb": contents / 1e6}
    found["cold_s"] = cold
    for which, part in (("first", slice(0, 1)), ("next", slice(1, None))):
        for side in ("context", "cpu"):
            found[f"{which}_{side}_s"] = statistics.median(x for times in rounds for x in times[side][part])
        found[f"{which}_to_cpu"] = found[f"{which}_context_s"] / found[f"{which}_cpu_s"]
    found["cold_to_first"] = cold / found["first_context_s"]
    return found


def main() -> None:
    from ort_cuda_plugin import models

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*sorted(models.wheel_models()), "encoder"])
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument(
        "--pairs",
        type=int,
        default=4,
        help="measured pairs of sessions (of the compiled model, and on the CPU provider) in each process; at least 2",
    )
    parser.add_argument(
        "--embed", action="store_true", help="store everything in the compiled model, without a separate context file"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.models:
        found = measure(name, arguments.processes, arguments.pairs, arguments.embed)
        if arguments.json:
            print(json.dumps(found), flush=True)
            continue
        print(
            f"{name:20} {found['source_mb']:6.1f} -> {found['context_mb']:6.1f} MB   cold {found['cold_s']:7.3f} s   "
            f"first {found['first_context_s']:.3f} s, {found['first_to_cpu']:.2f} of the CPU provider's   "
            f"next {found['next_context_s']:.3f} s, {found['next_to_cpu']:.2f}   "
            f"compiling takes {found['cold_to_first']:.0f} x",
            flush=True,
        )


if __name__ == "__main__":
    main()
