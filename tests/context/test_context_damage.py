"""Contexts with wrong contents and matching hashes: loading fails with ONNX Runtime's error, or the session runs."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contexts import BINARY, compile_model, container_of, load, rewrite, rows, two_clusters
from ort_cuda_plugin.context.describe import describe
from ort_cuda_plugin.context.storage.container import to_json
from ort_cuda_plugin.context.storage.errors import ContextError

MUTANTS = {"index": 40, "graph": 60}
JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    7,
    2**31,
    2**63,
    2**200,
    1.5,
    "",
    "x",
    "a/../b",
    [],
    {},
    [0],
    {"a": 1},
    [[[]]],
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path (keys and indices) of each value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def mutate(value: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON value in which one random inner value is replaced, removed or duplicated."""
    changed = copy.deepcopy(value)
    *way, last = rng.choice(list(places(value)))
    owner = changed
    for key in way:
        owner = owner[key]
    action = rng.randrange(4)
    if action == 0:
        del owner[last]
    elif action == 1 and isinstance(owner, list):
        owner.append(copy.deepcopy(owner[last]))
    elif action == 2 and type(owner[last]) is int:
        owner[last] += rng.choice([-1, 1, 64])
    else:
        owner[last] = rng.choice(JUNK)
    return changed


@pytest.mark.parametrize("what", ["index", "graph"])
def test_a_context_that_contradicts_itself(tmp_path: Path, what: str) -> None:
    compile_model(two_clusters(), tmp_path / "m_ctx.onnx")
    path = tmp_path / BINARY.format("m")
    (tmp_path / "right.bin").write_bytes(path.read_bytes())
    container = container_of(tmp_path / "right.bin")
    rng = random.Random(what)
    graph = container.index["partitions"][1]["graph"]
    outcomes = {"refused": 0, "ran": 0}
    for _ in range(MUTANTS[what]):
        index, replaced = container.index, {}
        if what == "index":
            index = mutate(index, rng)
        else:
            replaced[graph] = to_json(mutate(json.loads(bytes(container.array(graph))), rng))
        rewrite(container, path, index, replaced)
        with contextlib.suppress(ContextError):
            describe(container_of(path))
        try:
            # Without host code: the plugin does not check machine code that the user allowed, so none may run here.
            load(tmp_path / "m_ctx.onnx", host_code=False).run(None, {"x": rows(2, 3)})
            outcomes["ran"] += 1
        except Exception as error:
            message = str(error)
            assert "[ONNXRuntimeError]" in message
            assert ".py:" not in message, message  # a traceback would be a bug of the plugin
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0, outcomes
