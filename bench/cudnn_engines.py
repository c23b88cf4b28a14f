"""Lists the engines that an installed cuDNN offers for the convolutions of models on an H100. No GPU is needed.

    python bench/cudnn_engines.py [MODEL ...] [--batch N ...]

Models are the onnx wheel's light models or networks with convolutions (mobilenet_v2, unet, ...), in TF32 and float16.
For each model: the launches and library calls of a Run, the MB that they move, the numbers of convolutions in NHWC and
on tensor cores, the largest workspace, and the milliseconds of choosing all engines. Needs the extra `libs`. Exits with
1 where a convolution has no engine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "harness")]

COLUMNS = ["launches", "calls", "MB", "channels last", "tensor cores", "workspace KiB", "choosing ms"]


def main() -> int:
    import onnx

    from library_engines import ask, build_asker, calls_of, halved, lowered, network, optimized, question
    from ort_cuda_plugin import models
    from ort_cuda_plugin.networks import NETWORKS
    from ort_cuda_plugin.program.steps.libraries import CONV, ProblemFlags

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=sorted(models.wheel_models()))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    arguments = parser.parse_args()
    missing = 0
    print(f"{'':32}" + "".join(f"{column:>15}" for column in COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        command = build_asker(Path(folder))
        if command is None:
            parser.error("cuDNN is not installed: run pip install -e .[libs]")
        for name in arguments.models:
            light = None if name in NETWORKS else onnx.load(models.wheel_models()[name])
            for batch in arguments.batch:
                single = network(name, batch) if light is None else optimized(models.with_noise_weights(light), batch)
                half = network(name, batch, onnx.TensorProto.FLOAT16) if light is None else halved(single)
                for precision, form in (("TF32", single), ("float16", half)):
                    program = lowered(form)
                    calls = calls_of(program, CONV)
                    engines = ask(command, [question(call) for call in calls])
                    missing += sum(bool(engine.missing) for engine in engines)
                    last = sum(bool(call.problem.flags & ProblemFlags.CHANNELS_LAST) for call in calls)
                    figures = [
                        len(program.launches) - len(program.calls),
                        len(program.calls),
                        round(program.traffic.asked.total / 1e6),
                        f"{last} of {len(calls)}",
                        sum(engine.tensor_cores for engine in engines),
                        max(engine.workspace for engine in engines) >> 10,
                        sum(engine.milliseconds for engine in engines),
                    ]
                    print(f"{f'{name} {batch} {precision}':32}" + "".join(f"{figure:>15}" for figure in figures))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
