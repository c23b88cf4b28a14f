"""Reads the parts of 64-bit little-endian ELF files that the compile pipeline looks at: sections and symbols."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Section:
    """One section: ``type``, ``link`` and ``info`` are the header's sh_type, sh_link and sh_info."""

    name: str
    type: int
    offset: int
    size: int
    link: int
    info: int


@dataclass(frozen=True)
class Symbol:
    """One symbol; ``section`` is a section index and ``value`` in an object the offset in it."""

    name: str
    section: int
    value: int
    size: int


class Elf:
    """An ELF file in memory. Raises ValueError where the bytes are none."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        self.data = data

    @cached_property
    def sections(self) -> list[Section]:
        (table,) = struct.unpack_from("<Q", self.data, 40)
        entry_bytes, count, names_index = struct.unpack_from("<HHH", self.data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", self.data, table + i * entry_bytes) for i in range(count)]
        names = headers[names_index][4]
        return [Section(self.string(names + h[0]), h[1], h[4], h[5], h[6], h[7]) for h in headers]

    def string(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode()

    def contents(self, section: Section) -> bytes:
        return self.data[section.offset : section.offset + section.size]

    def symbols(self) -> Iterator[Symbol]:
        for table in self.sections:
            if table.type != 2:  # SHT_SYMTAB
                continue
            strings = self.sections[table.link].offset
            for offset in range(table.offset, table.offset + table.size, 24):
                name, _, _, section, value, size = struct.unpack_from("<IBBHQQ", self.data, offset)
                yield Symbol(self.string(strings + name), section, value, size)

    def symbol(self, name: str) -> Symbol:
        """The symbol of that name. Raises KeyError."""
        for symbol in self.symbols():
            if symbol.name == name:
                return symbol
        raise KeyError(name)

    def symbol_offset(self, symbol: Symbol) -> int:
        """Where the symbol's bytes start in the file of a relocatable object."""
        return self.sections[symbol.section].offset + symbol.value
