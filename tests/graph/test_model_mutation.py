"""Mutation testing of models: a sample of mutants, compared with the CPU provider, and the tool itself."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from mutation import oracle
from mutation.bases import Base, operators, patterns
from mutation.campaign import campaign, environment, minimize, stored, write
from mutation.mutants import Mutant, build, mutant
from mutation.mutators import MUTATORS
from mutation.oracle import Kind, Outcome, judge
from worker_process import Worker

SAMPLE = 500
# A worker that aborts (FAULT=crash) or hangs, in the stage that the variable STAGE names.
FAULTY = """
import os, time
from mutation import worker
def judge(data, feeds, level, stage):
    stage("cpu")
    stage(os.environ["STAGE"])
    if os.environ["FAULT"] == "crash":
        os.abort()
    time.sleep(600)
worker.judge = judge
worker.main()
"""


def test_mutants_run_as_on_the_cpu_provider_or_are_refused_with_a_reason(tmp_path: Path) -> None:
    with campaign(patterns() | operators()) as mutants:
        report = mutants.run(range(SAMPLE), out=tmp_path)
    found = [f"{path.read_text()}    {path.with_suffix('.onnx')}" for path in sorted(tmp_path.glob("*.txt"))]
    assert not report.findings, "\n".join(found)
    assert sum(report.counts.values()) == SAMPLE
    assert report.counts[Kind.AGREES] > SAMPLE / 4


def test_a_mutant_is_the_same_whenever_it_is_made() -> None:
    bases = patterns()
    for number in range(200):
        mutated = mutant(number, bases)
        assert mutated == mutant(number, bases)
        assert build(mutated, bases[mutated.base])[0] == build(mutated, bases[mutated.base])[0]


@pytest.mark.parametrize("name", MUTATORS)
def test_a_mutator_changes_models(name: str) -> None:
    bases = patterns()
    plain = {base: build(Mutant(base, (), 0), bases[base]) for base in bases}
    changed = 0
    for number, base in enumerate(sorted(bases) * 3):
        data, feeds = build(Mutant(base, ((name, number),), 0), bases[base])
        same = data == plain[base][0] and feeds.keys() == plain[base][1].keys()
        changed += not same or any(not np.array_equal(feeds[key], plain[base][1][key]) for key in feeds)
    assert changed >= 3


@pytest.mark.parametrize(("fault", "kind"), [("crash", Kind.CRASH), ("hang", Kind.HANG)])
@pytest.mark.parametrize("stage", ["plugin", "cpu"])
def test_a_process_that_dies_or_hangs_costs_one_mutant_and_has_a_culprit(fault: str, kind: Kind, stage: str) -> None:
    with stored(patterns()) as file:
        variables = environment(1) | {"FAULT": fault, "STAGE": stage}
        worker = Worker((sys.executable, "-c", FAULTY, str(file)), variables, 20.0 if fault == "crash" else 6.0)
        outcome = worker.judge(Mutant("encoder", (), 0))
        worker.close()
    assert outcome.kind is (kind if stage == "plugin" else Kind.CPU_SLOW)
    assert stage in outcome.detail


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    base = patterns()["shape_chain"]
    assert judge(base.model, base.feeds, 0, lambda stage: None).kind is Kind.AGREES
    monkeypatch.setattr("ort_cuda_plugin.program.expressions.symbolic.truncdiv", lambda a, b: a)
    outcome = judge(base.model, base.feeds, 0, lambda stage: None)
    assert outcome.kind in (Kind.DIFFERS, Kind.REFUSES)


def test_a_mistake_that_declines_a_node_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise KeyError("a mistake")

    base = patterns()["shape_chain"]
    monkeypatch.setattr("ort_cuda_plugin.ops.onnx.math.reduction.reduce", broken)
    outcome = judge(base.model, base.feeds, 0, lambda stage: None)
    assert outcome.kind is Kind.INTERNAL
    assert "KeyError: 'a mistake'" in outcome.detail


def test_a_finding_is_made_small_and_written(tmp_path: Path) -> None:
    steps = tuple((name, seed) for seed, name in enumerate(MUTATORS))

    def fails_with_renamed_nodes(mutated: Mutant) -> Outcome:
        named = any(name == "rename_nodes" for name, _ in mutated.steps)
        return Outcome(Kind.DIFFERS if named else Kind.AGREES)

    found = Outcome(Kind.DIFFERS, "another value")
    small = minimize(Mutant("encoder", steps, 99), found, fails_with_renamed_nodes)
    assert [name for name, _ in small.steps] == ["rename_nodes"]
    assert small.level == 0
    base: Base = patterns()["encoder"]
    path = write(tmp_path, 7, small, found, base)
    assert onnx.load(path).graph.node[0].name != onnx.load_model_from_string(base.model).graph.node[0].name
    assert set(np.load(path.with_suffix(".npz")).files) == {"input_ids", "attention_mask"}
    assert "another value" in path.with_suffix(".txt").read_text()


@pytest.mark.parametrize(("handed", "kind"), [("state", Kind.HOST_UNDEFINED), ("copy", Kind.DIFFERS)])
def test_a_scan_that_hands_its_state_through_is_the_hosts(handed: str, kind: Kind) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        scan (float initial, float[3] x) => (float y, float[3] z) {{
            y, z = Scan <num_scan_inputs = 1, body = b (float state, float next) => (float {handed}, float sum) {{
                copy = Identity(state)
                sum = Add(state, next)
            }}> (initial, x)
        }}"""
    )
    assert oracle._kind_of_difference(model, {}, np.zeros(1), "1 of 1 elements") is kind
