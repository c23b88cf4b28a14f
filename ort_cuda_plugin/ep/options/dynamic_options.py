"""Options that can change while a session lives (``OrtEp::SetDynamicOptions``).

``session.set_ep_dynamic_options({...})`` in Python, ``SetEpDynamicOptions`` in C. Keys may have the prefixes of session
entries. All options of a call are checked before the first one changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...plugin_library import EP_NAME
from ..device.identity import Identity
from . import arena
from .option_table import ROWS, Options
from .options import ALIAS_PREFIX, OptionError, parse_value

#: Options of the session that may change.
_OF_SESSION = tuple(key for key, row in ROWS.items() if row.changes)
#: Keys that change the limit of device memory; it holds for the whole process, not for the session alone.
_LIMITS = ("arena.max_mem", "gpu_mem_limit")
#: A key that ONNX Runtime defines for every execution provider; the plugin ignores it.
_WORKLOAD_TYPE = "ep.dynamic.workload_type"

#: Reasons why an option cannot change, if users may expect that it can.
_FIXED = {
    "weight_budget": "the session's plans copy the weights that the budget left in host memory; create another session"
}

KEYS = (*_LIMITS, *_OF_SESSION, _WORKLOAD_TYPE)


@dataclass(frozen=True)
class Changes:
    """The changes of one call.

    Attributes:
        options: the session's options from now on.
        memory_limit: bytes of device memory, 2**63 - 1 for no limit; None: unchanged.
        ignored: keys that were accepted without effect.
    """

    options: Options
    memory_limit: int | None = None
    ignored: tuple[str, ...] = ()


def parse_changes(values: Mapping[str, str], options: Options, identity: Identity) -> Changes:
    """Parse the options that a call changes.

    Raises: OptionError: a key cannot change, or its value is invalid.
    """
    changes = Changes(options)
    for given, text in values.items():
        key = given.removeprefix(identity.session_prefix).removeprefix(ALIAS_PREFIX)
        if key in _LIMITS:
            changes = replace(changes, memory_limit=parse_value(key, text, arena.read_limit))
        elif key in _OF_SESSION:
            changed: dict[str, Any] = {key: parse_value(key, text, ROWS[key].reader)}
            changes = replace(changes, options=replace(changes.options, **changed))
        elif key == _WORKLOAD_TYPE:
            parse_value(key, text, _workload)
            changes = replace(changes, ignored=(*changes.ignored, key))
        elif key in ROWS:
            why = f" ({_FIXED[key]})" if key in _FIXED else ""
            raise OptionError(
                f"{EP_NAME} option {key!r} cannot change after the session was created{why}; can change: {_known()}"
            )
        else:
            raise OptionError(f"{EP_NAME} has no option {key!r} that can change; known: {_known()}")
    return changes


def _known() -> str:
    return ", ".join(sorted(KEYS))


def _workload(text: str) -> str:
    if text not in ("Default", "Efficient"):
        raise ValueError("use Default or Efficient")
    return text
