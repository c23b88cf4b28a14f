"""Prologues: how a kernel converts an element of an operand as it loads it, above all dequantisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...model.ir import DType
from ...program.lowering.context import Tensor
from ...program.lowering.shapes import broadcast_strides
from ...program.steps.steps import Conversion
from ..codegen.fragment import Fragment
from ..codegen.simt_fragments import Element
from ..codegen.source import Emitter, KernelBuilder, Parameters, load_text, offset_text

RAW, OUTER, INNER = "@raw", "@outer", "@inner"
"""Stand in the text of a conversion for the element in memory and for its coordinates."""


@dataclass(frozen=True)
class ConvertedElement(Element):
    """An element that memory holds in the type ``source`` and that ``text`` makes one of ``storage``.

    ``setup`` are lines at the kernel's beginning. ``shared`` are texts that are the same for neighbours along k, as the
    scale of a block of weights: `neighbours` loads each once.
    """

    source: DType = DType.FLOAT32
    text: str = ""
    setup: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def memory(self) -> str:
        return self.source.short

    def load(self, pointer: str, index: str, outer: str = "", inner: str = "") -> str:
        return self.value(self.raw(pointer, index), self.shared_texts(outer, inner), outer, inner)

    def neighbours(
        self, pointer: str, index: str, outer: str, inner: str, count: int, name: str
    ) -> tuple[list[str], list[str]]:
        raw = [self.raw(pointer, f"{index} + {i}") for i in range(count)]
        lines, names = self.load_shared(outer, inner, name)
        return lines, [self.value(x, names, outer, f"{inner} + {i}") for i, x in enumerate(raw)]

    def raw(self, pointer: str, index: str) -> str:
        """The element in memory as a register value."""
        return load_text(pointer, index, self.source)

    def value(self, raw: str, shared: Sequence[str], outer: str, inner: str) -> str:
        """The converted element."""
        text = self.text.replace(OUTER, f"({outer})").replace(INNER, f"({inner})").replace(RAW, f"({raw})")
        for number, of_block in enumerate(shared):
            text = text.replace(shared_name(number), f"({of_block})")
        return text

    def shared_texts(self, outer: str, inner: str) -> list[str]:
        return [text.replace(OUTER, f"({outer})").replace(INNER, f"({inner})") for text in self.shared]

    def load_shared(self, outer: str, inner: str, name: str) -> tuple[list[str], list[str]]:
        """Lines that load what neighbours share, and the names that they give."""
        names = [f"{name}_of_block{number}" for number in range(len(self.shared))]
        return [f"{x} = {text}" for x, text in zip(names, self.shared_texts(outer, inner), strict=True)], names


def shared_name(number: int) -> str:
    """Stands in the text of a conversion for what neighbours share."""
    return f"@block{number}@"


class Inline(Emitter):
    """Makes one expression of everything."""

    def assign(self, text: str) -> str:
        return f"({text})"


def make_element(
    x: Tensor, conversion: Conversion | None, outer: int, prefix: str, first: str = "0"
) -> tuple[Element, Parameters]:
    """How the elements of operand x are loaded, and the parameters that this needs.

    ``outer`` is the dimension along the result; any other dimension along which a conversion's inputs have elements is
    k. ``first`` is where the kernel's coordinate along the result begins. ``prefix`` begins names, and no kernel's own.
    """
    if conversion is None:
        return Element(x.dtype.short), Parameters()
    emit = Inline(prefix, indent=0)
    builder = KernelBuilder(prefix, emit)
    for leaf, y in builder.to_load(conversion.inputs):
        pointer = builder.tensor(y)
        terms = [
            (f"int64({f'{first} + {OUTER}' if axis == outer % x.rank else INNER})", builder.stride(stride))
            for axis, stride in enumerate(broadcast_strides(y, x.shape))
            if stride != 0 and y.shape[axis] != 1
        ]
        value = load_text(pointer, offset_text(terms), y.dtype)
        if terms:
            emit.bind(leaf, f"({value})")
        else:
            name = emit.fresh()
            emit.line(f"{name} = {value}")
            emit.bind(leaf, name)
    emit.bind(conversion.leaf, RAW)
    text = emit.value(conversion.value)
    return ConvertedElement(conversion.value.dtype.short, x.dtype, text, tuple(emit.taken())), builder


def type_names(*elements: Element) -> str:
    """The types of sums and in memory, for a kernel's name."""
    return "_".join(dict.fromkeys((elements[0].storage, *(x.memory for x in elements))))


def conversion_setup(*elements: Element) -> Fragment:
    """What the elements of a kernel need at its beginning."""
    lines = [line for x in elements if isinstance(x, ConvertedElement) for line in x.setup]
    return Fragment("conversion_setup", "\n".join(lines), " ".join(line.partition(" = ")[0] for line in lines))
