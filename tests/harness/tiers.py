"""The two tiers of the test suite, as a pytest plugin.

``pytest`` runs the first tier, which every change needs. Tests with the marker ``full`` are the second tier. A test has
the marker from its file, or from this plugin for one of two reasons:

- tests/second_tier.txt lists it, because it takes long. A line that ends with ``[*]`` keeps one case in the first tier.
  ``bench/test_time.py --choose`` writes that file;
- in the folders `SAMPLED` the first tier has a sample of the cases of each parametrised test (`sample`), unless the
  test has the marker ``every_case``.

If the command line names a file or a node id, or has an expression of markers (``-m full``, ``-m gpu``, ``-m "full or
not full"``), all tests that match run, of both tiers.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Generator, Sequence, Set
from pathlib import Path

import pytest

SECOND_TIER = Path(__file__).resolve().parent.parent / "second_tier.txt"
"""File with the test functions of the second tier, one node id per line; ``#`` begins a comment."""
FURTHER_CASES = "[*]"
SAMPLED = tuple(f"tests/{folder}/" for folder in ("e2e", "graph", "kernels", "memory", "ops"))
"""Folders whose parametrised tests are sampled, because each case creates sessions or compiles kernels."""
MOST_VALUES = 3
"""Number of values of each parameter that a sample covers."""
TAKES_LONG, FURTHER_CASE = "takes long", "further case"
"""Reasons that this plugin states in the marker ``full``."""


def read_second_tier(path: Path = SECOND_TIER) -> list[str]:
    """Return the node ids of the file."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line]


@functools.cache
def _listed() -> frozenset[str]:
    return frozenset(read_second_tier())


def sample(names: Sequence[str], most_values: int = MOST_VALUES) -> set[str]:
    """Return the cases of one test that are in the first tier. ``names`` are the texts in the brackets of node ids.

    The sample covers the first ``most_values`` values of each parameter, in the order of their hashes (each-choice
    coverage); if it is 1, the sample is one case. The choice depends on the names alone, so it is the same in all
    processes, and a new case changes it little.
    """

    def order(text: str) -> bytes:
        return hashlib.sha256(text.encode()).digest()

    if most_values == 1:
        return {min(names, key=order)}
    values: dict[int, set[str]] = defaultdict(set)
    for name in names:
        for position, value in enumerate(name.split("-")):
            values[position].add(value)
    wanted = {
        (position, value) for position, found in values.items() for value in sorted(found, key=order)[:most_values]
    }
    chosen = set()
    by_gain = {name: wanted & set(enumerate(name.split("-"))) for name in sorted(names, key=order)}
    while wanted:
        best = max(by_gain, key=lambda name: len(by_gain[name] & wanted))
        chosen.add(best)
        wanted -= by_gain[best]
    return chosen


def mark_second_tier(items: Sequence[pytest.Item]) -> None:
    """Give the marker ``full`` to the tests of `SECOND_TIER`, and to the cases outside of samples."""
    listed = _listed()
    cases: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        function, bracket, name = item.nodeid.partition("[")
        if function in listed:
            item.add_marker(pytest.mark.full(reason=TAKES_LONG))
        elif bracket and (function + FURTHER_CASES in listed or may_be_sampled(item)):
            cases[function][name.removesuffix("]")].append(item)
    for function, named in cases.items():
        chosen = first_tier_cases(function, list(named), may_be_sampled(next(iter(named.values()))[0]))
        for name in named.keys() - chosen:
            for item in named[name]:
                item.add_marker(pytest.mark.full(reason=FURTHER_CASE))


def first_tier_cases(function: str, names: Sequence[str], is_sampled: bool) -> Set[str]:
    """Return those of the cases ``names`` of a test that are in the first tier. The cases of the result are in the
    first tier of the result as well.
    """
    chosen: Set[str] = sample(names) if is_sampled else set(names)
    return sample(list(chosen), 1) if function + FURTHER_CASES in _listed() else chosen


def may_be_sampled(node: pytest.Item | pytest.Function) -> bool:
    return node.nodeid.startswith(SAMPLED) and not node.get_closest_marker("every_case")


def _named_files(config: pytest.Config) -> set[Path]:
    return {Path(argument.partition("::")[0]).resolve() for argument in config.args}


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, None, None]:
    """Make no items for cases that this run leaves out, which would take a tenth of a collection's CPU time."""
    yield
    definition, calls = metafunc.definition, metafunc._calls
    if metafunc.config.option.markexpr or definition.path in _named_files(metafunc.config) or len(calls) < 2:
        return
    if definition.nodeid in _listed():
        del calls[1:]  # pytest makes an item even without a call; pytest_collection_modifyitems drops this item
        return
    kept = first_tier_cases(definition.nodeid, [call.id for call in calls], may_be_sampled(definition))
    calls[:] = [call for call in calls if call.id in kept]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_second_tier(items)
    if config.option.markexpr:
        return
    named = _named_files(config)
    left_out = {item for item in items if item.get_closest_marker("full") and item.path not in named}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
