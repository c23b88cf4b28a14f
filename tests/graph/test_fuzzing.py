"""Fuzzing with random networks: a sample of each profile, compared with the CPU provider, and the fuzzer itself."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ort_cuda_plugin
from fuzzing.campaign import campaign
from fuzzing.judge import difference, judge
from fuzzing.minimize import minimize, write
from fuzzing.network import BFLOAT16, BOOL, FLOAT, Array, Case, Grower
from fuzzing.profiles import Profile, make_case
from mutation.oracle import Kind, Outcome
from ort_cuda_plugin.conformance.mode import Mode
from ort_cuda_plugin.conformance.verdict import run_session
from ort_cuda_plugin.ep.device.devices import LOWERING_VARIABLE

RUNS = [{"n": 3}, {"n": 0}, {"n": 5}]
SAMPLES = {Profile.SIZES: 60, Profile.GRAPHS: 10}


def grower(seed: int = 0) -> Grower:
    return Grower(seed, RUNS)


def small_case(op_type: str = "Neg") -> Case:
    """Return a case with a chain of five nodes, the third of type ``op_type``."""
    g = grower()
    x = g.input(FLOAT, ("n", 4), g.rng.standard_normal)
    for kind in ("Tanh", "Sigmoid", op_type, "Tanh", "Relu"):
        made = g.add(kind, [x], [FLOAT], "element")
        assert made
        x = made[0]
    return g.case({"fusion": "0"}, optimized=True)


@pytest.mark.parametrize("profile", Profile)
def test_random_networks_compute_what_each_node_does_by_itself(profile: Profile) -> None:
    wrong = {
        seed: outcome for seed in range(SAMPLES[profile]) if (outcome := judge(make_case(profile, seed))).is_finding
    }
    assert not wrong


@pytest.mark.parametrize(("profile", "lowering", "first"), [("graphs", "sm_90", 40), ("sizes", "sm_80", 400)])
def test_random_networks_are_right_with_a_gpus_kernels_checked_and_on_adversarial_streams(
    profile: Profile, lowering: str, first: int, tmp_path: Path
) -> None:
    mode = Mode(check=True, seed=7, lowering=os.environ.get(LOWERING_VARIABLE) or lowering)
    report = campaign(Profile(profile), mode).run(range(first, first + 4), out=tmp_path)
    assert not report.findings, "\n".join(path.read_text() for path in tmp_path.glob("*.txt"))
    assert report.counts[Kind.AGREES] >= 3


@pytest.mark.parametrize("profile", Profile)
def test_a_network_follows_from_its_number(profile: Profile) -> None:
    for seed in range(5):
        assert make_case(profile, seed).model() == make_case(profile, seed).model()


def test_networks_have_every_kind_of_node_that_makers_add() -> None:
    """The fuzzer drops nodes that the CPU provider rejects, so a broken generator would go unnoticed."""
    found: set[str] = set()
    for profile in Profile:
        for seed in range(150):
            found |= {onnx.NodeProto.FromString(node).op_type for node in make_case(profile, seed).nodes}
    wanted = {"If", "Loop", "Scan", "MatMulNBits", "MatMulInteger", "LSTM", "Conv", "Shape", "Range"}
    wanted |= {"NonZero", "CumSum", "ScatterND", "TopK", "Resize", "Einsum", "ConvTranspose", "BiasGelu", "Compress"}
    assert not wanted - found


def test_a_node_that_the_cpu_provider_refuses_or_that_rounding_decides_is_not_added() -> None:
    g = grower()
    x = g.input(FLOAT, ("n", 4), g.rng.standard_normal)
    y = g.input(FLOAT, ("n", 5), g.rng.standard_normal)
    assert g.add("Add", [x, y], [FLOAT]) is None
    assert g.add("Log", [x], [FLOAT]) is None, "NaN"
    made, again = (g.add("Sin", [x], [FLOAT], "element") for _ in range(2))
    assert made
    assert again
    assert g.add("Sub", [made[0], made[0]], [FLOAT], "element")
    assert g.add("Equal", [made[0], again[0]], [BOOL]) is None, "rounding decides"


def test_bfloat16_is_rounded_after_each_node() -> None:
    g = grower()
    x = g.input(FLOAT, ("n", 4), g.rng.standard_normal)
    cast = g.add("Cast", [x], [BFLOAT16], "element", to=BFLOAT16)
    assert cast
    made = g.add("Mul", [cast[0], cast[0]], [BFLOAT16], "element")
    assert made
    rounded = cast[0].clean[0].astype(np.float32)
    np.testing.assert_array_equal(made[0].clean[0], (rounded * rounded).astype(cast[0].clean[0].dtype))


def test_a_wrong_result_is_found_with_its_run_and_element(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(session: Any, feed: list[Any]) -> list[Array]:
        (y,) = run_session(session, feed)
        if ort_cuda_plugin.get_ep_name() in session.get_providers() and len(y) == RUNS[2]["n"]:
            y[1, 2] += 0.01
        return [y]

    case = small_case()
    assert judge(case).kind is Kind.AGREES
    monkeypatch.setattr("fuzzing.judge.run_session", wrong)
    outcome = judge(case)
    assert outcome.kind is Kind.DIFFERS
    assert "Run 2" in outcome.detail
    assert "[1, 2]" in outcome.detail


def test_numbers_that_are_not_finite_differ() -> None:
    case = small_case()
    value = case.values[case.outputs[0]]
    assert not difference(value, 0, value.clean[0])
    assert difference(value, 0, value.clean[0] * np.float32(np.nan))


def test_a_network_that_the_cpu_provider_refuses_as_a_whole_is_no_finding() -> None:
    case = small_case()
    nodes = (onnx.helper.make_node("Tanh", ["nothing"], [case.outputs[0]]).SerializeToString(),)
    assert judge(replace(case, nodes=nodes)).kind is Kind.BOTH_REFUSE


def test_a_finding_is_made_small_and_written(tmp_path: Path) -> None:
    def fails_with_floor(case: Case) -> Outcome:
        types = [onnx.NodeProto.FromString(node).op_type for node in case.nodes]
        return Outcome(Kind.DIFFERS if "Floor" in types else Kind.AGREES, "another value")

    case = small_case("Floor")
    small = minimize(case, fails_with_floor(case), fails_with_floor)
    assert [onnx.NodeProto.FromString(node).op_type for node in small.nodes] == ["Floor"]
    assert small.runs == 1
    assert not small.options
    path = write(tmp_path, "one", small, fails_with_floor(small))
    assert [node.op_type for node in onnx.load(path).graph.node] == ["Floor"]
    arrays = np.load(path.with_suffix(".npz"))
    assert set(arrays.files) == {f"run0/{name}" for name in (*small.inputs, *small.outputs)}
    assert "another value" in path.with_suffix(".txt").read_text()
