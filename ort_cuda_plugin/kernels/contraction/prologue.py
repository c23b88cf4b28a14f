"""Prologues: conversions, mostly dequantizations, that a kernel applies to an operand's elements when it loads them."""

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
"""Placeholders in a conversion's source: the loaded element, its coordinate along m or n, and that along k."""


@dataclass(frozen=True)
class ConvertedElement(Element):
    """Loader of an element with a prologue: source ``text`` converts it from type ``source`` in memory to ``storage``.

    ``setup`` are lines for the beginning of the kernel. ``shared`` are the sources of values that adjacent elements
    along k have in common, such as the scale of a quantization block: `neighbors` loads each of these values once.
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

    def neighbors(
        self, pointer: str, index: str, outer: str, inner: str, count: int, name: str
    ) -> tuple[list[str], list[str]]:
        raw = [self.raw(pointer, f"{index} + {i}") for i in range(count)]
        lines, names = self.load_shared(outer, inner, name)
        return lines, [self.value(x, names, outer, f"{inner} + {i}") for i, x in enumerate(raw)]

    def raw(self, pointer: str, index: str) -> str:
        """Return the source that loads an element, before its conversion."""
        return load_text(pointer, index, self.source)

    def value(self, raw: str, shared: Sequence[str], outer: str, inner: str) -> str:
        """Return the source that converts element ``raw``; ``shared`` are sources of the values of `load_shared`."""
        text = self.text.replace(OUTER, f"({outer})").replace(INNER, f"({inner})").replace(RAW, f"({raw})")
        for number, of_block in enumerate(shared):
            text = text.replace(shared_name(number), f"({of_block})")
        return text

    def shared_texts(self, outer: str, inner: str) -> list[str]:
        return [text.replace(OUTER, f"({outer})").replace(INNER, f"({inner})") for text in self.shared]

    def load_shared(self, outer: str, inner: str, name: str) -> tuple[list[str], list[str]]:
        """Return lines that load the values that adjacent elements have in common, and the variables that hold them."""
        names = [f"{name}_of_block{number}" for number in range(len(self.shared))]
        return [f"{x} = {text}" for x, text in zip(names, self.shared_texts(outer, inner), strict=True)], names


def shared_name(number: int) -> str:
    """Return the placeholder in a conversion's source for value ``number`` of `ConvertedElement.shared`."""
    return f"@block{number}@"


class Inline(Emitter):
    """Emitter that builds one expression, without variables."""

    def assign(self, text: str) -> str:
        return f"({text})"


def make_element(
    x: Tensor, conversion: Conversion | None, outer: int, prefix: str, first: str = "0"
) -> tuple[Element, Parameters]:
    """Return the loader of operand x, and the kernel parameters that it needs.

    ``outer`` is x's axis of m or n; the inputs of ``conversion`` may vary along this axis and along k. ``first`` is the
    source of an offset that is added to the kernel's coordinate along this axis. ``prefix`` begins all names of the
    loader, so that they differ from the kernel's.
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
    """Return the types of the multiplication and of the operands in memory, as part of a kernel's name."""
    return "_".join(dict.fromkeys((elements[0].storage, *(x.memory for x in elements))))


def conversion_setup(*elements: Element) -> Fragment:
    """Return the fragment with the lines that the operands' loaders need at the beginning of a kernel."""
    lines = [line for x in elements if isinstance(x, ConvertedElement) for line in x.setup]
    return Fragment("conversion_setup", "\n".join(lines), " ".join(line.partition(" = ")[0] for line in lines))
