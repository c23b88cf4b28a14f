"""Common networks as PyTorch's exporter writes them, with seeded weights.

The networks are generated, so benchmarks and estimates need neither a download nor PyTorch. A name is a network,
``resnet50``, or a network and an element type, ``resnet50:float16``. The batch, and the lengths of sequences, are
symbolic: `Network.sizes` has the sizes that a benchmark uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx

from ort_cuda_plugin.networks import language, vision
from ort_cuda_plugin.networks.graph import DTYPES, NetworkGraph

__all__ = ["DTYPES", "NETWORKS", "Network", "build", "split_name"]


@dataclass(frozen=True)
class Network:
    """The function that generates a network, and the sizes of its symbolic dimensions other than the batch.

    ``write`` takes a `NetworkGraph`; some functions also take the numbers of layers and of tokens.
    """

    write: Callable[..., None]
    sizes: Mapping[str, int]


NETWORKS: Mapping[str, Network] = {
    "resnet50": Network(vision.resnet50, {}),
    "mobilenet_v2": Network(vision.mobilenet_v2, {}),
    "efficientnet_b0": Network(vision.efficientnet_b0, {}),
    "vit_b_16": Network(vision.vit_b_16, {}),
    "unet": Network(vision.unet, {}),
    "bert_base": Network(language.bert_base, {"sequence": 128}),
    "whisper_tiny_encoder": Network(language.whisper_tiny_encoder, {}),
    "llama_prefill": Network(language.llama, {"sequence": 512, "past": 0}),
    "llama_decode": Network(language.llama, {"sequence": 1, "past": 1024}),
}


def split_name(name: str) -> tuple[str, str] | None:
    """Split a name into network and element type; None if `NETWORKS` has no such network or type."""
    network, _, dtype = name.partition(":")
    dtype = dtype or DTYPES[0]
    return (network, dtype) if network in NETWORKS and dtype in DTYPES else None


def build(name: str, seed: int = 0) -> onnx.ModelProto:
    """Generate the network ``name``; as ``int8`` its GEMMs and convolutions have quantized operands (QDQ).

    Raises:
        ValueError: `NETWORKS` has no such network, or `DTYPES` no such element type.
    """
    parts = split_name(name)
    if parts is None:
        raise ValueError(
            f"unknown network {name!r}, expected NAME or NAME:TYPE with a name of {', '.join(NETWORKS)} and a "
            f"type of {', '.join(DTYPES)}"
        )
    graph = NetworkGraph(parts[0], parts[1], seed)
    NETWORKS[parts[0]].write(graph)
    return graph.model()
