"""Weights of few bits as a product reads them: codes in words of eight, with a scale for each block of a column.

The kernel loads a word, and what belongs to its block once, and makes eight numbers of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...program.steps.steps import CODES_PER_WORD, Conversion
from ..codegen.simt_fragments import log2
from ..codegen.source import KernelBuilder, Parameters, load_text, offset_text
from .prologue import INNER, OUTER, RAW, ConvertedElement, Inline


@dataclass(frozen=True)
class BlockElement(ConvertedElement):
    """A number of ``storage`` that ``text`` makes of a code and of what ``shared`` loads for its block."""

    bits: int = 4
    shared: tuple[str, ...] = ()

    @property
    def memory(self) -> str:
        return f"{self.bits}bits"

    def _word(self, pointer: str, index: str) -> str:
        return f"{'uint64' if self.bits == 8 else 'uint32'}({pointer}[({index}) >> {log2(CODES_PER_WORD)}])"

    def _code(self, word: str, place: str) -> str:
        kind = "uint64" if self.bits == 8 else "uint32"
        return f"int32(({word} >> {kind}({place})) & {kind}({(1 << self.bits) - 1}))"

    def _value(self, code: str, of_block: tuple[str, ...]) -> str:
        text = self.text.replace(RAW, f"({code})")
        for number, value in enumerate(of_block):
            text = text.replace(_shared_name(number), f"({value})")
        return text

    def load(self, pointer: str, index: str, outer: str = "", inner: str = "") -> str:
        place = f"(({index}) & {CODES_PER_WORD - 1}) * {self.bits}"
        of_block = tuple(x.replace(OUTER, f"({outer})").replace(INNER, f"({inner})") for x in self.shared)
        return self._value(self._code(self._word(pointer, index), place), of_block)

    def neighbours(
        self, pointer: str, index: str, outer: str, inner: str, count: int, name: str
    ) -> tuple[list[str], list[str]]:
        words = -(-count // CODES_PER_WORD)
        lines = [
            f"{name}_word{word} = {self._word(pointer, f'{index} + {word * CODES_PER_WORD}')}" for word in range(words)
        ]
        if count < CODES_PER_WORD:
            lines.append(f"{name}_first = (({index}) & {CODES_PER_WORD - 1}) * {self.bits}")
        for number, text in enumerate(self.shared):
            loaded = text.replace(OUTER, f"({outer})").replace(INNER, f"({inner})")
            lines.append(f"{name}_of_block{number} = {loaded}")
        of_block = tuple(f"{name}_of_block{number}" for number in range(len(self.shared)))
        values = []
        for i in range(count):
            word, within = divmod(i, CODES_PER_WORD)
            place = str(within * self.bits) if count >= CODES_PER_WORD else f"({name}_first + {within * self.bits})"
            values.append(self._value(self._code(f"{name}_word{word}", place), of_block))
        return lines, values


def make_block_element(conversion: Conversion, prefix: str) -> tuple[BlockElement, Parameters]:
    """How the elements of an operand with ``conversion`` are loaded, and the parameters that this needs."""
    emit = Inline(prefix, indent=0)
    builder = KernelBuilder(prefix, emit)
    shared: list[str] = []
    for leaf, y in builder.to_load(conversion.inputs):
        pointer = builder.tensor(y)
        blocks, columns = y.strides
        terms = [
            (f"int64(int32({INNER}) >> {log2(conversion.block)})", builder.stride(blocks)),
            (f"int64({OUTER})", builder.stride(columns)),
        ]
        emit.bind(leaf, _shared_name(len(shared)))
        shared.append(load_text(pointer, offset_text(terms), y.dtype))
    emit.bind(conversion.leaf, RAW)
    text = emit.value(conversion.value)
    setup = tuple(emit.taken())
    element = BlockElement(
        conversion.value.dtype.short, text=text, setup=setup, bits=conversion.bits, shared=tuple(shared)
    )
    return element, builder


def _shared_name(number: int) -> str:
    return f"@block{number}@"
