"""An installed cuDNN has engines for the plugin's problems; it plans for a described device."""

from __future__ import annotations

import itertools
from pathlib import Path

import onnx
import pytest

from encoder import encoder, encoder_inputs
from library_engines import ask, build_asker, calls_of, halved, lowered, optimized, question
from ort_cuda_plugin import models
from ort_cuda_plugin.ep.device.libraries import LIBRARIES
from ort_cuda_plugin.program.steps.libraries import ATTENTION, CONV, WORKSPACE_BYTES, ProblemFlags
from ort_cuda_plugin.schedule import attention as attention_schedule

BIAS, RELU, RESIDUAL, LAST = ProblemFlags.BIAS, ProblemFlags.RELU, ProblemFlags.RESIDUAL, ProblemFlags.CHANNELS_LAST
FORMS = (ProblemFlags(0), BIAS, BIAS | RELU, BIAS | RESIDUAL, BIAS | RESIDUAL | RELU)
TYPES = {1: 4, 10: 2, 16: 2, 11: 8}
"""Bytes per element of FLOAT, FLOAT16, BFLOAT16 and DOUBLE, by ONNX's number of the type."""
CONVOLUTIONS = [
    # Images, channels, rows, groups, then size, kernel, stride, dilation and pad along each dimension.
    (1, 3, 64, 1, 224, 7, 2, 1, 3), (32, 256, 512, 1, 56, 1, 2, 1, 0), (1, 512, 512, 1, 7, 3, 1, 1, 1),
    (1, 32, 32, 32, 112, 3, 1, 1, 1), (8, 96, 96, 96, 56, 3, 2, 1, 1), (1, 128, 128, 32, 28, 3, 1, 1, 1),
    (2, 5, 7, 1, 9, 3, 1, 2, 2), (1, 1, 1, 1, 5, 5, 1, 1, 2), (3, 6, 9, 3, 17, 4, 3, 1, 0),
    (64, 12, 24, 2, 65, 5, 2, 3, 4), (1, 1024, 1000, 1, 1, 1, 1, 1, 0), (4, 384, 384, 384, 31, 7, 1, 1, 3),
]  # fmt: skip


@pytest.fixture(scope="module")
def asker(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    command = build_asker(tmp_path_factory.mktemp("cudnn"))
    if command is None:
        pytest.skip(f"{LIBRARIES[1].package} is not installed")
    return command


def form(sizes: tuple[int, ...], dtype: int, flags: ProblemFlags, rank: int, loose: bool) -> str:
    """Return the question about a convolution. If it is ``loose``, the result's images or pixels are strided and
    aligned only to elements.
    """
    images, channels, rows, groups, size, kernel, stride, dilation, pad = sizes
    places = (size + 2 * pad - (kernel - 1) * dilation - 1) // stride + 1
    dense = rows if flags & LAST else rows * places**rank
    along = [size, kernel, places, stride, dilation, pad, pad] * rank
    values = [images, channels, rows, groups, 3 * dense if loose else dense, *along, WORKSPACE_BYTES]
    address = -TYPES[dtype] if loose else -256
    return " ".join(map(str, [len(values), CONV, dtype, int(flags), rank, 1.0, address, *values]))


@pytest.mark.engines
@pytest.mark.parametrize("batch", [1, 8])
def test_attention_of_an_encoder_is_cudnns(
    monkeypatch: pytest.MonkeyPatch, asker: list[str | Path], batch: int
) -> None:
    monkeypatch.setattr(attention_schedule, "flash_wave", lambda ctx, step: None)
    model, feeds = encoder(), encoder_inputs(batch, 128)
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, feeds[value.name].shape, strict=True):
            dim.dim_value = size
    program = lowered(halved(optimized(model, batch)))
    calls = calls_of(program, ATTENTION)
    assert len(calls) == 6
    assert len({question(call) for call in calls}) == 1  # one plan serves all layers
    (engine,) = ask(asker, [question(calls[0])])
    assert engine.tensor_cores, engine
    assert engine.workspace < 1 << 20
    assert engine.loading >= 0, engine
    assert engine.saved > 1 << 14, engine  # it contains the kernel that cuDNN compiled


