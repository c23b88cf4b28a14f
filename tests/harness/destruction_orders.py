"""Destroys an application's objects of ONNX Runtime and of the plugin in many orders, while it runs and at its exit.

``python tests/harness/destruction_orders.py --orders 5040 --exits 300`` tries that many orders and process exits, and
prints each failure with the command that repeats it. Freed memory is overwritten at once, so that a use after free
fails.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import gc
import itertools
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import ort_cuda_plugin as plugin
from c_programs import COUNTED
from isolated import ROOT, add_model

OVERWRITE_FREED = COUNTED | {"MALLOC_PERTURB_": "165"}

OBJECTS = {
    "s": "session",
    "b": "IO binding with a value on the device and an output there",
    "r": "that output",
    "v": "value on the device made from an array, input of the Runs",
    "n": "outputs of run_with_ort_values",
    "d": "DLPack export of a value on the device",
    "t": "stream that the application made",
    "o": "session options with the device",
}
UNREGISTER, REGISTER, NEW_SESSION = "U", "R", "N"

MODEL = add_model(dims=["n"])
X = np.arange(100, dtype=np.float32)


def new_session() -> Any:
    session = plugin.session(MODEL, emulate=True)
    np.testing.assert_array_equal(session.run(None, {"a": X, "b": X})[0], X + X)
    return session


def make() -> dict[str, Any]:
    """Create one object of each kind in `OBJECTS`."""
    [device] = [d for d in plugin.register(emulate=True) if d.ep_metadata["emulated"] == "1"]
    vendor = device.memory_info(ort.OrtDeviceMemoryType.DEFAULT).device_vendor_id
    session = new_session()
    value = ort.OrtValue.ortvalue_from_numpy(X, "gpu", 0, vendor)
    binding = session.io_binding()
    binding.bind_ortvalue_input("a", value)
    binding.bind_ortvalue_input("b", value)
    binding._iobinding.bind_output("c", ort.OrtDevice.make("gpu", 0, vendor)._get_c_device())
    session.run_with_iobinding(binding)
    exported = ort.OrtValue.ortvalue_from_numpy(X, "gpu", 0, vendor)._ortvalue.to_dlpack()
    options = ort.SessionOptions()
    options.add_provider_for_devices([device], {})
    outputs = session.run_with_ort_values(None, {"a": value, "b": value})
    made = (session, binding, binding.get_outputs(), value, outputs, exported, device.create_sync_stream(), options)
    return dict(zip(OBJECTS, made, strict=True))


def play(order: str) -> None:
    """Follow ``order``, a string of letters: destroy the object with the letter, or do the action with the letter."""
    held = make()
    unregistered = False
    for step in order:
        if step == UNREGISTER:
            plugin.unregister()
            unregistered = True
        elif step == REGISTER:
            plugin.register(emulate=True)
        elif step == NEW_SESSION:
            new_session()
        else:
            del held[step]
        if "s" in held:  # the session must work even after the library was unregistered
            np.testing.assert_array_equal(held["s"].run(None, {"a": X, "b": X})[0], X + X)
        if "o" in held and unregistered:
            refuse_session(held["o"])
    held.clear()
    gc.collect()
    plugin.unregister()
    kept = {k: v for k, v in plugin.counters().items() if v and k.endswith(("_in_use", "_live", "weight_bytes"))}
    assert not kept, kept


def refuse_session(options: Any) -> None:
    """Assert that options whose device was unregistered give no session."""
    with pytest.raises(Exception, match="the library was unregistered"):
        ort.InferenceSession(MODEL, options, enable_fallback=0)


def orders(letters: str, count: int) -> list[str]:
    """Return ``count`` pseudorandom permutations of the letters, or all permutations if there are fewer."""
    if count >= math.factorial(len(letters)):
        return ["".join(order) for order in itertools.permutations(letters)]
    generator = random.Random(1)
    return ["".join(generator.sample(letters, len(letters))) for _ in range(count)]


# ---- the end of the process ----


def keep_somewhere(value: Any, name: str, generator: random.Random, late: list[Any]) -> str:
    """Keep the value until the process exits, in one of the places where applications keep objects."""
    place = generator.choice(["module", "builtins", "cycle", "atexit", "other module", "leaked"])
    if place == "module":
        globals()[f"kept_{name}"] = value
    elif place == "builtins":
        setattr(builtins, f"kept_{name}", value)
    elif place == "cycle":
        cycle = [value]
        cycle.append(cycle)
    elif place == "atexit":
        late.append(value)
    elif place == "other module":
        setattr(generator.choice([np, ort, plugin, atexit]), f"kept_{name}", value)
    else:
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return place


def end(seed: int) -> None:
    """End the process in one of several ways, with the objects in random places."""
    generator = random.Random(seed)
    late: list[Any] = []
    if generator.random() < 0.5:
        atexit.register(late.clear)  # registered first, so it runs after the plugin's own atexit functions
    held = make()
    story = {name: keep_somewhere(held.pop(name), name, generator, late) for name in sorted(OBJECTS)}
    if generator.random() < 0.3:
        gc.disable()
    ways: dict[str, Callable[[], object]] = {
        "stays registered": lambda: None,
        "unregistered at exit": lambda: atexit.register(plugin.unregister),
        "unregistered": plugin.unregister,
    }
    way = generator.choice(sorted(ways))
    ways[way]()
    print(story, way, flush=True)
    if generator.random() < 0.5:
        atexit.register(late.clear)
    sys.exit(generator.choice([0, 3]))


# ---- the command ----


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this file in a new process, with freed memory overwritten."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, **OVERWRITE_FREED, "PYTHONPATH": paths, **environment}
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=3600)


def failing_order(tried: Sequence[str], **environment: str) -> str:
    """Play the orders in one process; return the first that fails with its output, "" if none does."""
    done = start("play", *tried, **environment)
    played = done.stdout.split()
    if done.returncode == 0 and len(played) == len(tried):
        return ""
    return f"exit {done.returncode} in play {played[-1]}: {done.stderr[-3000:]}"


def failing_end(seed: int, **environment: str) -> str:
    """Run `end` in a new process; return what went wrong, "" if nothing did."""
    done = start("end", str(seed), **environment)
    if done.returncode in (0, 3) and not done.stderr:
        return ""
    return f"exit {done.returncode} in end {seed}: {done.stdout}{done.stderr[-3000:]}"


def main() -> int:
    match sys.argv[1:]:
        case ["play", *tried]:
            for order in tried:
                print(order, flush=True)
                play(order)
            return 0
        case ["end", seed]:
            end(int(seed))
    parser = argparse.ArgumentParser(description="Destroys objects in many orders; or: play ORDER..., end SEED.")
    parser.add_argument("--letters", default="sbrvndtoU", help="what to permute: objects, U, R, N")
    parser.add_argument("--orders", type=int, default=1000)
    parser.add_argument("--exits", type=int, default=100)
    arguments = parser.parse_args()
    tried = orders(arguments.letters, arguments.orders)
    failures = 0
    for failure in itertools.chain(
        (failing_order(tried[i : i + 100]) for i in range(0, len(tried), 100)),
        (failing_end(seed) for seed in range(arguments.exits)),
    ):
        if failure:
            failures += 1
            print(failure, flush=True)
    print(f"{len(tried)} orders, {arguments.exits} ends, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
