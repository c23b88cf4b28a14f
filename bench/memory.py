"""Memory of the onnx wheel's light models on one device, and the cost of an allocation.

    python bench/memory.py [MODEL ...] [--device emulated|cuda]

For each model, in a process of its own, in MiB: the weights on the device; the slab that the plan of the intermediate
tensors takes; the largest set of intermediate tensors that are alive at once, below which no plan can go; inputs and
outputs; and the most bytes that were in use and that the arena held from the driver, in a Run. Automatic CUDA graphs
are off, since they keep slabs. Then the time of an allocation that a cached chunk serves and its free
(bench/allocation_time.c).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from build_plugin import Builder  # noqa: E402

MIB = 1 << 20
COLUMNS = ["weights", "planned", "alive at once", "in and out", "peak in use", "peak held"]


def measure(name: str, emulated: bool) -> dict[str, float]:
    """MiB by column, of one Run in this process."""
    import onnx

    import ort_cuda_plugin
    from ort_cuda_plugin import models
    from ort_cuda_plugin.ep import boundary

    model = models.with_noise_weights(onnx.load(models.wheel_models()[name]))
    feeds = models.random_inputs(model)
    # Regions as large as what is asked for: what the arena holds is then what it needs.
    options = {"arena.extend_strategy": 1, "automatic_cuda_graphs": 0}
    session = ort_cuda_plugin.session(model.SerializeToString(), emulate=emulated, provider_options=options)
    outputs = session.run(None, feeds)
    (provider,) = boundary.PROVIDERS.values()
    plans = [fused.plan_memory() for fused in provider.fused_nodes]
    stats = ort_cuda_plugin.memory_stats(provider.device.info)["device"]
    values = [
        stats["Weights"],
        sum(planned for planned, _ in plans),
        sum(alive for _, alive in plans),
        sum(array.nbytes for array in [*feeds.values(), *outputs]),
        stats["MaxInUse"],
        stats["TotalAllocated"],
    ]
    return {column: value / MIB for column, value in zip(COLUMNS, values, strict=True)}


def main() -> None:
    from ort_cuda_plugin import models

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=sorted(models.wheel_models()))
    parser.add_argument("--device", choices=["emulated", "cuda"], default="emulated")
    parser.add_argument("--one", action="store_true", help="print one model's figures as JSON, from this process")
    arguments = parser.parse_args()
    emulated = arguments.device == "emulated"
    if arguments.one:
        print(json.dumps(measure(arguments.models[0], emulated)))
        return
    print(f"{'MiB':24}" + "".join(f"{column:>15}" for column in COLUMNS), flush=True)
    for name in arguments.models:
        command = [sys.executable, __file__, name, "--device", arguments.device, "--one"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        figures = json.loads(done.stdout.splitlines()[-1])
        print(f"{name:24}" + "".join(f"{figures[column]:15.2f}" for column in COLUMNS), flush=True)
    work = ROOT / "build" / "bench"
    program = Builder(work, work, []).program("allocation_time", [ROOT / "bench" / "allocation_time.c"])
    subprocess.run([program] if emulated else [program, "cuda"], check=True)


if __name__ == "__main__":
    main()
