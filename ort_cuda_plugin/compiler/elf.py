"""Parser for the sections and symbols of 64-bit little-endian ELF files."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

SHT_SYMTAB = 2
SHT_NOBITS = 8


@dataclass(frozen=True)
class Section:
    """A section; ``type``, ``link`` and ``info`` are the header's sh_type, sh_link and sh_info."""

    name: str
    type: int
    offset: int
    size: int
    link: int
    info: int


@dataclass(frozen=True)
class Symbol:
    """A symbol. ``section`` is a section index; in a relocatable object, ``value`` is the offset in that section."""

    name: str
    section: int
    value: int
    size: int


class Elf:
    """An ELF file in memory. Its constructor and its members raise ValueError for malformed bytes."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        self.data = data

    def _unpack(self, layout: str, offset: int) -> tuple[int, ...]:
        try:
            return struct.unpack_from(layout, self.data, offset)
        except (struct.error, OverflowError):
            raise ValueError(f"an entry at offset {offset} lies outside of the ELF file") from None

    @property
    def machine(self) -> int:
        """The CPU that the file's code is for: ``e_machine`` of its header."""
        return self._unpack("<H", 18)[0]

    @cached_property
    def sections(self) -> list[Section]:
        (table,) = self._unpack("<Q", 40)
        entry_bytes, count, names_index = self._unpack("<HHH", 58)
        headers = [self._unpack("<IIQQQQIIQQ", table + i * entry_bytes) for i in range(count)]
        if names_index >= count:
            raise ValueError("the ELF file has no section names")
        names = headers[names_index][4]
        return [Section(self.string(names + h[0]), h[1], h[4], h[5], h[6], h[7]) for h in headers]

    def _section(self, index: int) -> Section:
        if index >= len(self.sections):
            raise ValueError(f"the ELF file has no section {index}")
        return self.sections[index]

    def string(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode()

    def contents(self, section: Section) -> bytes:
        """Return the section's contents; empty for a section that the file has no contents for (SHT_NOBITS)."""
        if section.type == SHT_NOBITS:
            return b""
        if section.offset + section.size > len(self.data):
            raise ValueError(f"the section {section.name!r} lies outside of the ELF file")
        return self.data[section.offset : section.offset + section.size]

    def symbols(self) -> Iterator[Symbol]:
        for table in self.sections:
            if table.type != SHT_SYMTAB:
                continue
            strings = self._section(table.link).offset
            for offset in range(table.offset, table.offset + table.size, 24):
                name, _, _, section, value, size = self._unpack("<IBBHQQ", offset)
                yield Symbol(self.string(strings + name), section, value, size)

    def symbol(self, name: str) -> Symbol:
        """Return the symbol with this name. Raises KeyError if the file has none."""
        for symbol in self.symbols():
            if symbol.name == name:
                return symbol
        raise KeyError(name)

    def symbol_offset(self, symbol: Symbol) -> int:
        """Return the file offset of the symbol's bytes in a relocatable object."""
        section = self._section(symbol.section)
        if symbol.value > len(self.contents(section)):
            raise ValueError(f"the symbol {symbol.name!r} lies outside of its section")
        return section.offset + symbol.value
