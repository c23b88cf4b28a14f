"""Layering rules: session entries by which ONNX Runtime assigns nodes to devices before it asks providers.

A rule is ``device(pattern, ...)``; semicolons separate rules. ONNX Runtime shows a provider only the nodes that no rule
assigns to another provider.

ONNX Runtime cannot fuse a node that exchanges values with nodes that it does not show: an assertion fails, and with it
the creation of the session. A provider cannot see such values. So if a rule may assign nodes to another provider, the
plugin claims each node separately, and ONNX Runtime runs the node by a kernel of the registry.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..device.devices import DeviceInfo
from ..device.identity import Identity

#: Rules match the metadata ``layer_ann`` of nodes, or from ONNX Runtime 1.28 the names of nodes.
NAMES_SINCE = 28
KEYS = ("session.layer_assignment_settings", "session.name_based_layer_assignment")

#: "cuda" means the provider named CUDAExecutionProvider, and in later versions Microsoft's plugin as well.
_ANY_GPU = ("gpu", "gpu:nvidia", "accelerator", "cuda")


def rules_of_others(entries: Mapping[str, str], identity: Identity, device: DeviceInfo, host_version: int) -> str:
    """Return the devices of rules that may assign nodes to another provider, as text; "" for none.

    ``host_version`` is the N of ONNX Runtime 1.N, which ignores the entries that it does not know.
    """
    ours = {*_ANY_GPU, f"gpu:{device.ordinal}", identity.ep_name.lower()}
    rules = [
        rule
        for key in (KEYS if host_version >= NAMES_SINCE else KEYS[:1])
        for rule in entries.get(key, "").split(";")
        if rule.strip()
    ]
    devices = [rule.partition("(")[0].strip() for rule in rules]
    return ", ".join(dict.fromkeys(name for name in devices if name.lower() not in ours))
