"""An installed cuDNN computes the convolutions and the attention of the benchmark's networks on tensor cores.

Each network is looked at in few types and batches, and in fewer without ``--engines``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import TensorProto

from library_engines import ask, build_asker, calls_of, convolution, lowered, network, question
from ort_cuda_plugin.ep.device.libraries import LIBRARIES
from ort_cuda_plugin.program.lowering.context import LoweringOptions
from ort_cuda_plugin.program.steps.libraries import ATTENTION, CONV, ProblemFlags
from ort_cuda_plugin.program.steps.trace import Launch
from ort_cuda_plugin.schedule import attention as attention_schedule

FLOAT, FLOAT16, BFLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
CHANNELS = 16
"""Smallest number of channels per group for which tensor cores are expected: fewer do not fill their tiles."""


@pytest.fixture(scope="module")
def asker(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    command = build_asker(tmp_path_factory.mktemp("cudnn"))
    if command is None:
        pytest.skip(f"{LIBRARIES[1].package} is not installed")
    return command


@pytest.mark.parametrize(
    ("batch", "element"),
    [
        pytest.param(1, FLOAT, id="1-tf32"),
        pytest.param(32, FLOAT16, marks=pytest.mark.engines, id="32-float16"),
        pytest.param(1, BFLOAT16, marks=pytest.mark.engines, id="1-bfloat16"),
        pytest.param(32, FLOAT, marks=pytest.mark.engines, id="32-tf32"),
    ],
)
@pytest.mark.parametrize(
    ("name", "calls", "own"),
    [
        ("mobilenet_v2", 35, 17),
        ("efficientnet_b0", 33, 48),
        ("unet", 23, 0),
        ("vit_b_16", 1, 0),
        ("whisper_tiny_encoder", 2, 0),
    ],
)
def test_convolutions_have_tensor_cores_where_they_are_due(
    asker: list[str | Path], name: str, calls: int, own: int, batch: int, element: int, request: pytest.FixtureRequest
) -> None:
    """``own`` counts the convolutions that the plugin's kernels compute: depthwise and squeeze-and-excitation ones."""
    layers = {} if own or name == "unet" else {"layers": 1}
    program = lowered(network(name, batch, element, layers))
    convolutions = calls_of(program, CONV)
    assert len({tuple(call.nodes) for call in convolutions}) == calls  # a node may have a call per part of the batch
    assert all(call.problem.flags & ProblemFlags.CHANNELS_LAST for call in convolutions)
    done = {node for call in convolutions for node in call.nodes}
    ours = {
        node
        for launch in program.launches
        if isinstance(launch, Launch)
        for node in launch.nodes
        if node.op_type in ("Conv", "ConvTranspose") and node not in done
    }
    assert len(ours) == own
    if not request.config.getoption("--engines"):
        # cuDNN takes a second to compile an engine with SiLU or ReLU6: ask about only one such call.
        compiled = [call for call in convolutions if call.problem.flags & (ProblemFlags.SWISH | ProblemFlags.RELU6)]
        convolutions = [call for call in convolutions if call not in compiled[1:]]
    for call, engine in zip(convolutions, ask(asker, [question(call) for call in convolutions]), strict=True):
        sizes = convolution(call)
        assert not engine.missing, (sizes, engine)
        due = min(sizes.channels, sizes.rows) // sizes.groups >= CHANNELS
        assert engine.tensor_cores or not due, (sizes, engine)


@pytest.mark.parametrize(
    ("name", "activation", "calls"), [("mobilenet_v2", "ReLU6", 17), ("efficientnet_b0", "SiLU", 16)]
)
def test_activations_of_wide_convolutions_are_part_of_the_call(name: str, activation: str, calls: int) -> None:
    convolutions = calls_of(lowered(network(name, 16, FLOAT16)), CONV)
    assert len({tuple(call.nodes) for call in convolutions if f", {activation}" in call.note}) == calls
    brief = calls_of(lowered(network(name, 16, FLOAT16), LoweringOptions(cudnn_conv_algo_search="DEFAULT")), CONV)
    assert not any(f", {activation}" in call.note for call in brief)


@pytest.mark.parametrize(
    ("name", "batch", "element"),
    [
        ("bert_base", 32, FLOAT16),
        ("vit_b_16", 1, BFLOAT16),
        *(
            pytest.param(name, batch, element, marks=pytest.mark.engines)
            for name in ("bert_base", "vit_b_16", "whisper_tiny_encoder", "llama_prefill", "llama_decode")
            for batch in (1, 16)
            for element in (FLOAT16, BFLOAT16)
        ),
    ],
)
def test_attention_of_half_types_is_cudnns(
    monkeypatch: pytest.MonkeyPatch, asker: list[str | Path], name: str, batch: int, element: int
) -> None:
    """Also covers a mask per layer: with one layer, the mask is not shared between layers."""
    monkeypatch.setattr(attention_schedule, "flash_wave", lambda ctx, step: None)
    tokens = {"tokens": 64} if name.startswith(("bert", "llama")) else {}
    (call,) = calls_of(lowered(network(name, batch, element, {"layers": 1, **tokens})), ATTENTION)
    (engine,) = ask(asker, [question(call)])
    assert engine.tensor_cores, engine
    assert engine.workspace < 1 << 20


@pytest.mark.parametrize(
    ("name", "unknown", "shapes", "calls"),
    [
        ("llama_decode", ["past"], [[1, 1], [1, 8, 1024, 64], [1, 8, 1024, 64]], 0),
        ("bert_base", ["sequence"], [[1, 128], [1, 128]], 1),
    ],
)
def test_attention_to_a_cache_that_grows_is_not_cudnns(
    monkeypatch: pytest.MonkeyPatch, name: str, unknown: list[str], shapes: list[list[int]], calls: int
) -> None:
    """cuDNN would have to compile an engine for each token, as each one makes the cache longer."""
    monkeypatch.setattr(attention_schedule, "flash_wave", lambda ctx, step: None)
    program = lowered(network(name, 1, FLOAT16, {"layers": 1, "tokens": 64}, unknown), shapes=shapes)
    assert len(calls_of(program, ATTENTION)) == calls


def test_attention_of_float32_is_not_cudnns() -> None:
    """cuDNN has no engine for it: the plugin runs one kernel for few scores, and GEMMs and a softmax for many."""
    assert not calls_of(lowered(network("vit_b_16", 1, FLOAT, {"layers": 1})), ATTENTION)
