"""Mutation testing of PTX: injects faults of a compiler or author, and reports those that the emulated device misses.

``PYTHONPATH=tests/harness python -m ptx_mutations --count 100`` changes one instruction of a kernel of
tests/ptx/foreign at a time, and runs the kernel's check. It prints the mutations without a finding of the checking mode
and without a wrong result. Most of these are equivalent to the original: another thread stores the same value, or a
changed bound does not matter for the check's sizes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from foreign_compilers import CUDA, FOLDER, STORED
from foreign_kernels import CHECKS
from ort_cuda_plugin import emulator

SECONDS = 20
"""CPU seconds after which a mutated kernel counts as hung; a correct kernel takes less than a second."""
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["ptx_mutations", "ort_cuda_plugin.compiler.compile"])
Change = Callable[[re.Match[str]], str]
RELATIONS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}


MUTATIONS: dict[str, tuple[str, Change]] = {
    "barrier removed": (r"(?:bar|barrier)\.[^;]*sync[^;]*;|cp\.async\.wait[^;]*;", lambda match: ""),
    "offset changed": (r"(\[[%\w$]+)(\+\d+)?\]", lambda match: f"{match[1]}+{int(match[2] or 0) + 4}]"),
    "predicate negated": (r"@(!?)(%p\d+)", lambda match: f"@{'' if match[1] else '!'}{match[2]}"),
    "fragment swapped": (r"(\{\s*)(%\w+)(,\s*)(%\w+)", lambda match: f"{match[1]}{match[4]}{match[3]}{match[2]}"),
    "relation changed": (r"(setp\.)(\w\w)(\.\w+ )", lambda match: f"{match[1]}{RELATIONS[match[2]]}{match[3]}"),
    "sum changed": (r"(?<=\t)add(\.(?:s32|u32|f32|s64))", lambda match: f"sub{match[1]}"),
    "shift changed": (r"(sh[lr]\.\w+[^;]*, )(\d+);", lambda match: f"{match[1]}{int(match[2]) + 1};"),
    "lane changed": (r"(shfl\.sync\.\w+\.b32[^;]*, )(\d+)(, \d+, -?\d+;)", lambda m: f"{m[1]}{int(m[2]) ^ 3}{m[3]}"),
    "mask changed": (r"(and\.b32[^;]*, )(\d+);", lambda match: f"{match[1]}{int(match[2]) >> 1};"),
}
"""Kinds of faults: name -> (pattern of the instructions to change, replacement)."""


def kernels() -> Iterator[tuple[str, str]]:
    """Yield each stored kernel: its name, and the text of its module."""
    for source in STORED:
        text = (FOLDER / f"{source}.ptx").read_text()
        for name in CUDA.get(source, (source,)):
            yield name, text


def body_of(name: str, text: str) -> tuple[int, int]:
    """Return begin and end of a kernel's instructions, as indices into the text of its module."""
    entry = "matmul" if name.startswith("matmul") else name
    start = text.index("{", text.index(f".entry {entry}("))
    return start, text.index("\n}", start)


def mutations(name: str, text: str) -> Iterator[tuple[str, str, str]]:
    """Yield each mutation of a kernel: its kind, the changed line, and the text of the changed module."""
    start, end = body_of(name, text)
    for kind, (pattern, change) in MUTATIONS.items():
        for match in re.compile(pattern).finditer(text, start, end):
            line = text[text.rindex("\n", 0, match.start()) + 1 : text.index("\n", match.start())].strip()
            if (kind == "offset changed" and "param" in line) or line.startswith("."):
                continue
            try:
                changed = change(match)
            except KeyError:
                continue
            yield kind, line, text[: match.start()] + changed + text[match.end() :]


def outcome(name: str, text: str) -> str:
    """Run `check` in a new process, and return how the mutation was noticed; "" if it was not.

    The processes are forked from one that has imported the compiler, so that each takes a fraction of a second.
    """
    receiver, sender = PROCESSES.Pipe(duplex=False)
    child = PROCESSES.Process(target=answer, args=(name, text, sender))
    child.start()
    sender.close()
    try:
        found: str = receiver.recv()
    except EOFError:
        child.join()
        assert child.exitcode is not None
        assert child.exitcode < 0, "the process failed before the kernel ran"
        return "hangs" if child.exitcode == -signal.SIGXCPU else "crashes"
    child.join()
    return found


def answer(name: str, text: str, sender: Connection) -> None:
    """Run a check and send its outcome. A limit of CPU time ends the process if the kernel hangs."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    sender.send(check(name, text))


def check(name: str, text: str) -> str:
    """Run the check of a kernel, and return the first finding, "wrong result", or "" if nothing is wrong."""
    try:
        CHECKS[name](emulator.load(text))
    except emulator.EmulatorError as error:
        return (error.findings or (str(error),))[0].split(":")[0]
    except AssertionError:
        return "wrong result"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="mutations to run (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of mutations (default: 0)")
    arguments = parser.parse_args()
    chooser = random.Random(arguments.seed)
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, text in kernels():
        for kind, line, changed in mutations(name, text):
            groups.setdefault((kind, name), []).append((line, changed))
    order = [(kind, name, *chooser.choice(of)) for (kind, name), of in sorted(groups.items())]
    others = [(kind, name, *each) for (kind, name), of in sorted(groups.items()) for each in of]
    chooser.shuffle(others)
    order += [each for each in others if each not in order]
    noticed: Counter[str] = Counter()
    for kind, name, line, changed in order[: arguments.count]:
        how = outcome(name, changed)
        noticed[how or "not noticed"] += 1
        if not how:
            print(f"not noticed: {kind} in {name}: {line}")
    total = sum(noticed.values())
    print(", ".join(f"{count} {how}" for how, count in noticed.most_common()))
    print(f"{total - noticed['not noticed']} of {total} mutations were noticed")


if __name__ == "__main__":
    main()
