"""The runner of ONNX's backend tests: verdicts, values, crashes."""

from __future__ import annotations

import argparse
import subprocess
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from emulator_harness import configured, current
from isolated import python
from ort_cuda_plugin.cli.reports.conformance import add_arguments
from ort_cuda_plugin.conformance import runner, verdict
from ort_cuda_plugin.conformance.cases import load_case
from ort_cuda_plugin.conformance.mode import Mode
from ort_cuda_plugin.conformance.report import changes, read_verdicts, render
from ort_cuda_plugin.conformance.scope import out_of_scope
from ort_cuda_plugin.conformance.values import difference, from_ort_value, is_plain, to_ort_value
from ort_cuda_plugin.conformance.verdict import Outcome, Verdict, judge


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("node/add", Verdict.ON_EP),
        ("node/shape", Verdict.ON_EP),
        ("pytorch-converted/Conv2d", Verdict.ON_EP),
        ("node/string_concat", Verdict.PARTLY),
        ("node/if", Verdict.ON_EP),
    ],
)
def test_a_case_gets_its_verdict(key: str, expected: Verdict) -> None:
    outcome = judge(load_case(key), Mode())
    assert outcome.verdict is expected, outcome.reason
    assert bool(outcome.reason) == (expected is not Verdict.ON_EP)
    assert outcome.cpu_passes


@pytest.mark.parametrize("option", ["--optimized", "--optimised"])
def test_the_option_has_its_former_name_as_well(option: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args([option]).optimized
    assert "optimised" not in parser.format_help()


def test_one_case_is_loaded_without_the_modules_of_other_operators() -> None:
    """`onnx` computes the values of all node tests of a module when the module is imported."""
    code = """
    import sys
    from ort_cuda_plugin.conformance.cases import load_case
    for key in sys.argv[1:]:
        assert load_case(key).key == key
    print(*(name for name in sys.modules if name.startswith("onnx.backend.test.case.node.")))
    """
    keys = ("node/top_k", "node/sequence_insert_at_back", "node/relu_expanded_ver18", "pytorch-converted/Conv2d")
    modules = {name.rpartition(".")[2] for name in python(code, *keys).stdout.split()}
    assert {"topk", "sequenceinsert", "relu"} <= modules
    assert len(modules) < 10, modules


def test_random_values_that_are_right_by_chance_pass_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(load_case("node/training_dropout_zero_ratio"), Mode()).verdict is Verdict.ON_EP
    monkeypatch.setattr(verdict, "difference", lambda *values: "")
    outcome = judge(load_case("node/bernoulli"), Mode())
    assert outcome.verdict is Verdict.HOST_CANNOT
    assert outcome.group.startswith("random values")


def test_a_case_that_only_the_plugin_has_kernels_for_is_passed_on_the_ep() -> None:
    outcome = judge(load_case("pytorch-converted/PReLU_1d"), Mode())
    assert (outcome.verdict, outcome.cpu_passes) == (Verdict.ON_EP, False)


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.int64, np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4, ml_dtypes.uint4]
    + [ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu],
    ids=lambda dtype: np.dtype(dtype).name,
)
@pytest.mark.parametrize("shape", [(3,), (2, 3), ()])
def test_values_survive_the_way_through_onnx_runtime(dtype: type, shape: tuple[int, ...]) -> None:
    values: np.ndarray = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape).astype(dtype)
    back = from_ort_value(to_ort_value(values))
    assert back.dtype == values.dtype
    assert back.shape == shape
    np.testing.assert_array_equal(back.astype(np.float32), values.astype(np.float32))
    assert is_plain(values) == (np.dtype(dtype).isbuiltin == 1)


@pytest.mark.parametrize(
    ("actual", "expected", "text"),
    [
        (np.ones(2), np.ones(3), "shape"),
        (np.ones(2, np.float32), np.ones(2), "element type"),
        (np.array([1.0, 2.0]), np.array([1.0, 2.1]), "1 of 2 elements, the first 2.0 instead of 2.1"),
        ([np.ones(1)], [], "a different sequence"),
        (None, np.ones(1), "no value instead of a tensor"),
        (np.array(["a"]), np.array(["b"], dtype=object), "different strings"),
    ],
)
def test_differences_are_named(actual: object, expected: object, text: str) -> None:
    assert text in difference(actual, expected, 1e-3, 1e-7)


