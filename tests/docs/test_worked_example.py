"""docs/architecture/worked_example.md shows the present output of the compiler's stages."""

from __future__ import annotations

import pytest

from worked_example import BLOCKS, PAGE, blocks

WRITE = "write the page again: PYTHONPATH=. python tests/harness/worked_example.py"


def test_the_page_has_each_block() -> None:
    assert blocks(PAGE.read_text()).keys() == BLOCKS.keys()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_the_page_is_what_its_stage_says(name: str) -> None:
    assert blocks(PAGE.read_text())[name] == BLOCKS[name](), WRITE
