"""Layering rules: session entries by which ONNX Runtime gives nodes to devices before providers are asked.

A rule is ``device(pattern, ...)``; rules are separated by semicolons. A provider sees the nodes that no rule gives to
another one. ONNX Runtime can fuse nodes of such a part only where no value crosses its border: elsewhere it fails an
assertion, and the session with it. A provider cannot see the border. So where a rule may give nodes to another
provider, each of our nodes is claimed by itself, and runs by a kernel of the registry: a node of the operator table, of
an application's operator, or of a compiled model.
"""

from __future__ import annotations

from collections.abc import Mapping

from .devices import DeviceInfo
from .identity import Identity

#: Rules match the metadata ``layer_ann`` of nodes, or from ONNX Runtime 1.28 the names of nodes.
NAMES_SINCE = 28
KEYS = ("session.layer_assignment_settings", "session.name_based_layer_assignment")

#: "cuda" is the provider of that name, in versions that know it also its plugin, and else nobody.
_ANY_GPU = ("gpu", "gpu:nvidia", "accelerator", "cuda")


def rules_of_others(entries: Mapping[str, str], identity: Identity, device: DeviceInfo, host_version: int) -> str:
    """The devices of the rules that may give nodes to another provider, as text; "" where there are none.

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
