"""The selftest finds wrong kernels, names and quarantines them, and the next session is right."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from onnx import parser

import ort_cuda_plugin
from isolated import HARNESS, ROOT, python
from ort_cuda_plugin.cli import main
from ort_cuda_plugin.cli.exit_codes import ExitCode
from ort_cuda_plugin.clusters.tuning import kernels_digest
from ort_cuda_plugin.compiler.caches.quarantine_cache import QuarantineCache
from ort_cuda_plugin.doctor.quarantine import quarantine_findings
from ort_cuda_plugin.ep.device import quarantined
from ort_cuda_plugin.ep.device.thread_value import ThreadValue
from ort_cuda_plugin.program.steps.quarantine import QuarantinedOperator, QuarantinedSchedule
from ort_cuda_plugin.program.steps.schedule import Engine
from ort_cuda_plugin.selftest import runner
from ort_cuda_plugin.selftest.device import Device, describe
from ort_cuda_plugin.selftest.quarantining import quarantined_by
from ort_cuda_plugin.selftest.sections.case import Verdict
from ort_cuda_plugin.selftest.selftest import lift, selftest
from ort_cuda_plugin.selftest.worker import Request
from selftests import InProcess, own_quarantine, wrong_products

DYING = HARNESS / "dying_selftest.py"
PRODUCT = "product 33x130x65, float"
MODEL = parser.parse_model(
    '<ir_version: 10, opset_import: ["": 23]> g (float[33, 130] x, float[130, 65] w) => (float[33, 65] y) '
    "{ y = MatMul(x, w) }"
).SerializeToString()


def product() -> tuple[list[str], bool]:
    """Run a MatMul in a new session, unless it is declined; return the reasons for that, and whether the result is
    right.
    """
    rng = np.random.default_rng(0)
    x, w = rng.integers(-2, 3, (33, 130)), rng.integers(-2, 3, (130, 65))
    feeds = {"x": x.astype(np.float32), "w": w.astype(np.float32)}
    options = {"claim_unprofitable_nodes": "1"}
    declined = [v.reason for v in ort_cuda_plugin.explain(MODEL, emulate=True, provider_options=options) if v.reason]
    if declined:
        return declined, True
    session = ort_cuda_plugin.session(MODEL, emulate=True, provider_options=options)
    return [], bool(np.array_equal(session.run(None, feeds)[0], (x @ w).astype(np.float32)))


def test_a_wrong_kernel_is_found_named_and_quarantined_and_avoided(tmp_path: Path) -> None:
    with own_quarantine(tmp_path), wrong_products(Engine.SIMT):
        assert not product()[1]
        report = selftest(InProcess(PRODUCT), ["gemm"], is_quick=True)
        wrong = [result for result in report.results if result.verdict is Verdict.FAIL]
        assert {result.schedule for result in wrong} >= {"", "simt 64x64x16"}
        assert "elements are wrong" in wrong[0].reason
        assert "gemm f32 simt 64x64x16" in map(str, report.quarantined)
        assert report.has_failed
        declined, is_right = product()
        assert is_right
        assert any(
            "not used on this device because it failed ort-cuda-plugin selftest" in reason for reason in declined
        ), declined
    with own_quarantine(tmp_path):
        report = selftest(InProcess(PRODUCT), ["gemm"], is_quick=True)
        assert not report.has_failed
        assert report.quarantined == []
        assert product() == ([], True)


def test_the_command_passes_on_the_emulated_device_and_writes_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    command = [
        "selftest",
        "--device",
        "emulated",
        "--quick",
        "--sections",
        "order",
        "--no-quarantine",
        "--json",
        str(file),
    ]
    assert main(command) == ExitCode.OK, capsys.readouterr()
    report = json.loads(file.read_text())
    fields = documented_fields()
    assert report.keys() == fields - {"checks"}
    assert {"checks", *report["sections"][0]} <= {"name", "ended", *fields}
    assert report["passed"]
    assert report["counts"]["FAIL"] == 0
    assert len(capsys.readouterr().out.splitlines()) < 20


def documented_fields() -> set[str]:
    text = (ROOT / "docs" / "selftest.md").read_text().split("## The JSON report")[1].split("##")[0]
    rows = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_a_damaged_quarantine_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = QuarantinedSchedule("gemm", "f32", "simt", "", "a test says so")
    for position, damage in enumerate(DAMAGES):
        folder = tmp_path / str(position)
        with own_quarantine(folder):
            assert quarantined.store("a device", [entry])
            assert quarantined.load_by("a device").entries == (entry,)
            assert quarantined.load_by("another device").entries == ()
            (file,) = folder.iterdir()
            file.write_bytes(damage(file.read_bytes()))
        with own_quarantine(folder):
            caplog.clear()
            assert quarantined.load_by("a device").entries == ()
            assert "is damaged" in caplog.text or "is not used" in caplog.text
            assert quarantined.store("a device", [entry])


def signed(body: object) -> bytes:
    data = json.dumps(body).encode()
    return QuarantineCache.magic + hashlib.sha256(data).digest() + data


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda data: b"",
    lambda data: data[:-1],
    lambda data: data[:-3] + b"\xff" + data[-2:],
    lambda data: b"x" * (2 << 20),
    lambda data: signed([]),
    lambda data: signed(["a device", 1, []]),
    lambda data: signed(["a device", "", [1]]),
    lambda data: signed(["a device", "", [{"kind": 1}]]),
    lambda data: signed(["a device", "", [{"kind": "x" * 4096}]]),
    lambda data: signed("[" * 100000),
]
"""Damages of the quarantine's file; the last ones have a valid checksum."""


