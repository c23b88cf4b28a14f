"""The table of PTX instructions: for each opcode, the function that translates it, and the section of the PTX ISA.

Each module that fills the table has the instructions of one subject, such as floats or memory. A translation raises
PtxError for a form of its instruction that it does not support.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from .builder import Builder
from .parser import Instruction

Translate: TypeAlias = Callable[[Builder, Instruction], None]


@dataclass(frozen=True)
class Rule:
    """The translation of an opcode, and the section of the PTX ISA that defines the instruction."""

    section: str
    translate: Translate


RULES: dict[str, Rule] = {}


def instruction(section: str, *opcodes: str) -> Callable[[Translate], Translate]:
    """Register the decorated function as the translation of ``opcodes``."""

    def register(translate: Translate) -> Translate:
        for opcode in opcodes:
            RULES[opcode] = Rule(section, translate)
        return translate

    return register


TYPES = (
    *("pred", "b8", "b16", "b32", "b64", "b128", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64"),
    *("f16", "f32", "f64", "f16x2", "f32x2", "bf16", "bf16x2", "tf32", "e4m3x2", "e5m2x2", "u16x2", "s16x2"),
)


def types_of(ins: Instruction) -> list[str]:
    """Return the types among the instruction's modifiers, in their order."""
    return [modifier for modifier in ins.modifiers if modifier in TYPES]


def type_of(ins: Instruction) -> str:
    """Return the only type among the instruction's modifiers. Raises PtxError if there is none, or several."""
    types = types_of(ins)
    if len(types) != 1:
        raise ins.error(f"expected one known type, got {', '.join(types) or 'none'}")
    return types[0]


def check_modifiers(ins: Instruction, known: frozenset[str]) -> None:
    """Raise PtxError for a modifier that is neither a type nor in ``known``."""
    for modifier in ins.modifiers:
        if modifier not in TYPES and modifier not in known:
            raise ins.error(f"the modifier .{modifier} is not supported")
