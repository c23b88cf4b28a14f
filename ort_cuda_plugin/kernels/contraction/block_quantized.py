"""GEMM prologue for block-quantized weights: eight codes per word; blocks of a column share a scale and zero point.

A thread loads a word of eight codes, and their block's scale and zero point, once, and dequantizes eight elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...program.steps.steps import CODES_PER_WORD, Conversion
from ..codegen.simt_fragments import log2
from ..codegen.source import KernelBuilder, Parameters, load_text, offset_text
from .prologue import INNER, OUTER, RAW, ConvertedElement, Inline, shared_name


@dataclass(frozen=True)
class BlockElement(ConvertedElement):
    """Loader of block-quantized elements: ``text`` dequantizes a code of ``bits`` bits.

    ``shared`` are the sources of the values that the codes of a quantization block have in common: scale, zero point.
    """

    bits: int = 4

    @property
    def memory(self) -> str:
        return f"{self.bits}bits"

    @property
    def _word_type(self) -> str:
        return "uint64" if self.bits == 8 else "uint32"

    def _word(self, pointer: str, index: str) -> str:
        return f"{self._word_type}({pointer}[({index}) >> {log2(CODES_PER_WORD)}])"

    def _code(self, word: str, shift: str) -> str:
        return f"int32(({word} >> {self._word_type}({shift})) & {self._word_type}({(1 << self.bits) - 1}))"

    def raw(self, pointer: str, index: str) -> str:
        return self._code(self._word(pointer, index), f"(({index}) & {CODES_PER_WORD - 1}) * {self.bits}")

    def neighbors(
        self, pointer: str, index: str, outer: str, inner: str, count: int, name: str
    ) -> tuple[list[str], list[str]]:
        lines = [
            f"{name}_word{word} = {self._word(pointer, f'{index} + {word * CODES_PER_WORD}')}"
            for word in range(-(-count // CODES_PER_WORD))
        ]
        if count < CODES_PER_WORD:
            lines.append(f"{name}_first = (({index}) & {CODES_PER_WORD - 1}) * {self.bits}")
        load, names = self.load_shared(outer, inner, name)
        values = []
        for i in range(count):
            word, within = divmod(i, CODES_PER_WORD)
            shift = str(within * self.bits) if count >= CODES_PER_WORD else f"({name}_first + {within * self.bits})"
            values.append(self.value(self._code(f"{name}_word{word}", shift), names, outer, inner))
        return [*lines, *load], values


def make_block_element(conversion: Conversion, prefix: str) -> tuple[BlockElement, Parameters]:
    """Return the loader of a block-quantized operand, and the kernel parameters that it needs."""
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
        emit.bind(leaf, shared_name(len(shared)))
        shared.append(load_text(pointer, offset_text(terms), y.dtype))
    emit.bind(conversion.leaf, RAW)
    text = emit.value(conversion.value)
    setup = tuple(emit.taken())
    element = BlockElement(
        conversion.value.dtype.short, text=text, setup=setup, bits=conversion.bits, shared=tuple(shared)
    )
    return element, builder
