"""What ONNX Runtime's errors about models mean: which node nobody runs and why, which onnx wrote a file."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace

from .clusters.claims import NodeVerdict
from .custom import registry

#: ONNX Runtime's ways to say that no provider took a node; the group is the node's name.
_NO_PROVIDER = (
    r"Provider type for \S+ node with name '(.*?)' is not set",
    r"Failed to find kernel for \S+ \(node:'(.*?)' ep:",
    r"Could not find an implementation for \S+ node with name '(.*?)'",
    r"node '(.*?)': only \S+ runs \S+, and declined it",  # our own, of an application's operator
)
_NO_SUCH_OPERATOR = " is not a registered function/op"
_OPERATOR = r"(\S+):(\w+)\(-?\d+\)$"
_LONGEST_OPERATOR = 500
"""Characters of a domain and a name; those of a hostile model may have any number."""
#: Domains whose operators come with ONNX Runtime, each with the domains below it.
_STANDARD_DOMAINS = ("ai.onnx", "com.microsoft", "com.ms")
#: How the reason of a node ends that runs nowhere.
NOWHERE = "no other provider runs it"
_IR_VERSION = r"Unsupported model IR version: (\d+), max supported IR version: (\d+)"


class NoProviderError(RuntimeError):
    """A node of the model runs nowhere.

    Attributes:
        verdicts: those of the plugin; the reason of that node's says that no other provider runs it either.
    """

    def __init__(self, message: str, verdicts: list[NodeVerdict]) -> None:
        super().__init__(message)
        self.verdicts = verdicts


class ModelFormatError(RuntimeError):
    """The model is in a newer format than this ONNX Runtime reads."""


def explained(error: Exception, model: str | bytes, verdicts: Sequence[NodeVerdict]) -> Exception:
    """The error to raise in place of ONNX Runtime's ``error``: one that says more where that is possible.

    ``model`` is a path or the bytes of a model, ``verdicts`` are those of the session that was not made.
    """
    text = str(error)
    for pattern in _NO_PROVIDER:
        if match := re.search(pattern, text, re.DOTALL):
            return _no_provider(error, match[1], verdicts)
    before, found, _ = text.partition(_NO_SUCH_OPERATOR)
    if found and (match := re.search(_OPERATOR, before[-_LONGEST_OPERATOR:])):
        hint = _how_to_register(match[1], match[2])
        return RuntimeError(f"{text}. {hint}") if hint else error
    if match := re.search(_IR_VERSION, text):
        return ModelFormatError(_newer_format(int(match[1]), int(match[2]), model))
    return error


def own_operator(error: Exception) -> str:
    """The operator of an application that another provider's session lacks, as "my.domain::Swish"; "" for others."""
    before, found, _ = str(error).partition(_NO_SUCH_OPERATOR)
    match = re.search(_OPERATOR, before[-_LONGEST_OPERATOR:]) if found else None
    rows = registry.current().operators if match else []
    return next((row.qualified_name for row in rows if match and (row.domain, row.name) == match.groups()), "")


def _how_to_register(domain: str, name: str) -> str:
    """What an application does so that sessions have its operator; nothing for an operator of a standard domain."""
    domain = "" if domain == "ai.onnx" else domain
    found = [row for row in registry.current().operators if (row.domain, row.name) == (domain, name)]
    if any(not row.is_own_schema for row in found):
        where = domain or "ai.onnx"
        return f"Only ONNX Runtime itself adds operators to the domain {where!r}: use a domain of your own"
    if found:
        names = ", ".join(row.label for row in found)
        return (
            f"{names} was registered after these session options got the provider, or is newer than the opset that the "
            "model imports: register operators first, and use new options"
        )
    if any(f"{domain or 'ai.onnx'}.".startswith(f"{standard}.") for standard in _STANDARD_DOMAINS):
        return ""
    return f"Nobody registered {domain}::{name} with the plugin: import the module that has it"


def _no_provider(error: Exception, name: str, verdicts: Sequence[NodeVerdict]) -> Exception:
    lost = next((verdict for verdict in verdicts if verdict.name == name and not verdict.supported), None)
    if lost is None:
        return error
    operator = f"{lost.domain or 'ai.onnx'}.{lost.op_type}-{lost.since_version}"
    reason = f"{lost.reason}; {NOWHERE}"
    return NoProviderError(
        f"no provider runs the node {name!r} ({operator}): {reason}",
        [replace(verdict, reason=reason) if verdict is lost else verdict for verdict in verdicts],
    )


def _newer_format(version: int, most: int, model: str | bytes) -> str:
    import onnx  # which a process that loads compiled models may not have
    from onnx.helper import VERSION_TABLE

    header = onnx.load(io.BytesIO(model) if isinstance(model, bytes) else model, load_external_data=False)
    producer = f"{header.producer_name} {header.producer_version}".strip() or "a program that it does not name"
    writers = [row[0] for row in VERSION_TABLE if row[1] == version]
    written_with = f"that of onnx {writers[0]}" if writers else f"newer than that of onnx {VERSION_TABLE[-1][0]}"
    return (
        f"the model was written by {producer} in ONNX's format of IR version {version}, which is {written_with}; this "
        f"ONNX Runtime reads up to IR version {most}. Install a newer onnxruntime, or write the model in the older "
        "format, which works unless it has newer types: "
        f"model = onnx.load(path); model.ir_version = {most}; onnx.save(model, path)"
    )
