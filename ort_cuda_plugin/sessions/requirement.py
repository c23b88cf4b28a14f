"""Placement requirement: `require` raises an error if a session, or some of its nodes, do not run on the plugin."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..abi.errors import Error
from ..clusters.claims.claims import NodeVerdict
from ..ep.device.identity import is_our_name
from ..plugin_library import get_ep_name
from .observation import outcome_of
from .outcome import Outcome, reasons

if TYPE_CHECKING:
    import onnxruntime as ort

_STRICTNESS = ("all", "any")


class PlacementError(Error, RuntimeError):
    """A session, or some of its nodes, do not run on the plugin.

    Attributes:
        verdicts: the verdicts of the nodes that run on another provider; empty if the session does not have the
            plugin's provider.

    Examples:
        >>> session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
        >>> try:
        ...     ort_cuda_plugin.require(session)
        ... except ort_cuda_plugin.PlacementError as error:
        ...     print(error.verdicts)
        []
    """

    def __init__(self, message: str, verdicts: Sequence[NodeVerdict] = ()) -> None:
        super().__init__(message)
        self.verdicts = list(verdicts)


def require(
    session: ort.InferenceSession, *, nodes: Literal["all", "any"] = "all", allow: Collection[str] = ()
) -> None:
    """Raise an error unless the session runs on the plugin.

    The call only reads what the creation of the session has recorded.

    Args:
        session: a session that was created after `register`, by `session` or by ONNX Runtime's own functions.
        nodes: "all": each node must run on the plugin; "any": at least one must.
        allow: operators (as "NonMaxSuppression") and names of nodes that may run on another provider.

    Raises:
        PlacementError: the session does not have the plugin's provider, a node that must run on the plugin does not,
            or this process was forked after the session was created; the message has the reasons.
        TypeError: ``session`` is not an ``InferenceSession``.
        ValueError: ``nodes`` is neither "all" nor "any".

    Examples:
        >>> session = ort_cuda_plugin.session("model.onnx")
        >>> ort_cuda_plugin.require(session)
        >>> ort_cuda_plugin.require(session, allow=["NonMaxSuppression"])
    """
    if nodes not in _STRICTNESS:
        raise ValueError(f"nodes={nodes!r}: expected one of {', '.join(map(repr, _STRICTNESS))}")
    if not hasattr(session, "get_providers"):
        raise TypeError(f"session: expected an onnxruntime.InferenceSession, got {type(session).__name__}")
    outcome = outcome_of(session) or _from_host(session)
    if not outcome.own:
        raise PlacementError(
            f"{outcome.subject}: the session runs on {', '.join(outcome.providers)}, not on {get_ep_name()}: "
            f"{outcome.failure or _not_asked(outcome)}"
        )
    if outcome.pid != os.getpid():
        raise PlacementError(
            f"{outcome.subject}: process {outcome.pid} created the session, and this process was forked from it. CUDA "
            "does not work in such a process: create the session after the fork, or start processes by spawn"
        )
    if outcome.is_fallback:
        raise PlacementError(f"{outcome.subject}: no node runs on {outcome.own}: {outcome.why()}", outcome.declined())
    allowed = {allow} if isinstance(allow, str) else set(allow)
    elsewhere = [each for each in outcome.declined() if not allowed & {each.op_type, each.name}]
    if nodes == "all" and elsewhere:
        raise PlacementError(
            f"{outcome.subject}: {len(elsewhere)} of {len(outcome.verdicts)} nodes run on {outcome.other}, not on "
            f"{outcome.own}: {reasons(elsewhere)}. To accept them, pass their operators in allow, or nodes='any'",
            elsewhere,
        )


def _not_asked(outcome: Outcome) -> str:
    named = (
        f"the application asked for {', '.join(outcome.asked)}"
        if outcome.asked
        else "the application named no provider"
    )
    return f"{named}. Create the session with ort_cuda_plugin.session, or with providers=[{get_ep_name()!r}]"


def _from_host(session: Any) -> Outcome:
    """Return the outcome of a session that was created before `register`, as ONNX Runtime recorded it."""
    providers = tuple(session.get_providers())
    own = next((name for name in providers if is_our_name(name)), "")
    if not own:
        return Outcome("the model", "", (), providers, "", (), "")
    try:
        parts = session.get_provider_graph_assignment_info()
    except Exception as error:
        raise PlacementError(
            "the session was created before ort_cuda_plugin.register, so the plugin has no record of its nodes. Call "
            "register first, or set the session configuration entry session.record_ep_graph_assignment_info=1"
        ) from error
    verdicts = [
        NodeVerdict(node.name, node.op_type, node.domain, 0, True, provider=part.ep_name)
        if part.ep_name == own
        else NodeVerdict(
            node.name,
            node.op_type,
            node.domain,
            0,
            False,
            kind="provider",
            reason=f"ONNX Runtime assigned it to {part.ep_name}",
            provider=part.ep_name,
        )
        for part in parts
        for node in part.get_nodes()
    ]
    return Outcome("the model", "", (), providers, own, verdicts, "")
