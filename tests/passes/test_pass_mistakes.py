"""A plausible mistake in each pass is noticed: by the verifier, by the interpreter, or by the texts before and after a
pass.
"""

from __future__ import annotations

import pytest

from ort_cuda_plugin.passes.table import PASSES
from pass_programs import case, case_names
from programs.mistakes import MISTAKES
from programs.models import Model
from programs.mutations import Mutation, broken, difference_in, feeds, mutated, noticed_by
from programs.states import DEVICES, CannotRunError, first_difference, record


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_in_a_pass_is_noticed(mistake: Mutation) -> None:
    assert noticed_by(mistake), "extend a model of tests/passes, so that the mistake changes what it computes"


def test_each_pass_has_a_mistake() -> None:
    assert {each.pass_name for each in MISTAKES} == {each.name for each in PASSES}


def test_a_broken_function_is_whole_again_afterwards() -> None:
    mistake = MISTAKES[0]
    former = mistake.function.__code__
    with broken(mistake):
        assert mistake.function.__code__ is not former
    assert mistake.function.__code__ is former


def test_a_mistake_whose_text_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match="has 0 times 'no such text'"):
        mutated(Mutation("p", "it is gone", case_names, "no such text", ""))


@pytest.mark.parametrize("name", case_names())
def test_models_of_passes_compute_the_same_on_every_device_kind(name: str) -> None:
    one = case(name)
    found = difference_in(one)
    assert found is None, str(found)
    model = Model(name, one.model, feeds(one.model))
    for device, properties in DEVICES.items():
        try:
            found = first_difference(record(model.proto, model.feeds, properties), model.feeds)
        except CannotRunError as error:
            pytest.fail(f"{device}: {error}")
        assert found is None, f"{device}: {found}"
