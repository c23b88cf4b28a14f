"""A sample of the orders in harness/destruction_orders.py, which explains the letters."""

from __future__ import annotations

import pytest

from destruction_orders import failing_end, failing_order, orders

EVERYTHING = "sbrvndtoURN"
CHOSEN = [
    "Usbrvndto",  # the library is unregistered first
    "sbrndtoUv",  # a value outlives the library
    "bvrndtoUs",  # a session outlives the library
    "UsRNvbrdnto",  # values of the first registration are freed during the second
    "URNsbrvndto",
]


@pytest.mark.parametrize("streams", ["inline", "adversarial"])
def test_objects_may_be_destroyed_in_any_order(streams: str) -> None:
    failure = failing_order(CHOSEN + orders(EVERYTHING, 40), ORT_CUDA_PLUGIN_EMULATE_STREAMS=streams)
    assert not failure, failure


@pytest.mark.parametrize("seed", range(5))
def test_a_process_may_end_with_objects_anywhere(seed: int) -> None:
    failure = failing_end(seed)
    assert not failure, failure
