"""CPU seconds of a cold session, which is creation and first Run with an empty kernel cache, by stage of the compiler.

    python bench/compile_time.py [MODEL ...] [--stages] [--json]

Models are networks that the package builds, and the onnx wheel's light models. Each has a process of its own, which
runs on the emulated device; its worker processes count. With ``--stages`` there are no workers, and the compiler's
share is divided into its stages. CPU seconds depend on what else the machine does: compare figures of one run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

LIGHT_MODELS = ("light_densenet121", "light_shufflenet", "light_squeezenet")
LENGTHS = {"sequence": 24, "past": 8}
"""Sizes of symbolic dimensions, in elements. They are short, because the first Run is measured as well."""
STAGES = {"import": "import", "kernel_ir": "Numba", "emulated_ir": "host IR", "optimized_module": "LLVM"}
"""Functions of the compiler, and the names of their columns; the rest of a compilation is code generation."""
WHOLE_KERNEL = "compile_kernel"


def write_model(name: str, path: Path) -> None:
    """Write the model with this name to ``path``, with its weights beside it if they are large."""
    import onnx

    from ort_cuda_plugin import models, networks

    if name in LIGHT_MODELS:
        model = models.with_noise_weights(onnx.load(models.wheel_models()[name]))
    else:
        model = networks.build(name)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")


def measure(path: str, stages: bool) -> dict[str, float]:
    """Return the CPU seconds of a cold session of the model at ``path``, by stage, measured in this process."""
    import onnx

    import ort_cuda_plugin
    from ort_cuda_plugin import models
    from ort_cuda_plugin.compiler.library import kernel_library

    spent: defaultdict[str, float] = defaultdict(float)
    model = onnx.load(path, load_external_data=False)
    lengths = LENGTHS | ({"past": 0} if "prefill" in path else {})
    shapes = {
        each.name: [size.dim_value or lengths.get(size.dim_param, 1) for size in each.type.tensor_type.shape.dim]
        for each in model.graph.input
    }
    feeds = models.random_inputs(models.with_input_shapes(model, shapes))
    if stages:
        kernel_library.max_workers = 0
        time_stages(spent)
    begun = cpu_seconds()
    session = ort_cuda_plugin.session(path, emulate=True)
    session.run(None, feeds)
    spent["total"] = cpu_seconds() - begun
    spent["kernels"] = ort_cuda_plugin.counters()["kernels_compiled"]
    return dict(spent)


def time_stages(spent: defaultdict[str, float]) -> None:
    """Add the seconds of each stage of the compiler to ``spent`` from now on."""
    from ort_cuda_plugin.compiler.library.isolation import import_compiler

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*args)
            finally:
                spent[name] += time.thread_time() - begun

        return call

    compiler = timed("import", import_compiler)()
    for name in (*STAGES, WHOLE_KERNEL):
        if name != "import":
            setattr(compiler, name, timed(name, getattr(compiler, name)))


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its child processes that have ended."""
    return sum(use.ru_utime + use.ru_stime for use in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))


def in_new_process(name: str, stages: bool) -> dict[str, float]:
    """Return the figures of `measure` for a model, from a new process with an empty kernel cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name.replace(':', '_')}.onnx")
        write_model(name, path)
        environment = os.environ | {"ORT_CUDA_PLUGIN_CACHE_DIR": str(Path(folder, "cache"))}
        command = [sys.executable, __file__, "--here", str(path), *(["--stages"] if stages else [])]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return figures


def line(name: str, figures: dict[str, float], stages: bool) -> str:
    text = f"{name:22} {figures['total']:7.2f} s {figures['kernels']:4.0f} kernels"
    if stages:
        known = [figures.get(stage, 0.0) for stage in STAGES]
        known.append(figures.get(WHOLE_KERNEL, 0.0) - sum(known[1:]))
        text += "".join(f"{value:9.2f}" for value in known)
    return text


def main() -> None:
    from ort_cuda_plugin.networks import NETWORKS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.models[0], options.stages)))
        return
    if options.stages and not options.json:
        print(" " * 45 + "".join(f"{title:>9}" for title in (*STAGES.values(), "code")))
    rows = {}
    for name in options.models or (*NETWORKS, *LIGHT_MODELS):
        rows[name] = in_new_process(name, options.stages)
        if not options.json:
            print(line(name, rows[name], options.stages), flush=True)
    mean = math.exp(sum(math.log(row["total"]) for row in rows.values()) / len(rows))
    print(json.dumps({"models": rows, "geometric mean": mean}) if options.json else f"geometric mean {mean:15.2f} s")


if __name__ == "__main__":
    main()
