"""Kernels that are lowered for a GPU, run on the emulated device in its checking mode."""

from __future__ import annotations

import pytest

from emulator_harness import configured
from kernel_harness import device
from ort_cuda_plugin.conformance.cases import load_case
from ort_cuda_plugin.conformance.mode import Mode
from ort_cuda_plugin.conformance.verdict import Verdict, judge
from ort_cuda_plugin.ep.device.devices import LOWERING_VARIABLE, emulated_properties
from ort_cuda_plugin.program.lowering.context import DeviceProperties

SAMPLE = (
    "node/softmax_axis_1",
    "node/layer_normalization_3d_axis1_epsilon",
    "pytorch-operator/operator_reduced_mean",
    "node/matmul_3d",
    "node/basic_conv_with_padding",
    "node/convtranspose_pads",
    "node/maxpool_2d_pads",
    "node/averagepool_2d_same_upper",
    "node/attention_4d_causal",
    "node/cumsum_2d_axis_1",
    "node/top_k",
    "node/lstm_with_peepholes",
    "node/transpose_all_permutations_4",
    "node/resize_upsample_scales_linear",
)


@pytest.mark.parametrize("key", SAMPLE)
def test_what_is_lowered_for_a_gpu_passes_in_the_checking_mode(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOWERING_VARIABLE, "sm_90")
    with configured(check=1):
        outcome = judge(load_case(key), Mode(check=True))
    assert outcome.verdict is Verdict.ON_EP, outcome


def test_the_variable_names_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOWERING_VARIABLE, raising=False)
    assert emulated_properties() == DeviceProperties()
    for text, capability, multiprocessors in (("sm_90:114", (9, 0), 114), (" sm_120 ", (12, 0), 170)):
        monkeypatch.setenv(LOWERING_VARIABLE, text)
        assert device().properties() == DeviceProperties(False, frozenset(), capability, multiprocessors)
    for text in ("H100", "sm_9", "sm_90:0", "sm_90:"):
        monkeypatch.setenv(LOWERING_VARIABLE, text)
        with pytest.raises(ValueError, match=f"^{LOWERING_VARIABLE}: expected a GPU such as sm_90, sm_90:132 "):
            emulated_properties()
