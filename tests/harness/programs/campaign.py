"""Compares a program's results after each pass with those after lowering, for many models and device kinds.

    PYTHONPATH=tests/harness python -m programs [--count 500] [--first 0] [--profile graphs] [--device sm_90]
                                                [--networks | --mutations]

Prints the first pass after which a program gives other results, with the steps that the pass removed and added. With
``--mutations`` it injects mistakes into passes, and prints which check notices each (`programs.mutations`). Exits with
1 if a program gives other results, or if there is a mistake that no check notices.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from fuzzing.profiles import Profile
from programs.mistakes import MISTAKES
from programs.models import Model, network, random_model
from programs.mutations import table_of
from programs.states import DEVICES, CannotRunError, Difference, first_difference, record

NETWORKS = (
    "bert_base", "llama_prefill", "llama_decode", "resnet50", "mobilenet_v2", "efficientnet_b0", "unet", "vit_b_16",
)  # fmt: skip
DTYPES = ("float32", "float16", "int8")


@dataclass
class Report:
    """Counts of compared programs, and the differences found, with model, device kind and number of the Run."""

    programs: int = 0
    """Number of programs, one for each model and device kind."""
    runs: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    """Number of comparisons, by pass."""
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, Difference]] = field(default_factory=list)

    def text(self) -> str:
        runs = ", ".join(f"{count} {name}" for name, count in self.runs.items())
        refused = "".join(f"\n  {count:6} not run: {reason}" for reason, count in self.refused.most_common(8))
        return f"{self.states.total()} states of {self.programs} programs agree in Runs: {runs}{refused}"


def check(
    models: Iterable[Model], devices: Sequence[str] = tuple(DEVICES), loud: bool = False, others: int | None = None
) -> Report:
    """Compare the programs of models on device kinds, for their inputs and for inputs of other sizes.

    ``others`` is the maximum number of inputs of other sizes; None: all of `Model.other_sizes`.
    """
    report = Report()
    for model in models:
        for name in devices:
            try:
                recorded = record(model.proto, model.feeds, DEVICES[name])
            except CannotRunError as error:
                report.refused[str(error)[:80]] += 1
                continue
            report.programs += 1
            for number, feeds in enumerate([model.feeds, *islice(model.other_sizes(), others)]):
                compared: list[str] = []
                try:
                    found = first_difference(recorded, feeds, compared)
                except CannotRunError as error:
                    report.refused[str(error)[:80]] += 1
                    continue
                report.runs["of other sizes" if number else "of the plan's sizes"] += 1
                report.states.update(compared)
                if found is not None:
                    label = f"{model.name}, {name}, Run {number}"
                    report.findings.append((label, found))
                    if loud:
                        print(f"{label}: {found}\n", flush=True)
                    break
    return report


def networks() -> Iterator[Model]:
    """Yield reduced versions of the benchmark networks, in each element type."""
    for name in NETWORKS:
        for dtype in DTYPES:
            yield network(name, dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="programs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--profile", type=Profile, choices=list(Profile), default=Profile.GRAPHS)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the number of the first random model")
    parser.add_argument(
        "--device", action="append", choices=list(DEVICES), help="a device kind; all where none is said"
    )
    parser.add_argument("--networks", action="store_true", help="the networks of benchmarks in place of random models")
    parser.add_argument(
        "--mutations", nargs="?", const="", metavar="PASS", help="break each pass, or this one, and print what notices"
    )
    options = parser.parse_args(arguments)
    if options.mutations is not None:
        table, missed = table_of([each for each in MISTAKES if options.mutations in ("", each.pass_name)])
        print(table)
        return 1 if missed else 0
    numbers = range(options.first, options.first + options.count)
    models = networks() if options.networks else (random_model(options.profile, number) for number in numbers)
    report = check(models, options.device or tuple(DEVICES), loud=True)
    print(report.text())
    return 1 if report.findings else 0
