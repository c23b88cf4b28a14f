"""Profiles of random networks: a profile and a seed determine a network."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fuzzing import makers_bodies, makers_maps, makers_sizes, makers_sums
from fuzzing.network import BOOL, FLOAT, FLOAT16, INT32, INT64, Array, Case, Grower

Maker = Callable[[Grower], object]
ATTEMPTS = 40
"""Maximum attempts per wanted node, after which a network is finished."""


class Profile(enum.StrEnum):
    SIZES = "sizes"
    """Networks of shape arithmetic, on the host and on the device."""
    GRAPHS = "graphs"
    """Networks of all operators."""


def make_case(profile: Profile, seed: int) -> Case:
    """Return the network with this seed, and the options that it runs with."""
    grow = {Profile.SIZES: _sizes, Profile.GRAPHS: _graph}[profile]
    return grow(seed)


def _sizes(seed: int) -> Case:
    # The last Run has the first Run's sizes and other contents, so that stale values of earlier Runs are noticed.
    run = {"b": 2, "s": 3, "n": 4}
    g = Grower(seed, [run, {"b": 1, "s": 1, "n": 5}, {"b": 4, "s": 2, "n": 0}, run])
    integers = _numbers(g)
    for kind, dims in g.random.sample(
        [
            (FLOAT, ("b",)),
            (FLOAT, ("b", "s")),
            (FLOAT, ("s", "n", 2)),
            (INT64, (1,)),
            (INT64, (3,)),
            (INT64, ()),
            (INT32, ("n",)),
            (INT64, ("s", 2)),
            (INT32, ()),
        ],
        g.random.randint(2, 4),
    ):
        g.input(kind, dims, integers)
    _grow(g, makers_sizes.MAKERS, g.random.randint(3, 14))
    return g.case(_options(g), g.random.random() < 0.4, read_outputs=0.4)


def _graph(seed: int) -> Case:
    run = {"b": 2, "s": 3, "n": 6}
    runs = [run, {"b": 1, "s": 5, "n": 1}, {"b": 3, "s": 2, "n": 9}, run]
    if seed % 3 == 0:
        runs[1] = {"b": 2, "s": 0, "n": 4}
    g = Grower(seed, runs, tf32=seed % 4 == 0)
    shapes = [
        (FLOAT, ()),
        (FLOAT, ("n",)),
        (FLOAT, ("b", "s", 8)),
        (FLOAT, ("s", 8)),
        (FLOAT, ("b", 1, "n")),
        (FLOAT, ("b", 4, "s", "n")),
        (FLOAT, ("b", 3, 5, 6)),
        (FLOAT, (2, 4, 6)),
        (FLOAT, ("b", 2, 1, "s", 3, 2)),
        (FLOAT16, ("b", "s", 8)),
        (FLOAT16, ("b", 4, 6)),
        (INT64, ("b", "s")),
        (INT32, ("n",)),
        (BOOL, ("s",)),
    ]
    for kind, dims in g.random.sample(shapes, g.random.randint(2, 4)):
        g.input(kind, dims, _numbers(g) if kind in (INT64, INT32, BOOL) else g.rng.standard_normal)
    makers: dict[Maker, float] = {**makers_maps.MAKERS, **makers_sums.MAKERS, **makers_bodies.MAKERS}
    if g.random.random() < 0.3:
        makers |= {maker: weight / 2 for maker, weight in makers_sizes.MAKERS.items()}
    _grow(g, makers, g.random.randint(5, 40))
    options = _options(g)
    return g.case(options if g.tf32 else {**options, "use_tf32": "0"}, g.random.random() < 0.4)


def _numbers(g: Grower) -> Callable[[tuple[int, ...]], Array]:
    return lambda shape: np.asarray(g.rng.integers(0, 4, shape))


def _grow(g: Grower, makers: Mapping[Any, float], nodes: int) -> None:
    weights = list(makers.values())
    attempts = ATTEMPTS * nodes
    while len(g.nodes) < nodes and attempts:
        attempts -= 1
        g.random.choices(list(makers), weights)[0](g)


def _options(g: Grower) -> dict[str, str]:
    """Return random provider options, mostly none."""
    return g.random.choice(
        [
            *[{}] * 6,
            {"fusion": "0"},
            {"automatic_cuda_graphs": "0"},
            {"deterministic": "1"},
            {"single_nodes": "1"},
        ]
    )
