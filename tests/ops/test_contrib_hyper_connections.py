"""Streams and gates of com.microsoft against the CPU provider: their layouts, gates of another type."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from contributed import BFLOAT16, FLOAT, FLOAT16, check_node, noise
from emulator_harness import configured

C, H = 3, 5


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with configured(adversarial=1, check=1):
        yield


def test_pre_mix() -> None:
    grouped, flat = noise(2, 3, C, H), noise(2, 3, C * H)
    check_node("HyperConnectionPreMix", [grouped, noise(2, 3, C, seed=1)], {"reduction_scale": 0.4}, reals=[FLOAT])
    gates = noise(2, 3, C * H, seed=1)
    check_node("HyperConnectionPreMix", [flat, gates], {"num_branches": C}, wide=[1], reals=[FLOAT16])


def test_post_mix() -> None:
    grouped, flat, block = noise(2, 3, C, H), noise(2, 3, C * H), noise(2, 3, H, seed=1)
    check_node("HyperConnectionPostMix", [grouped, block, noise(2, 3, C, H, seed=2)], reals=[FLOAT])
    mixed = [flat, block, noise(2, 3, C, 1, seed=2), noise(2, 3, C, C, seed=3)]
    check_node("HyperConnectionPostMix", mixed, {"num_branches": C}, reals=[BFLOAT16], wide=[2, 3])


def test_branchwise_rms_norm() -> None:
    check_node("BranchwiseRMSNorm", [noise(2, C, H), noise(C * H, seed=1)], {"epsilon": 0.1}, reals=[FLOAT])
    flat = [noise(2, C * H), noise(H, seed=1)]
    check_node("BranchwiseRMSNorm", flat, {"num_branches": C}, reals=[FLOAT16], wide=[1])


def test_engram_gate() -> None:
    inputs = [noise(2, 3, C, H), noise(2, 3, C, H, seed=1), noise(2, 3, H, seed=2)]
    scales = [noise(C, H, seed=3 + i) for i in range(3)]
    check_node("EngramGate", [*inputs, *scales], {"epsilon": 1e-3}, [FLOAT, FLOAT], reals=[FLOAT16])
