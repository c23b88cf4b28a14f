"""The commands explain and estimate with a weight budget; profiles attribute the copies of a CUDA graph."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from onnx import save

from ort_cuda_plugin import cli, gpus
from ort_cuda_plugin.estimate.transfers.weight_streaming import Streaming, streaming
from streamed_weights import LAYER_BYTES, layers

MIB = 1 << 20


def copies_of(seconds: float, device: gpus.Gpu, budget: int) -> Streaming:
    """Return the copies of a Run with 8 steps of ``seconds``; step i reads weight i, of 1 MiB."""
    return streaming(dict.fromkeys(range(8), MIB), [{i} for i in range(8)], (), [seconds] * 8, device, budget)


def test_slow_steps_hide_the_copies() -> None:
    h100 = gpus.gpu("h100")
    once = MIB / h100.copied_per_second
    copies = copies_of(10 * once, h100, 4 * MIB)
    assert (copies.resident, copies.copies, copies.nbytes) == (2 * MIB, 6, 6 * MIB)
    assert copies.link_seconds == pytest.approx(6 * once)
    assert copies.waiting == 0


def test_fast_steps_wait_for_the_link() -> None:
    h100 = gpus.gpu("h100")
    copies = copies_of(0.0, h100, 2 * MIB)
    assert copies.waiting == pytest.approx(copies.link_seconds) == pytest.approx(8 * MIB / h100.copied_per_second)


def test_explain_prints_the_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layers.onnx"
    save(layers(4, batch=2), path)
    assert cli.main(["explain", str(path), "--device", "emulated", "--weight-budget", "3M"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        f"budget {3 * MIB} bytes, {LAYER_BYTES} bytes of resident weights, ring of {2 * LAYER_BYTES} bytes" in lines[0]
    )
    assert lines[1].startswith(f"a Run copies {3 * LAYER_BYTES} bytes of 3 weights, ")
    assert " ms on the link of " in lines[1]
    assert lines[2:] == [
        f"  before step {issue}: w{step}, {LAYER_BYTES} bytes, for step {step}: tanh{step} (Tanh)"
        for issue, step in ((0, 1), (0, 2), (2, 3))
    ]


def test_explain_says_that_all_weights_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layers.onnx"
    save(layers(2), path)
    assert cli.main(["explain", str(path), "--device", "emulated", "--weight-budget", "50%"]) == 0
    assert "All weights stay in device memory" in capsys.readouterr().out


def test_estimate_includes_the_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, figures = tmp_path / "layers.onnx", tmp_path / "figures.json"
    save(layers(6, batch=1), path)
    arguments = ["estimate", str(path), "--uncalibrated", "--json", str(figures)]
    assert cli.main(arguments) == 0
    whole = json.loads(figures.read_text())
    assert whole["streaming"] is None
    assert cli.main([*arguments, "--weight-budget", "3M"]) == 0
    found = json.loads(figures.read_text())
    copies = found["streaming"]
    assert copies["nbytes"] == copies["copies"] * LAYER_BYTES // 2 > 0  # kernels with TF32 store weights as float16
    assert found["seconds"] == pytest.approx(whole["seconds"] + copies["waiting"])
    assert copies["waiting"] > 0
    assert "MB of weights are resident; a Run copies" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("budget", "why"), [("25%", "expected bytes"), ("much", "a share"), ("1000", "at least")])
def test_estimate_refuses_a_budget(budget: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layers.onnx"
    save(layers(2, batch=1), path)
    with contextlib.suppress(SystemExit):
        assert cli.main(["estimate", str(path), "--weight-budget", budget]) != 0
    assert why in capsys.readouterr().err
