"""U-shaped networks that segment the foreground of images: U^2-Net (full and small) and IS-Net, with seeded weights.

The architectures are those of the published networks (U^2-Net: Qin et al. 2020; IS-Net, also used by RMBG-1.4: Qin et
al. 2022), as they are exported for inference. Every block is Conv 3x3, BatchNormalization and Relu, the blocks of each
stage form a U themselves, and each decoder stage has a side output of one channel. Weights are noise, scaled so that
activations neither vanish nor explode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
SIDE_GAIN = 0.02
"""Gain of the side outputs' weights. It is small, so that Sigmoid does not saturate."""


@dataclass(frozen=True)
class Stage:
    """A residual U (RSU) of ``depth`` blocks; with ``flat`` its blocks use dilation instead of pooling."""

    depth: int
    middle: int
    out: int
    flat: bool = False


@dataclass(frozen=True)
class Network:
    """The stages of a network, ``encoder`` in the direction of smaller images, ``decoder`` in that of larger ones.

    IS-Net begins with a convolution of stride 2. With ``fused`` a convolution combines the side outputs into the first
    output, as in U^2-Net.
    """

    name: str
    encoder: tuple[Stage, ...]
    decoder: tuple[Stage, ...]
    stem: int = 0
    fused: bool = True


FULL_ENCODER = (
    Stage(7, 32, 64),
    Stage(6, 32, 128),
    Stage(5, 64, 256),
    Stage(4, 128, 512),
    Stage(4, 256, 512, flat=True),
    Stage(4, 256, 512, flat=True),
)
FULL_DECODER = (
    Stage(4, 256, 512, flat=True),
    Stage(4, 128, 256),
    Stage(5, 64, 128),
    Stage(6, 32, 64),
    Stage(7, 16, 64),
)
SMALL_ENCODER = tuple(Stage(depth, 16, 64, flat=depth == 0) for depth in (7, 6, 5, 4)) + (Stage(4, 16, 64, True),) * 2
SMALL_DECODER = (Stage(4, 16, 64, True), *(Stage(depth, 16, 64) for depth in (4, 5, 6, 7)))
NETWORKS = {
    network.name: network
    for network in (
        Network("u2net", FULL_ENCODER, FULL_DECODER),
        Network("u2netp", SMALL_ENCODER, SMALL_DECODER),
        Network("isnet", FULL_ENCODER, FULL_DECODER, stem=64, fused=False),
        Network("isnetp", SMALL_ENCODER, SMALL_DECODER, stem=64, fused=False),
    )
}


class Builder:
    """Collects nodes and weights; methods take and return names of values."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(seed)
        self._sizes: dict[str, str] = {}

    def add(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        name = f"{op_type.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def weight(self, values: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def noise(self, shape: tuple[int, ...], scale: float, around: float = 0.0) -> str:
        return self.weight((around + scale * self._rng.standard_normal(shape)).astype(np.float32))

    def conv(
        self, x: str, channels: int, out: int, kernel: int = 3, stride: int = 1, dilation: int = 1, gain: float = 1.0
    ) -> str:
        w = self.noise((out, channels, kernel, kernel), gain * math.sqrt(2.0 / (channels * kernel**2)))
        pad = dilation * (kernel // 2)
        return self.add(
            "Conv", [x, w, self.noise((out,), 0.1)], kernel_shape=[kernel] * 2, strides=[stride] * 2,
            dilations=[dilation] * 2, pads=[pad] * 4,
        )  # fmt: skip

    def block(self, x: str, channels: int, out: int, dilation: int = 1) -> str:
        y = self.conv(x, channels, out, dilation=dilation)
        scale, bias, mean = self.noise((out,), 0.1, 1.0), self.noise((out,), 0.1), self.noise((out,), 0.1)
        variance = self.weight(np.exp(0.1 * self._rng.standard_normal(out)).astype(np.float32))
        return self.add("Relu", [self.add("BatchNormalization", [y, scale, bias, mean, variance])])

    def pool(self, x: str) -> str:
        return self.add("MaxPool", [x], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)

    def resize_like(self, x: str, like: str) -> str:
        """Resize bilinearly to the height and width of ``like``, computed in the model as exporters do."""
        if like not in self._sizes:
            start, end = self.weight(np.array([2], np.int64)), self.weight(np.array([4], np.int64))
            axis = self.weight(np.array([0], np.int64))
            self._sizes[like] = self.add("Slice", [self.add("Shape", [like]), start, end, axis])
        lead = self.add("Slice", [self.add("Shape", [x]), *[self.weight(np.array([i], np.int64)) for i in (0, 2, 0)]])
        sizes = self.add("Concat", [lead, self._sizes[like]], axis=0)
        return self.add(
            "Resize", [x, "", "", sizes], mode="linear", coordinate_transformation_mode="pytorch_half_pixel",
            cubic_coeff_a=-0.75, nearest_mode="floor",
        )  # fmt: skip

    def concat(self, *values: str) -> str:
        return self.add("Concat", list(values), axis=1)

    def stage(self, x: str, channels: int, stage: Stage) -> str:
        middle = stage.middle
        first = self.block(x, channels, stage.out)
        down = [self.block(first, stage.out, middle)]
        for level in range(1, stage.depth - 1):
            before = down[-1] if stage.flat else self.pool(down[-1])
            down.append(self.block(before, middle, middle, 2**level if stage.flat else 1))
        y = self.block(down[-1], middle, middle, 2 ** (stage.depth - 1) if stage.flat else 2)
        for level in reversed(range(stage.depth - 1)):
            if not stage.flat and level < stage.depth - 2:
                y = self.resize_like(y, down[level])
            out = middle if level else stage.out
            y = self.block(self.concat(y, down[level]), 2 * middle, out, 2**level if stage.flat else 1)
        return self.add("Add", [y, first])


def build(network: Network, size: int | str = 1024, batch: int | str = 1, seed: int = 0) -> onnx.ModelProto:
    """Return the network for square images of a size; a name instead of a number makes a dimension symbolic."""
    b = Builder(seed)
    y, channels = "image", 3
    if network.stem:
        y, channels = b.conv(y, channels, network.stem, stride=2), network.stem
    features: list[tuple[str, int]] = []
    for number, stage in enumerate(network.encoder):
        y = b.stage(b.pool(y) if number else y, channels, stage)
        channels = stage.out
        features.append((y, channels))
    sides = [features[-1]]
    for stage, (skip, skip_channels) in zip(network.decoder, reversed(features[:-1]), strict=True):
        y = b.stage(b.concat(b.resize_like(y, skip), skip), channels + skip_channels, stage)
        channels = stage.out
        sides.append((y, channels))
    masks = [b.conv(value, count, 1, gain=SIDE_GAIN) for value, count in reversed(sides)]
    like = "image" if network.stem else masks[0]
    masks = [mask if mask == like else b.resize_like(mask, like) for mask in masks]
    if network.fused:
        masks.insert(0, b.conv(b.concat(*masks), len(masks), 1, kernel=1))
    outputs = [b.add("Sigmoid", [mask]) for mask in masks]
    shapes = [batch, 3, size, size]
    graph = helper.make_graph(
        b.nodes,
        network.name,
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, shapes)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 1, size, size]) for name in outputs],
        b.weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model, full_check=isinstance(size, int))
    return model
