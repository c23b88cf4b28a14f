"""Sends SIGINT during session creation and during Runs that build a plan; the next session or Run must succeed.

    python bench/interrupts.py --count 1000 --jobs 2

Each process starts with an empty kernel cache. Its first interrupt comes ``--step`` milliseconds later than that of the
previous process, so that the interrupts cover the whole time of a cold session. More interrupts follow in sessions and
Runs that compile new kernels. An interrupt may raise KeyboardInterrupt or an error that names it. Afterwards a session
on the provider must give the right results.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS = {"cold": 1.8, "session": 0.5, "run": 0.4}
"""Typical CPU seconds, with an empty kernel cache: the first session of a process, a later session, a Run that builds
a plan. CPU time does not depend on other load."""
UNARY = ("Abs", "Neg", "Relu", "Tanh", "Sigmoid", "Floor", "Ceil", "Sin", "Cos", "Softplus", "Sign", "Softsign")


# ---- the process that is interrupted ----


def processor_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock id that clock_getcpuclockid returns


def new_model(choose: random.Random, kind: str) -> bytes:
    """Return y = sum(f(a)) + b with a random f. For ``kind`` "run", shapes and axes are known only in a Run."""
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node(choose.choice(UNARY), ["a"], ["f"]),
        helper.make_node("Add", ["f", "b"], ["sum"]),
        helper.make_node("ReduceSum", ["sum", "axes"], ["y"]),
    ]
    known = kind == "session"
    dims: list[Any] = [3, 5] if known else ["n", "k"]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in "ab"]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["p", "q"])]
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [choose.randrange(2)])
    if not known:
        inputs.append(helper.make_tensor_value_info("axes", TensorProto.INT64, [1]))
    graph = helper.make_graph(nodes, "interrupted", inputs, outputs, [axes] if known else [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def forget_kernels() -> None:
    """Make this process compile every kernel again."""
    from ort_cuda_plugin.compiler.compile import kernel_ir
    from ort_cuda_plugin.ep.device.open_device import kernel_library

    library = kernel_library()
    for entry in library.cache.folder.iterdir():
        if entry.is_file():
            entry.unlink()
    library.images.clear()
    kernel_ir.cache_clear()


class Interrupted:
    """Work of the interrupted process: tells the parent when to send the signal, and reports the outcome."""

    def __init__(self, seed: int) -> None:
        import numpy as np
        import onnxruntime as ort

        ort.set_default_logger_severity(4)  # hides errors that the interrupts cause on purpose
        self.choose = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.session: Any = None

    def tell(self, **message: object) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    def prepare(self, kind: str) -> None:
        import numpy as np
        import onnxruntime as ort

        self.session = None
        self.model = new_model(self.choose, kind)
        cpu = ort.InferenceSession(self.model, providers=["CPUExecutionProvider"])
        self.feeds = {name: self.rng.standard_normal((3, 5)).astype(np.float32) for name in "ab"}
        if kind == "run":
            self.feeds["axes"] = np.array([self.choose.randrange(2)])
        self.expected = cpu.run(None, self.feeds)[0]
        if "ort_cuda_plugin.ep.device.open_device" in sys.modules:
            forget_kernels()
        if kind == "run":  # creates the session now, so that the signal interrupts the Run
            self.make()

    def make(self) -> None:
        import ort_cuda_plugin

        self.session = ort_cuda_plugin.session(self.model, emulate=True)

    def run(self) -> None:
        import numpy as np

        np.testing.assert_allclose(self.session.run(None, self.feeds)[0], self.expected, rtol=1e-4, atol=1e-5)

    def work(self, kind: str) -> None:
        if kind == "session":
            self.make()
        self.run()

    def interrupted(self, kind: str, number: int) -> str:
        """Do the work while the signal arrives, and return its outcome; "late" if the work ended before the signal."""
        outcome = ""
        try:
            try:
                self.tell(round=number, kind=kind, used=time.process_time())
                self.work(kind)
                outcome = "late"
                self.tell(late=True)
            except Exception as error:
                if "KeyboardInterrupt" not in str(error):
                    raise
                outcome = "error"
            while True:  # waits for a late signal; after an error, for KeyboardInterrupt that the plugin raises again
                time.sleep(0.05 if outcome == "error" else 30)
                if outcome == "error":
                    return outcome
        except KeyboardInterrupt:
            return outcome or "interrupt"

    def main(self, rounds: int) -> int:
        import ort_cuda_plugin

        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in range(rounds):
            kind = "session" if number == 0 else self.choose.choice(["session", "run"])
            self.prepare(kind)
            outcome = self.interrupted(kind, number)
            try:
                if self.session is None or not self.session.get_providers()[0].startswith("Cuda"):
                    self.make()
                self.run()
                self.make()
                self.run()
            except Exception as error:
                self.tell(failure=f"{kind} {number}, after {outcome}: {type(error).__name__}: {error}")
                return 1
            self.tell(kind=kind, outcome=outcome)
        self.session = None
        gc.collect()
        left = ort_cuda_plugin.counters()["device_bytes_in_use"]
        if left:
            self.tell(failure=f"{left} bytes of the device are still in use")
        return 1 if left else 0


# ---- the process that interrupts ----


class Campaign:
    """The parent's side: starts and interrupts processes, several at a time."""

    def __init__(self, count: int, rounds: int, step: float, seed: int) -> None:
        self.todo = [min(rounds, count - first) for first in range(0, count, rounds)][::-1]
        self.processes = len(self.todo)
        self.step = step
        self.seed = seed
        self.choose = random.Random(seed)
        self.lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []

    def work(self) -> None:
        while True:
            with self.lock:
                if not self.todo:
                    return
                number = self.processes - len(self.todo)
                rounds = self.todo.pop()
                parts = [number * self.step / SECONDS["cold"] % 1] + [self.choose.random() for _ in range(rounds - 1)]
            with tempfile.TemporaryDirectory() as cache:
                self.interrupt(number, parts, cache)

    def interrupt(self, number: int, parts: list[float], cache: str) -> None:
        """Start a process and interrupt it once for each of ``parts``, at that fraction of the work's expected time."""
        command = [sys.executable, __file__, "--interrupted", str(len(parts)), "--seed", str(self.seed + number)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "ORT_CUDA_PLUGIN_CACHE_DIR": cache}
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True)
            assert process.stdout is not None
            watchdog = threading.Timer(300, process.kill)
            watchdog.start()
            done, failure = 0, ""
            for line in process.stdout:
                message = json.loads(line)
                if "round" in message:
                    kind = message["kind"] if message["round"] else "cold"
                    end = message["used"] + parts[message["round"]] * SECONDS[kind]
                    while (
                        not select.select([process.stdout], [], [], 0.002)[0] and processor_seconds(process.pid) < end
                    ):
                        pass
                    process.send_signal(signal.SIGINT)
                elif "late" in message:
                    pass
                elif "failure" in message:
                    failure = message["failure"]
                else:
                    done += 1
                    with self.lock:
                        self.outcomes[f"{message['kind']}: {message['outcome']}"] += 1
            code = process.wait()
            watchdog.cancel()
            if code != 0 or done != len(parts):
                errors.seek(0)
                tail = "".join(errors.readlines()[-30:])
                with self.lock:
                    self.failures.append(f"process {number}, parts {parts}: exit {code}: {failure or tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="total number of interrupts")
    parser.add_argument("--rounds", type=int, default=11, help="number of interrupts in each process")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes at a time")
    parser.add_argument("--step", type=float, default=20, help="milliseconds from one cold interrupt to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--interrupted", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.interrupted is not None:
        return Interrupted(arguments.seed).main(arguments.interrupted)
    campaign = Campaign(arguments.count, arguments.rounds, arguments.step / 1000, arguments.seed)
    threads = [threading.Thread(target=campaign.work) for _ in range(arguments.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = {"interrupts": sum(campaign.outcomes.values()), "outcomes": dict(sorted(campaign.outcomes.items()))}
    report["failures"] = campaign.failures
    if arguments.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name}: {value}")
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    sys.exit(main())