def test_equal_values_with_nan_do_not_differ() -> None:
    assert difference(np.array([np.nan, np.inf]), np.array([np.nan, np.inf]), 1e-3, 1e-7) == ""


def test_a_worker_that_crashes_costs_one_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "import sys; sys.stdin.readline(); import os; os.abort()"
    real = subprocess.Popen
    started: list[list[str]] = []

    def start(command: list[str], **options: Any) -> object:
        started.append(command)
        return real([command[0], "-c", broken] if len(started) == 1 else command, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    crashed, fine = runner.run([load_case(key) for key in ("node/abs", "node/add")], Mode(), jobs=1)
    assert (crashed.verdict, fine.verdict) == (Verdict.FAILED, Verdict.ON_EP)
    assert "crashed" in crashed.reason


OUTCOMES = [
    Outcome("node/a", Verdict.ON_EP, "", True),
    Outcome("node/b", Verdict.PARTLY, "x | y", True),
    Outcome("node/c_d", Verdict.PARTLY, "x | y", True),
    Outcome("node/e", Verdict.HOST_CANNOT, "", False, "an old host"),
]


def test_the_report_lists_every_test_that_is_not_on_the_ep_by_group_and_reason() -> None:
    text = render(OUTCOMES, OUTCOMES)
    assert "| passed on the EP | 1 | 1 |" in text
    assert "not wholly on the EP: 2." in text
    assert "### in scope (2)\n\n- x \\| y: `node/b`, `node/c_d`\n" in text
    assert "### an old host (1)\n\n- `node/e`\n" in text
    assert "node/a" not in text


def test_a_report_read_back_tells_which_verdicts_changed() -> None:
    optimized = [Outcome("node/a", Verdict.NO_NODE, "", True), *OUTCOMES[1:]]
    keys = [outcome.key for outcome in OUTCOMES]
    first, second = read_verdicts(render(OUTCOMES, optimized), keys)
    assert changes(first, OUTCOMES) == changes(second, optimized) == []
    assert changes(second, OUTCOMES) == ["node/a: passed with no node left to run -> passed on the EP"]
    assert changes(first, [Outcome("node/e", Verdict.WRONG, "1 of 2", True)]) == [
        "node/e: the CPU provider fails too -> wrong 1 of 2"
    ]
    with pytest.raises(ValueError, match="conformance report: got the first line '', expected '# Conformance'"):
        read_verdicts("", keys)


@pytest.mark.parametrize(
    ("key", "placed", "scope"),
    [
        ("node/add", {"Add"}, ""),
        ("node/string_concat", set(), "strings"),
        ("node/if", set(), ""),
        ("node/if_opt", set(), "optional, sequences"),
        ("node/sequence_insert_at_back", {"SequenceInsert"}, "sequences"),
        ("node/ai_onnx_ml_binarizer", set(), "domain ai.onnx.ml"),
        ("node/image_decoder_decode_bmp_rgb", {"ImageDecoder"}, "ImageDecoder"),
        ("node/range_float16_type_positive_delta", {"Range"}, ""),
        ("node/sequence_map_add_1_sequence_1_tensor", set(), "sequences"),
        ("node/reversesequence_time", {"ReverseSequence"}, ""),
    ],
)
def test_what_is_out_of_scope_is_found_in_the_model(key: str, placed: set[str], scope: str) -> None:
    assert out_of_scope(load_case(key).model(), placed) == scope


def test_findings_of_the_checking_mode_fail_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "findings", lambda: ["out-of-bounds: kernel add"])
    outcome = judge(load_case("node/add"), Mode())
    assert (outcome.verdict, outcome.reason) == (Verdict.FAILED, "out-of-bounds: kernel add")


def test_a_mode_reaches_the_worker_and_its_seed_depends_on_the_test() -> None:
    mode = Mode(check=True, seed=5)
    assert mode.environment(jobs=1)["ORT_CUDA_PLUGIN_EMULATE_CHECK"] == "1"
    assert mode.environment(jobs=1)["ORT_CUDA_PLUGIN_EMULATE_STREAMS"] == "adversarial"
    seeds = []
    with configured():
        for key in ("node/abs", "node/add", "node/abs"):
            mode.apply(key)
            seeds.append(current().seed)
    assert seeds[0] == seeds[2] != seeds[1]
    assert {seed >> 32 for seed in seeds} == {5}
