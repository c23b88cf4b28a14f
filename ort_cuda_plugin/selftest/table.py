"""The sections of the selftest, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from .device import Device
from .driver_checks import driver_checks
from .judge import Begins, judge
from .sections import attention, conv, elementwise, gemm, images, movement, ordered, quantized, recurrence, rows
from .sections.case import Case, Result

Check = Callable[[Begins], Iterator[Result]]
"""Type of a function that runs a check and yields its results. The function calls its argument before each Run."""


@dataclass(frozen=True)
class Section:
    """A subject of checks. ``checks`` yields a function for each check, by name; the function yields the results."""

    name: str
    checks: Callable[[Device, bool], Iterator[tuple[str, Check]]]


def of_cases(cases: Callable[[bool], Iterator[Case]]) -> Callable[[Device, bool], Iterator[tuple[str, Check]]]:
    """Return the checks of models."""

    def checks(device: Device, is_quick: bool) -> Iterator[tuple[str, Check]]:
        for case in cases(is_quick):
            yield case.name, partial(judge, case, device)

    return checks


SECTIONS = (
    Section("gemm", of_cases(gemm.cases)),
    Section("convolution", of_cases(conv.cases)),
    Section("attention", of_cases(attention.cases)),
    Section("reduction", of_cases(rows.cases)),
    Section("order", of_cases(ordered.cases)),
    Section("elementwise", of_cases(elementwise.cases)),
    Section("movement", of_cases(movement.cases)),
    Section("recurrence", of_cases(recurrence.cases)),
    Section("image", of_cases(images.cases)),
    Section("quantization", of_cases(quantized.cases)),
    Section("driver", driver_checks),
)
