"""Exit report of a program that ``ort-cuda-plugin exec`` runs: where the nodes of its sessions ran.

Such a program cannot be changed to call `require`. So the report names each session, the line of the program that
created it, the providers that it asked for, and the reasons why nodes ran on another provider.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

from ..abi.message_texts import one_line
from ..ep.device.identity import is_our_name
from .observation import keep_history
from .outcome import Outcome

_MOST_REASONS = 10
"""Maximum number of lines about declined nodes for each session."""


def report_at_exit(command: str) -> None:
    """Print the report on the standard error when this process ends; nothing if it creates no session.

    A process that a signal ends, or that calls ``os._exit``, prints nothing. A child of ``multiprocessing`` prints its
    own report.
    """
    history = keep_history()
    write = partial(_write, command, history)
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize  # such a child skips the functions of `atexit`

        Finalize(None, write, exitpriority=0)
    else:
        atexit.register(write)


def _write(command: str, history: Sequence[Outcome]) -> None:
    if history:
        with suppress(OSError, ValueError, AttributeError):  # the standard error may be closed, or None
            print("\n".join(report(command, os.getpid(), history)), file=sys.stderr, flush=True)


def report(command: str, pid: int, history: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of the report. Equal sessions share a line."""
    created = sum(bool(outcome.providers) for outcome in history)
    yield f"ort-cuda-plugin {command}: process {pid} created {_count(created, 'session')}"
    texts = Counter("\n".join(map(one_line, _lines(outcome))) for outcome in history)
    for text, count in texts.items():
        first, *rest = text.splitlines()
        yield f"  {first}{f' ({count} sessions)' if count > 1 else ''}"
        yield from (f"    {line}" for line in rest)


def _lines(outcome: Outcome) -> Iterator[str]:
    named = f"asked for {', '.join(outcome.asked)}" if outcome.asked else "named no provider"
    if not outcome.providers:
        yield f"{outcome.subject}: {named}; the session could not be created: {outcome.failure}"
        return
    if not outcome.own:
        runs = f"all nodes ran on {', '.join(outcome.providers)}"
        if outcome.failure:
            yield f"{outcome.subject}: {named}; {runs}: {outcome.failure}"
        elif outcome.asked and not any(map(is_our_name, outcome.asked)):
            yield f"{outcome.subject}: asked only for {', '.join(outcome.asked)}; {runs}"
        else:
            yield f"{outcome.subject}: {named}; {runs}"
        return
    declined = outcome.declined()
    claimed = len(outcome.verdicts) - len(declined)
    total = _count(len(outcome.verdicts), "node")
    rest = f", {len(declined)} on {outcome.other}" if declined else ""
    devices = f" ({', '.join(outcome.devices)})" if outcome.devices else ""
    yield f"{outcome.subject}: {named}; {claimed} of {total} ran on {outcome.own}{devices}{rest}"
    if outcome.failure:
        yield outcome.failure
    groups = Counter((each.op_type, each.reason) for each in declined).most_common()
    for (op_type, reason), count in groups[:_MOST_REASONS]:
        yield f"{_count(count, f'{op_type} node')}: {reason}"
    if len(groups) > _MOST_REASONS:
        yield f"and {len(groups) - _MOST_REASONS} more reasons"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
