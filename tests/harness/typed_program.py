"""A program of a user, as type checkers see it: mypy and pyright check the types that the public functions state.

In a line with ``type: ignore`` the program makes a mistake: a checker that does not report it says that the comment is
unused.
"""

from __future__ import annotations

import sys
from typing import Any, assert_type

import onnxruntime as ort

import ort_cuda_plugin


def create(model: str) -> ort.InferenceSession:
    """Return a session on the emulated device, as both APIs create it."""
    devices = ort_cuda_plugin.register(emulate=True, as_="CudaPluginExecutionProvider")
    ort_cuda_plugin.memory_stats(devices[0])
    options: ort_cuda_plugin.ProviderOptions = {"use_tf32": False, "log_level": "ERROR", "arena.max_mem": "4G"}
    session = ort_cuda_plugin.session(model, emulate=True, provider_options=options, sess_options=ort.SessionOptions())
    ort_cuda_plugin.require(session, nodes="all", allow=["Loop"])
    ort_cuda_plugin.session(model, emulate=True, provider_options={"use_tf32": "0"})
    return session


def read(model: str) -> None:
    """Read tables."""
    verdicts = ort_cuda_plugin.explain(model, emulate=True)
    assert_type(verdicts, ort_cuda_plugin.Table[ort_cuda_plugin.NodeVerdict])
    assert_type([verdict.op_type for verdict in verdicts], list[str])
    assert_type(verdicts.to_dict(), dict[str, list[Any]])
    assert_type(ort_cuda_plugin.devices()[0].memory_bytes, int)
    assert_type(ort_cuda_plugin.plan_variants()[0].seconds, float)
    assert_type(ort_cuda_plugin.counters()["runs"], int)
    assert_type(ort_cuda_plugin.memory_stats(0)["device"]["InUse"], int)
    profile = ort_cuda_plugin.profile(model, emulate=True, runs=1)
    assert_type(profile, ort_cuda_plugin.Profile)
    assert_type(profile.to_dict("nodes"), dict[str, list[Any]])


def be_wrong(session: ort.InferenceSession, binding: ort.IOBinding) -> None:
    """Make mistakes that checkers report."""
    ort_cuda_plugin.register(as_="CudaExecutionProvider")  # type: ignore[arg-type]
    ort_cuda_plugin.require(session, nodes="most")  # type: ignore[arg-type]
    ort_cuda_plugin.bind_input(binding, "x", [1.0])  # type: ignore[arg-type]
    options: ort_cuda_plugin.ProviderOptions = {"use_tf_32": True}  # type: ignore[typeddict-unknown-key]
    options["log_level"] = "LOUD"  # type: ignore[typeddict-item]


if __name__ == "__main__":
    created = create(sys.argv[1])
    read(sys.argv[1])
    print(created.get_providers()[0])
