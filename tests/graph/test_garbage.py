"""Python's garbage collector: it does not run while plans are built, and plans leave no reference cycles."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import onnx
import onnx.parser
import pytest

import ort_cuda_plugin
from encoder import encoder
from ort_cuda_plugin.clusters.cycle_collection import paused
from ort_cuda_plugin.program.lowering.context import Lowering
from session_pair import ep_session

PACKAGE = Path(ort_cuda_plugin.__file__).parent
PLANNING = tuple(
    str(PACKAGE / folder) for folder in ("clusters/nodes", "ops", "passes", "program", "schedule", "kernels")
)
POOLS = """
    <ir_version: 8, opset_import: ["" : 17]>
    pools (float[1, 4, 12, 12] x) => (float[1, 4, 2, 2] y)
    {
        a = MaxPool <kernel_shape = [3, 3], strides = [2, 2]> (x)
        b = AveragePool <kernel_shape = [2, 2]> (a)
        c = Sigmoid (b)
        y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (c)
    }
"""


@pytest.fixture
def thresholds() -> Iterator[None]:
    """Let every 50th new object start a collection of all generations."""
    before = gc.get_threshold()
    gc.set_threshold(50, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def is_planning() -> bool:
    """Return whether this thread executes code that claims nodes or builds a plan."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(PLANNING):
            return True
        frame = frame.f_back
    return False


def test_no_collection_starts_while_nodes_are_claimed_and_plans_are_built(thresholds: None) -> None:
    collections: list[bool] = []

    def note(phase: str, info: object) -> None:
        if phase == "start":
            collections.append(is_planning())

    gc.callbacks.append(note)
    try:
        ep_session(onnx.parser.parse_model(POOLS).SerializeToString())
    finally:
        gc.callbacks.remove(note)
    assert collections
    assert not any(collections)


@pytest.mark.parametrize("model", ["encoder", "pools"])
def test_a_finished_plan_frees_its_program_without_the_collector(model: str) -> None:
    def programs() -> int:
        return sum(isinstance(each, Lowering) for each in gc.get_objects())

    graph = encoder(layers=1) if model == "encoder" else onnx.parser.parse_model(POOLS)
    with paused():
        before = programs()
        session = ep_session(graph.SerializeToString())
        assert programs() == before
        del session


@pytest.mark.parametrize("was_enabled", [True, False], ids=["enabled", "disabled"])
def test_the_collector_resumes_with_the_last_of_overlapping_pauses(was_enabled: bool) -> None:
    inside, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with paused():
            inside.set()
            leave.wait(10)

    other = threading.Thread(target=pause)
    try:
        if not was_enabled:
            gc.disable()
        other.start()
        assert inside.wait(10)
        with pytest.raises(KeyError), paused():
            raise KeyError
        assert not gc.isenabled()
        leave.set()
        other.join()
        assert gc.isenabled() == was_enabled
    finally:
        leave.set()
        gc.enable()
