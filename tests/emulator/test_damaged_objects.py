"""Damaged and hostile kernel objects (ELF): the C loader and the Python reader refuse them, or stay inside them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from damaged_objects import load_damaged, read_damaged
from emulator_harness import compile_kernels
from isolated import python
from ort_cuda_plugin.compiler.elf import Elf

SECTION_BYTES, SYMBOL_BYTES = 64, 24
TYPE, FLAGS, OFFSET, SIZE, LINK = 4, 8, 24, 32, 40
WRITE, ALLOCATED, CODE = 1, 2, 4
SHN_ABS = 0xFFF1


def test_damaged_objects_are_refused_or_what_they_offer_lies_inside_them() -> None:
    outcome = load_damaged(seed=1, rounds=3000)
    assert outcome["refused"] + outcome["loaded"] == 3000
    assert all(number >= 500 for number in outcome.values()), outcome


def test_damaged_objects_are_value_errors_of_the_reader_in_python() -> None:
    outcome = read_damaged(seed=1, rounds=1000)
    assert all(number >= 200 for number in outcome.values()), outcome


class Patched:
    """An ELF object file of the C compiler, with methods that change fields of its section headers."""

    def __init__(self, image: bytes) -> None:
        self.data = bytearray(image)
        self.table: int = struct.unpack_from("<Q", image, 40)[0]
        self.names = [section.name for section in Elf(image).sections]

    def section(self, index: int) -> int:
        return self.table + SECTION_BYTES * index

    def number(self, name: str) -> int:
        return self.names.index(name)

    def set(self, section: int, field: int, value: int) -> None:
        struct.pack_into("<I" if field in (TYPE, LINK) else "<Q", self.data, self.section(section) + field, value)

    def get(self, section: int, field: int) -> int:
        (value,) = struct.unpack_from("<Q", self.data, self.section(section) + field)
        return int(value)


def unused_section_outside_of_the_file(image: Patched) -> None:
    for field, value in ((FLAGS, ALLOCATED), (OFFSET, 1 << 40), (SIZE, 4096)):
        image.set(0, field, value)


def unused_section_in_place_of_the_code(image: Patched) -> None:
    image.set(image.number(".text"), TYPE, 0)
    image.set(image.number(".text"), OFFSET, 1 << 40)


def so_many_sections_that_absolute_symbols_name_one(image: Patched) -> None:
    """Add sections until the number ``SHN_ABS``, which marks absolute symbols, is the index of a section.

    Makes the kernel ``add`` and its metadata absolute symbols, with an address that the file chooses.
    """
    sections = bytes(image.data[image.table : image.section(len(image.names))])
    while len(image.data) % 8:
        image.data.append(0)
    text = image.section(image.number(".text"))
    start = len(image.data)
    image.data += sections + bytes(SECTION_BYTES * (0xFFFF - len(image.names)))
    one_byte_of_code = bytearray(image.data[text : text + SECTION_BYTES])
    struct.pack_into("<Q", one_byte_of_code, SIZE, 1)
    at = start + SECTION_BYTES * SHN_ABS
    image.data[at : at + SECTION_BYTES] = one_byte_of_code
    struct.pack_into("<Q", image.data, 40, start)
    struct.pack_into("<H", image.data, 60, 0xFFFF)
    table = image.get(image.number(".symtab"), OFFSET)
    for index, symbol in enumerate(Elf(bytes(image.data)).symbols()):
        if symbol.name in ("add", "add.meta"):
            struct.pack_into("<HQ", image.data, table + SYMBOL_BYTES * index + 6, SHN_ABS, 0xDEAD0000)


def sections_that_share_their_bytes(image: Patched) -> None:
    first = image.section(0)
    copies = bytes(image.data[image.section(image.number(".rela.text")) :][:SECTION_BYTES]) * 100
    start = (len(image.data) + 7) & ~7
    image.data += bytes(start - len(image.data)) + image.data[first : image.section(len(image.names))] + copies
    struct.pack_into("<Q", image.data, 40, start)
    struct.pack_into("<H", image.data, 60, len(image.names) + 100)


def strings_without_an_end(image: Patched) -> None:
    index = image.number(".strtab")
    image.set(index, SIZE, image.get(index, SIZE) - 1)


def relocations_by_another_symbol_table(image: Patched) -> None:
    image.set(image.number(".rela.text"), LINK, 0)


def nothing_to_load(image: Patched) -> None:
    for index in range(len(image.names)):
        image.set(index, FLAGS, 0)
    image.set(image.number(".symtab"), SIZE, 0)


def description_that_the_kernel_may_change(image: Patched) -> None:
    image.set(image.number(".rodata"), FLAGS, ALLOCATED | WRITE)


def description_in_the_code(image: Patched) -> None:
    image.set(image.number(".rodata"), FLAGS, ALLOCATED | CODE)


LOAD = """
import sys
from pathlib import Path
from ort_cuda_plugin.abi.device import Device
Device.emulated(0).load(Path(sys.argv[1]).read_bytes()).function("add")
"""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (unused_section_outside_of_the_file, ""),
        (unused_section_in_place_of_the_code, 'no kernel "add"'),
        (so_many_sections_that_absolute_symbols_name_one, "it has too many sections"),
        (sections_that_share_their_bytes, "its sections overlap"),
        (strings_without_an_end, "a string table is malformed"),
        (relocations_by_another_symbol_table, "a relocation table is malformed"),
        (nothing_to_load, "its size in memory is zero or too large"),
        (description_that_the_kernel_may_change, 'no valid "add.meta"'),
        (description_in_the_code, 'no valid "add.meta"'),
    ],
)
def test_a_hostile_object_is_refused_with_the_reason(
    change: Callable[[Patched], None], reason: str, tmp_path: Path
) -> None:
    image = Patched(compile_kernels(tmp_path))
    change(image)
    (tmp_path / "hostile.o").write_bytes(image.data)
    done = python(LOAD, str(tmp_path / "hostile.o"), check=False)
    if reason:
        assert "CudaError" in done.stderr, (done.returncode, done.stderr)
        assert reason in done.stderr
    else:  # the unused section lies outside of the file, but nothing refers to it
        assert done.returncode == 0, (done.returncode, done.stderr)