def test_the_identity_of_a_device_does_not_depend_on_what_the_process_has_loaded() -> None:
    """A selftest has loaded the libraries when it stores a quarantine, and a new session has not when it asks for it.

    The GPU of the first part has no libraries of its own: the emulated device's information stands in.
    """
    code = """
    from dataclasses import replace
    from ort_cuda_plugin.ep.device.devices import emulated_devices
    from ort_cuda_plugin.ep.device.libraries import load_libraries
    from ort_cuda_plugin.ep.device.open_device import OpenDevice
    def identity(emulated):
        device = object.__new__(OpenDevice)
        device.info = replace(emulated_devices()[0], emulated=emulated)
        return device.identity
    before = identity(True), identity(False)
    loaded = load_libraries()
    assert before == (identity(True), identity(False)), before
    assert all(f"{name} absent" not in before[1] for name in loaded), before
    assert "cublaslt absent, cudnn absent" in before[0], before
    """
    python(code)


def test_entries_of_another_version_are_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with own_quarantine(tmp_path) as cache:
        assert cache.store("a device", kernels_digest(), [{"kind": "of a later version"}])
        assert quarantined.load_by("a device").entries == ()
        assert quarantined.store("a device", [QuarantinedOperator("Relu", "f32")])
        monkeypatch.setattr(quarantined, "kernels_digest", lambda: "other kernels")
        assert quarantined.load_by("a device").entries == ()


def test_an_operator_is_declined_for_the_type_that_is_quarantined_and_doctor_says_so(tmp_path: Path) -> None:
    device = Device(is_emulated=True)
    with own_quarantine(tmp_path):
        quarantined.store(describe(device)["identity"], [QuarantinedOperator("MatMul", "f32", "it is wrong")])
        (reason,) = product()[0]
        assert reason == "MatMul f32 is not used on this device because it failed ort-cuda-plugin selftest: it is wrong"
        (finding,) = quarantine_findings([device.opened.info])
        assert "MatMul f32" in finding.text
        assert finding.advice
        assert [str(entry) for entry in lift(device)] == ["MatMul f32"]
        assert product() == ([], True)


def test_a_check_that_ends_its_process_or_hangs_fails_by_name_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "python_command", lambda *arguments, **more: [sys.executable, str(DYING)])
    monkeypatch.setattr(runner, "TIMEOUT_S", 2.0)
    runs = runner.Runner(Device(is_emulated=True))
    report = runs.run(Request("of a test"))
    runs.close()
    found = [(result.name, result.verdict.value) for result in report.results]
    assert found == [("crashes with a schedule", "FAIL"), ("hangs", "FAIL"), ("loses", "FAIL")]
    assert "exit code 3: out of order" in report.results[0].reason
    assert [*map(str, quarantined_by(report.results))] == ["Relu f32"]
    assert report.results[1].reason == "the process of the checks gave no answer within 2 s"
    assert "ended in check 'loses'" in report.ended


def test_a_value_of_a_thread_is_replaced_in_nested_blocks_and_not_in_other_threads() -> None:
    value = ThreadValue("default")
    seen = []
    with value.replaced_by("outer"):
        with suppress(KeyError), value.replaced_by("inner"):
            seen.append(value.value)
            raise KeyError
        thread = threading.Thread(target=lambda: seen.append(value.value))
        thread.start()
        thread.join()
        seen.append(value.value)
    assert [*seen, value.value] == ["inner", "default", "outer", "default"]
