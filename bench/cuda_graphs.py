"""Host time of a steady Run with and without automatic CUDA graphs.

    python bench/cuda_graphs.py [--model encoder|light_resnet50] [--batches N] [--device emulated|cuda] [--json]

Two sessions of one process, with and without graphs, alternate; inputs and outputs are bound on the device. Measured is
the CPU time of the calling thread until run_with_iobinding returns, with disable_synchronize_execution_providers=1, so
that the wait for the device is not included. The emulated device has adversarial streams, which defer work until the
program waits, so the time does not include kernels. Its driver calls take other times than NVIDIA's, but their number
is the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "harness"))

RUNS_PER_BATCH = 6


def source_of(name: str) -> tuple[bytes, dict[str, Any], str]:
    """Return the model, its feeds, and its output's name."""
    import onnx

    from ort_cuda_plugin import models

    if name == "encoder":
        from encoder import encoder, encoder_inputs

        return encoder().SerializeToString(), encoder_inputs(1, 16), "last_hidden_state"
    model, output = models.before_softmax(onnx.load(models.wheel_models()[name]))
    model = models.with_noise_weights(model)
    return model.SerializeToString(), models.random_inputs(model), output


class Bound:
    """A session with inputs and outputs bound on the device."""

    def __init__(self, model: bytes, feeds: dict[str, Any], output: str, emulate: bool, graphs: bool) -> None:
        import onnxruntime as ort

        import ort_cuda_plugin
        from ort_cuda_plugin.benchmark.sides import plugin_place

        options = {"automatic_cuda_graphs": str(int(graphs))}
        self.session = ort_cuda_plugin.session(model, emulate=emulate, provider_options=options)
        place = plugin_place(emulate)
        self.values = {name: ort.OrtValue.ortvalue_from_numpy(array, *place) for name, array in feeds.items()}
        self.binding = self.session.io_binding()
        for name, value in self.values.items():
            self.binding.bind_ortvalue_input(name, value)
        array = self.session.run([output], feeds)[0]
        self.result = ort.OrtValue.ortvalue_from_numpy(array, *place)
        self.binding.bind_ortvalue_output(output, self.result)
        self.options = ort.RunOptions()
        self.options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def batch(self) -> list[float]:
        """Return the host's microseconds of `RUNS_PER_BATCH` Runs, after an untimed Run that warms the CPU's caches."""
        times = [time.thread_time_ns()]
        for _ in range(RUNS_PER_BATCH + 1):
            self.session.run_with_iobinding(self.binding, self.options)
            times.append(time.thread_time_ns())
        self.binding.synchronize_outputs()
        return [(end - start) / 1000 for start, end in itertools.pairwise(times[1:])]


def measure(name: str, batches: int, emulate: bool) -> dict[str, Any]:
    import numpy as np

    import ort_cuda_plugin

    model, feeds, output = source_of(name)
    bounds = {graphs: Bound(model, feeds, output, emulate, graphs) for graphs in (False, True)}
    times: dict[bool, list[float]] = {False: [], True: []}
    for bound in bounds.values():
        bound.batch()
    before = ort_cuda_plugin.counters()
    for _ in range(batches):
        for graphs, bound in bounds.items():
            times[graphs] += bound.batch()
    after = ort_cuda_plugin.counters()
    np.testing.assert_array_equal(bounds[False].result.numpy(), bounds[True].result.numpy())
    runs = batches * (RUNS_PER_BATCH + 1)
    assert after["graph_replays"] - before["graph_replays"] == runs
    without, with_graphs = statistics.median(times[False]), statistics.median(times[True])
    return {
        "model": name,
        "kernels": (after["launches"] - before["launches"]) // (2 * runs),
        "microseconds_without_graphs": round(without, 1),
        "microseconds_with_graphs": round(with_graphs, 1),
        "ratio": round(with_graphs / without, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append")
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--device", choices=("emulated", "cuda"), default="emulated")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    emulate = arguments.device == "emulated"
    if emulate:
        os.environ["ORT_CUDA_PLUGIN_EMULATE_STREAMS"] = "adversarial"
    rows = [measure(name, arguments.batches, emulate) for name in arguments.model or ("encoder", "light_resnet50")]
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"{'model':18}{'kernels':>9}{'one by one':>14}{'graph':>14}{'ratio':>8}")
    for row in rows:
        print(
            f"{row['model']:18}{row['kernels']:>9}{row['microseconds_without_graphs']:>11} us"
            f"{row['microseconds_with_graphs']:>11} us{row['ratio']:>8}"
        )


if __name__ == "__main__":
    main()