def test_a_result_whose_places_are_apart_takes_a_workspace_of_its_size(asker: list[str | Path]) -> None:
    """This shows that cuDNN writes the result to the workspace first and then copies it."""
    images, channels, rows, size = 32, 128, 256, 13
    text = form((images, channels, rows, 1, size, 3, 1, 1, 1), 1, BIAS | RELU | LAST | ProblemFlags.TF32, 2, False)
    together, numbers = text.split(), text.split()
    numbers[7 + 4] = str(rows + 64)
    dense, apart = ask(asker, [" ".join(together), " ".join(numbers)])
    assert dense.tensor_cores
    assert apart.tensor_cores
    assert dense.workspace < 1 << 12
    assert 0 <= apart.workspace - images * rows * size**2 * 4 < 1 << 12


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.engines, id="all"), pytest.param(11, id="sample")])
def test_cudnn_has_a_plan_for_each_form_of_each_convolution(asker: list[str | Path], step: int) -> None:
    questions = []
    for sizes, dtype, flags, rank in itertools.product(CONVOLUTIONS, TYPES, FORMS, (2, 3)):
        if (dtype == 11 and flags) or (rank == 3 and sizes[4] > 20):
            continue
        for more in (ProblemFlags.TF32, ProblemFlags.DETERMINISTIC, ProblemFlags.TF32 | LAST):
            if dtype == 11 and more & LAST:
                continue
            for loose in (False, True):
                if not (loose and flags & RESIDUAL):
                    questions.append(form(sizes, dtype, flags | more, rank, loose))
    assert len(questions) > 500
    questions = questions[::step]
    answers = zip(questions, ask(asker, questions), strict=True)
    missing = [f"{question}: {engine.missing}" for question, engine in answers if engine.missing or engine.loading < 0]
    assert not missing  # each form has a plan, which can be stored and loaded


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.engines, id="all"), pytest.param(24, id="sample")])
def test_cudnn_compiles_convolutions_with_other_activations(asker: list[str | Path], every: int) -> None:
    """Asks about those with enough channels for tensor cores; cuDNN compiles each for a second or more."""
    wide = [sizes for sizes in CONVOLUTIONS if sizes[3] == 1 and min(sizes[1:3]) >= 16]
    asked = [
        (form(sizes, dtype, BIAS | activation | more | ProblemFlags.TF32 | LAST, 2, loose), loose)
        for sizes, dtype, activation, more, loose in itertools.product(
            wide, (1, 10, 16), (ProblemFlags.SWISH, ProblemFlags.RELU6), (ProblemFlags(0), RESIDUAL), (False, True)
        )
        if not (loose and more)
    ][::every]
    for (text, loose), engine in zip(asked, ask(asker, [text for text, _ in asked]), strict=True):
        assert not engine.missing, (text, engine)
        assert engine.tensor_cores or loose, (text, engine)
        assert engine.loading >= 0, (text, engine)


@pytest.mark.parametrize(
    ("batch", "half"),
    [
        pytest.param(1, False, marks=pytest.mark.engines, id="1-tf32"),
        pytest.param(1, True, marks=pytest.mark.engines, id="1-float16"),
        pytest.param(32, False, id="32-tf32"),
        pytest.param(32, True, marks=pytest.mark.engines, id="32-float16"),
    ],
)
def test_each_convolution_of_resnet50_has_tensor_cores(asker: list[str | Path], batch: int, half: bool) -> None:
    model = optimized(models.with_noise_weights(onnx.load(models.wheel_models()["light_resnet50"])), batch)
    program = lowered(halved(model) if half else model)
    calls = calls_of(program, CONV)
    assert len(calls) == 53
    assert all(call.problem.flags & LAST for call in calls)
    # Besides the library calls, kernels copy the image, pool twice and compute the softmax.
    assert len(program.launches) == 53 + 1 + 4
    assert program.traffic.asked.total <= 1.05 * program.traffic.compulsory.total
    engines = ask(asker, [question(call) for call in calls])
    assert all(engine.tensor_cores for engine in engines), engines
    assert sum(engine.workspace > 2 << 20 for engine in engines) <= 1, engines
