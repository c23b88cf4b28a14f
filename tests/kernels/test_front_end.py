"""The kernel compiler's front end, against Numba's complete pass pipeline."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from numba.cuda import dispatcher
from numba.cuda.core import typeinfer
from onnx import TensorProto, helper

from contributed import FLOAT, noise
from ort_cuda_plugin.compiler import compile as compiler
from ort_cuda_plugin.compiler import front_end
from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.compiler.library import kernel_library
from ort_cuda_plugin.compiler.targets import Target
from session_pair import ep_session


@contextmanager
def all_passes() -> Iterator[None]:
    device = front_end.ComputeCapability(front_end.compute_capability)
    with patch.object(dispatcher, "get_current_device", lambda: device):
        yield


numbered = rb"_Z\w+|kernel\$\d+|_cudapy_smem_\d+"
WIDENS_IN_LOOP = """
def kernel(x, n):
    total = 0
    first = cuda.grid(1)
    pair = (first, 1)
    while pair[0] < n:
        step = total + 1
        if x[pair[0]] > 0:
            total = step * 0.5
        else:
            total = step
        pair = (pair[0] + pair[1], pair[1] * 2)
    x[first] = total
"""


def codes(specs: Iterable[KernelSpec]) -> list[tuple[bytes, bytes]]:
    """Return PTX, without the names that contain Numba's counters, and code for the emulated device."""
    compiler.kernel_ir.cache_clear()
    targets = Target.cuda(9, 0), Target.emulated()
    images = [[compiler.compile_kernel(spec, target) for target in targets] for spec in specs]
    return [(re.sub(numbered, b"", gpu.ptx), emulated.data) for gpu, emulated in images]


def test_kernels_have_the_code_that_all_passes_make(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[KernelSpec] = set()
    monkeypatch.setattr(kernel_library, "record_specs", asked.update)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Softmax", ["product"], ["weights"]),
        helper.make_node("CumSum", ["weights", "axis"], ["sums"]),
        helper.make_node("TopK", ["sums", "k"], ["y", "places"]),
    ]
    graph = helper.make_graph(
        nodes,
        "kernels",
        [helper.make_tensor_value_info("x", FLOAT, [None, 16])],
        [
            helper.make_tensor_value_info("y", FLOAT, None),
            helper.make_tensor_value_info("places", TensorProto.INT64, None),
        ],
        [
            helper.make_tensor("w", FLOAT, [16, 40], noise(16, 40).ravel().tolist()),
            helper.make_tensor("axis", TensorProto.INT64, [], [1]),
            helper.make_tensor("k", TensorProto.INT64, [1], [3]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    ep_session(model.SerializeToString())
    specs = sorted(asked, key=lambda spec: spec.name)
    assert len(specs) > 3
    specs.append(KernelSpec("widens", ("*f32", "i32"), WIDENS_IN_LOOP))
    without = codes(specs)
    monkeypatch.setattr(front_end, "front_end_of_kernels", all_passes)
    assert without == codes(specs)


def test_only_statements_whose_types_may_have_changed_are_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    typed: Counter[Any] = Counter()
    assign = typeinfer.Propagate.__call__

    def count(constraint: Any, inferer: Any) -> None:
        typed[constraint.dst] += 1
        assign(constraint, inferer)

    monkeypatch.setattr(typeinfer.Propagate, "__call__", count)
    settled = "def kernel(x, n):\n    a = n\n    b = a\n    x[b] = 1\n"
    compiler.kernel_ir(KernelSpec("settled", ("*f32", "i32"), settled))
    assert typed
    assert set(typed.values()) == {1}
    typed.clear()
    compiler.kernel_ir(KernelSpec("widens_again", ("*f32", "i32"), WIDENS_IN_LOOP))
    assert max(typed.values()) > 1


def test_what_was_resolved_does_not_pile_up() -> None:
    def resolved_after(added: int) -> tuple[int, int, int]:
        place = f"i = cuda.grid(1)\n    if i < n:\n        x[i] = float32(int64(x[i]) + {added})"
        compiler.kernel_ir(KernelSpec("piles", ("*f32", "i32"), f"def kernel(x, n):\n    {place}\n"))
        return len(front_end.signatures), len(front_end.values), len(front_end.sizes)

    for _ in range(2):  # the first kernels of a process also resolve what all kernels share
        compiler.kernel_ir.cache_clear()
        before = resolved_after(added=1)
    compiler.kernel_ir.cache_clear()
    assert resolved_after(added=1) == before
    assert resolved_after(added=2) == before


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_the_collection_of_cycles_is_afterwards_what_it_was(enabled: bool) -> None:
    try:
        if not enabled:
            gc.disable()
        with pytest.raises(compiler.KernelCompileError):
            compiler.kernel_ir(KernelSpec("unknown_name", ("i32",), "def kernel(n):\n    absent(n)\n"))
        assert gc.isenabled() == enabled
        with front_end.collection_paused():
            assert not gc.isenabled()
    finally:
        gc.enable()
