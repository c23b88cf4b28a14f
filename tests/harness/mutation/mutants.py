"""Mutants: a base model with seeded mutations, called steps. A mutant's number determines all of it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from mutation import node_mutators
from mutation.bases import Base
from mutation.mutators import MUTATORS
from mutation.subject import Feeds, Subject, complete_feeds, parse

assert node_mutators  # importing this module registers its mutators

LEVELS = (0, 1, 99)
"""ONNX Runtime's optimization levels: none, basic, all."""
Step = tuple[str, int]


@dataclass(frozen=True)
class Mutant:
    base: str
    steps: tuple[Step, ...]
    level: int

    def __str__(self) -> str:
        return f"{self.base} level={self.level} {' '.join(f'{name}:{seed}' for name, seed in self.steps)}"


def mutant(number: int, bases: Mapping[str, Base]) -> Mutant:
    """Return the mutant with this number, which depends only on the number and the names of the bases."""
    rng = random.Random(number)
    names, weights = list(MUTATORS), [weight for _, weight in MUTATORS.values()]
    count = rng.choice([1, 1, 1, 2, 2, 3, 4, 6])
    base = rng.choice(sorted(bases))
    steps = tuple((name, rng.getrandbits(32)) for name in rng.choices(names, weights, k=count))
    return Mutant(base, steps, rng.choice(LEVELS))


def _is_variadic(node: onnx.NodeProto) -> bool:
    try:
        schema = onnx.defs.get_schema(node.op_type, node.domain)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.inputs) and schema.inputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic


def build(mutated: Mutant, base: Base) -> tuple[bytes, Feeds]:
    """Apply the mutations; return the serialized model and its inputs. A mutation that does not apply does nothing."""
    subject = Subject(parse(base.model), dict(base.feeds))
    for name, seed in mutated.steps:
        subject.rng = random.Random(seed)
        MUTATORS[name][0](subject)
    subject.rng = random.Random(zlib.crc32(mutated.base.encode()))
    complete_feeds(subject)
    for graph in subject.graphs():
        for node in graph.node:
            if "" in node.input and _is_variadic(node):
                # An omitted input of a variadic operator makes the CPU provider dereference a null pointer.
                given = [name for name in node.input if name]
                del node.input[:]
                node.input.extend(given)
    return subject.serialize(), subject.feeds
