"""Joins a profile with the estimate for a GPU by ONNX node, because the plans of the two may have different steps."""

from __future__ import annotations

from dataclasses import replace

from ..estimate.model import Estimate
from .collect import Plans, Profile, Step, parts


def beside(profile: Profile, plans: Plans, estimate: Estimate) -> Profile:
    """Return the profile with the estimated time of each node and step, or None if the estimate lacks it."""
    seconds: dict[str, float] = {}
    for step in estimate.steps:
        nodes = [label.rpartition(" (")[0] for label in step.nodes]
        for node, part in parts(nodes, plans, estimate.device).items():
            seconds[node] = seconds.get(node, 0.0) + part * step.seconds
    nodes_found = [
        replace(node, estimated=seconds[node.name] * 1e6 if node.name in seconds else None) for node in profile.nodes
    ]
    measured = {node.name: node.microseconds for node in profile.nodes}

    def of_step(step: Step) -> float | None:
        shares = parts(step.nodes, plans, estimate.device)
        known = {node: share for node, share in shares.items() if node in seconds}
        if not known:
            return None
        return sum(
            seconds[node] * 1e6 * (share * step.microseconds / measured[node] if measured[node] else 0.0)
            for node, share in known.items()
        )

    steps = [replace(step, estimated=of_step(step)) for step in profile.steps]
    return replace(profile, steps=tuple(steps), nodes=tuple(nodes_found), gpu=estimate.label)
