"""ONNX's backend tests, all of them, compared with docs/conformance.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import ort_cuda_plugin
from ort_cuda_plugin.conformance.cases import load_cases
from ort_cuda_plugin.conformance.mode import Mode
from ort_cuda_plugin.conformance.report import WRITE_COMMAND, changes, read_verdicts, versions
from ort_cuda_plugin.conformance.runner import run
from ort_cuda_plugin.conformance.verdict import BAD, Outcome, Verdict

REPORT = Path(__file__).resolve().parent.parent / "docs" / "conformance.md"
# One item that uses all cores: xdist starts this file last, because it has few items, when the cores become free.
JOBS = len(os.sched_getaffinity(0))
ROUNDED = {"node/attention_4d_causal_fp16_expanded"}
"""A chain of float16 nodes: each of ours is rounded correctly (below), the end is two units from the test's values."""


def assert_none_is_bad(outcomes: Sequence[Outcome]) -> None:
    bad = {outcome.key: f"{outcome.verdict}: {outcome.reason}" for outcome in outcomes if outcome.verdict in BAD}
    assert bad.keys() == ROUNDED, "\n".join(f"{key}: {text}" for key, text in bad.items())


@pytest.mark.slow
@pytest.mark.parametrize("optimised", [False, True], ids=["as-written", "optimised"])
def test_every_verdict_is_the_reported_one_and_none_is_bad(optimised: bool) -> None:
    cases = load_cases()
    outcomes = run(list(cases.values()), Mode(optimised), jobs=JOBS)
    assert_none_is_bad(outcomes)
    text = REPORT.read_text()
    if versions() not in text:
        pytest.skip(f"{REPORT.name} is not of {versions()}: verdicts of other versions differ")
    reported = read_verdicts(text, cases)[optimised]
    assert not (changed := changes(reported, outcomes)), "\n".join(
        [f"{REPORT.name} is not what was found; to write it again: {WRITE_COMMAND}", *changed]
    )


@pytest.mark.slow
def test_checking_mode_and_adversarial_streams_find_nothing() -> None:
    """Both at once: what the checking mode finds depends on the order in which streams run."""
    cases = load_cases()
    outcomes = run(list(cases.values()), Mode(check=True, seed=1), jobs=JOBS)
    assert_none_is_bad(outcomes)
    assert sum(outcome.verdict is Verdict.ON_EP for outcome in outcomes) > 1500


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


NODES = {"Mul": np.multiply, "MatMul": np.matmul, "Add": np.add, "Softmax": softmax}


@pytest.mark.parametrize("key", sorted(ROUNDED))
def test_each_node_of_a_chain_of_half_floats_is_rounded_correctly(key: str) -> None:
    case = load_cases()[key]
    model = case.model()
    ((inputs, _),) = case.data_sets(model)
    names = [value.name for value in model.graph.input]
    types = {info.name: info for info in onnx.shape_inference.infer_shapes(model).graph.value_info}
    model.graph.output.extend(types[name] for node in model.graph.node for name in node.output if name in types)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort_cuda_plugin.session(model.SerializeToString(), emulate=True, sess_options=options)
    outputs = [value.name for value in session.get_outputs()]
    values = dict(zip(names, inputs, strict=True)) | dict(
        zip(outputs, session.run(outputs, dict(zip(names, inputs, strict=True))), strict=True)
    )
    checked = 0
    for node in model.graph.node:
        result = values[node.output[0]]
        if node.op_type in NODES and result.dtype == np.float16:
            exact = NODES[node.op_type](*(values[name].astype(np.float64) for name in node.input))
            np.testing.assert_array_equal(result, exact.astype(np.float16), err_msg=node.op_type)
            checked += 1
    assert checked >= 6
