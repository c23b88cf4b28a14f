"""The conformance report, docs/conformance.md: writes it, and reads it back for comparison with later runs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from ort_cuda_plugin.conformance.verdict import IN_SCOPE, Outcome, Verdict

MAX_REASON = 160
"""Maximum characters of a reason in the report; the command prints all of it."""
WRITE_COMMAND = "ort-cuda-plugin conformance --write docs/conformance.md"

_HEADER = """# Conformance

This page says which of ONNX's backend tests (kinds node, simple, pytorch-operator, pytorch-converted) the plugin
passes. The tests run through stock ONNX Runtime on the emulated device, with {versions}.
`{command}` wrote this page. The plugin's test suite runs all of these tests and
compares the verdicts with the page.

The table counts the tests by verdict; *the EP* is the plugin, an execution provider of ONNX Runtime:

- *passed on the EP*: the results are right, and the plugin ran every node.
- *passed with no node left to run*: the results are right, and ONNX Runtime removed all nodes before the session ran.
- *partly on the CPU provider*: the results are right, and the CPU provider ran at least one node.
- *wrong*: a result differs.
- *failed*: the session or the Run failed.
- *the CPU provider fails too*: the plugin does not pass the test, and neither does the CPU provider alone.

The sections below the table list all tests that did not pass on the EP as written, by the reason. A reason such as
`SequenceInsert: (dtype) ...` names an operator whose node the plugin declined. The sessions have the option
`claim_unprofitable_nodes=1`, so that the plugin also takes nodes that would be faster on the CPU.

| verdict | tests as written (ORT_DISABLE_ALL) | tests after ONNX Runtime's optimizations (ORT_ENABLE_ALL) |
|---|---:|---:|
"""
_IN_SCOPE = """
**In scope and not wholly on the EP: {count}.** A test is in scope if ONNX Runtime itself loads its model, and if the
model has only tensors and operators of ai.onnx: no strings, sequences, optional values and no ImageDecoder.
"""
_OPTIMIZED = "Other verdicts after ONNX Runtime's optimizations"


def versions() -> str:
    """Return the versions of the packages that the tests' verdicts depend on."""
    import onnx
    import onnxruntime

    return f"onnx {onnx.__version__} and onnxruntime {onnxruntime.__version__}"


def render(as_written: Sequence[Outcome], optimized: Sequence[Outcome]) -> str:
    """Return the report in Markdown.

    It has totals without and with ONNX Runtime's optimizations, then each test that does not pass on the EP as written
    (without these optimizations), by the kind of reason.
    """
    first = Counter(outcome.verdict for outcome in as_written)
    second = Counter(outcome.verdict for outcome in optimized)
    lines = [_HEADER.format(versions=versions(), command=WRITE_COMMAND).rstrip("\n")]
    lines += [f"| {verdict} | {first[verdict]} | {second[verdict]} |" for verdict in Verdict]
    passes = [sum(outcome.cpu_passes for outcome in outcomes) for outcomes in (as_written, optimized)]
    lines += [f"| all tests | {len(as_written)} | {len(optimized)} |"]
    lines += [f"| of these the CPU provider alone passes | {passes[0]} | {passes[1]} |"]
    remaining = [outcome for outcome in as_written if outcome.verdict is not Verdict.ON_EP]
    lines += [_IN_SCOPE.format(count=sum(is_open(outcome) for outcome in remaining)).rstrip("\n")]
    for verdict in Verdict:
        if listed := [outcome for outcome in remaining if outcome.verdict is verdict]:
            lines += ["", f"## {verdict}"]
            for group, outcomes in _by(listed, lambda outcome: outcome.group):
                lines += ["", f"### {group} ({len(outcomes)})", "", *_bullets(outcomes)]
    written = {outcome.key: outcome.verdict for outcome in as_written}
    if others := [outcome for outcome in optimized if written[outcome.key] is not outcome.verdict]:
        lines += ["", f"## {_OPTIMIZED}"]
        for verdict in Verdict:
            if listed := [outcome for outcome in others if outcome.verdict is verdict]:
                lines += ["", f"### {verdict} ({len(listed)})", "", *_bullets(listed)]
    return "\n".join(lines) + "\n"


def is_open(outcome: Outcome) -> bool:
    """Return whether the plugin should run the whole test and does not."""
    return outcome.group == IN_SCOPE and outcome.verdict not in (Verdict.ON_EP, Verdict.NO_NODE)


def _by(outcomes: Iterable[Outcome], key: Callable[[Outcome], str]) -> list[tuple[str, list[Outcome]]]:
    groups = defaultdict(list)
    for outcome in outcomes:
        groups[key(outcome)].append(outcome)
    return sorted(groups.items(), key=lambda item: (item[0] != IN_SCOPE, -len(item[1]), item[0]))


def _bullets(outcomes: Sequence[Outcome]) -> list[str]:
    return [
        f"- {_shortened(reason)}{': ' if reason else ''}{', '.join(f'`{outcome.key}`' for outcome in members)}"
        for reason, members in _by(outcomes, lambda outcome: outcome.reason)
    ]


def _shortened(text: str) -> str:
    text = text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."
    return re.sub(r"([<`*_|\[\]])", r"\\\1", text)


# ---- reading a report ----

_KEY = re.compile(r"`((?:node|simple|pytorch-operator|pytorch-converted)/[^`]+)`")


def read_verdicts(text: str, keys: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the verdicts of the tests ``keys`` in a report, as written and optimized.

    Raises ValueError for a text that is not a report.
    """
    if not text.startswith("# Conformance\n"):
        raise ValueError(
            f"conformance report: got the first line {text.partition(chr(10))[0][:80]!r}, expected '# Conformance'"
        )
    as_written: dict[str, str] = dict.fromkeys(keys, Verdict.ON_EP)
    optimized: dict[str, str] = {}
    section = group = ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"## (.*)", line):
            section = heading[1]
        elif heading := re.fullmatch(r"### (.*) \(\d+\)", line):
            group = heading[1]
        elif line.startswith("- "):
            if section == _OPTIMIZED:
                optimized.update(dict.fromkeys(_KEY.findall(line), group))
            else:
                as_written.update(dict.fromkeys(_KEY.findall(line), section))
    return as_written, as_written | optimized


def read_groups(text: str) -> dict[str, str]:
    """Return the heading under which a report lists each test."""
    groups: dict[str, str] = {}
    heading = ""
    for line in text.split(f"\n## {_OPTIMIZED}")[0].splitlines():
        if found := re.fullmatch(r"### (.*) \(\d+\)", line):
            heading = found[1]
        elif line.startswith("- "):
            groups.update(dict.fromkeys(_KEY.findall(line), heading))
    return groups


def changes(reported: Mapping[str, str], outcomes: Sequence[Outcome]) -> list[str]:
    """Return one line for each test whose verdict differs from the report."""
    said = {outcome.key: reported.get(outcome.key, "not listed") for outcome in outcomes}
    return [
        f"{outcome.key}: {said[outcome.key]} -> {outcome.verdict} {outcome.reason}".rstrip()
        for outcome in outcomes
        if said[outcome.key] != outcome.verdict
    ]
