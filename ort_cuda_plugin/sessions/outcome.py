"""Session outcome: where the nodes of one session run, and why some do not run on the plugin."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..clusters.claims.claims import NodeVerdict

_MOST_NODES = 10
"""Maximum number of nodes that a text names."""


@dataclass(frozen=True)
class Outcome:
    """A session that was created, or whose providers were changed.

    Attributes:
        model: the path of the model, or its size if the application passed the bytes.
        caller: file and line of the application, as "app.py:12"; "" if unknown.
        asked: the names of providers that the application passed; empty if it passed none.
        providers: the names of the session's providers, in the order of their priority; empty if the session could not
            be created.
        own: the name of the plugin's provider, or "" if the session does not have it.
        verdicts: the plugin's verdicts; empty without the provider.
        failure: why the session could not be created, why it does not have the plugin's provider, or why the provider
            could not claim nodes; else "".
        devices: the names of the devices of the plugin's provider.
        pid: the process that created the session.
    """

    model: str
    caller: str
    asked: tuple[str, ...]
    providers: tuple[str, ...]
    own: str
    verdicts: Sequence[NodeVerdict]
    failure: str
    devices: tuple[str, ...] = ()
    pid: int = field(default_factory=os.getpid)

    @property
    def subject(self) -> str:
        """Return the model, and where the application created the session."""
        return f"{self.model} ({self.caller})" if self.caller else self.model

    @property
    def other(self) -> str:
        """Return the provider that runs the declined nodes; "another provider" if there are several."""
        others = [name for name in self.providers if name != self.own]
        return others[0] if len(others) == 1 else "another provider"

    @property
    def is_fallback(self) -> bool:
        """Return whether the application asked for the plugin, and no node runs on it."""
        if not self.own:
            return bool(self.failure)
        return bool(self.verdicts or self.failure) and not any(verdict.supported for verdict in self.verdicts)

    def declined(self) -> list[NodeVerdict]:
        """Return the verdicts of the nodes that run on another provider."""
        return [verdict for verdict in self.verdicts if not verdict.supported]

    def why(self) -> str:
        """Explain why no node of the session runs on the plugin."""
        if self.failure:
            return self.failure
        if not self.verdicts:
            return "ONNX Runtime's graph optimizations removed all nodes, for example by constant folding"
        return reasons(self.verdicts)


def reasons(verdicts: Sequence[NodeVerdict]) -> str:
    """Return the reason of each node, for the first ten nodes."""
    shown = [
        f"{verdict.op_type} node {verdict.name!r} ({verdict.kind}): {verdict.reason}"
        for verdict in verdicts[:_MOST_NODES]
    ]
    rest = len(verdicts) - len(shown)
    return "; ".join(shown) + (f"; and {rest} more" if rest else "")
