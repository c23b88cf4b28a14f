"""Networks over images, with the layers of torchvision's models of these names, and a U-Net."""

from __future__ import annotations

from collections.abc import Sequence

from ort_cuda_plugin.networks.graph import NetworkGraph

_CLASSES = 1000
_IMAGE: Sequence[int | str] = ["batch", 3, 224, 224]


def resnet50(b: NetworkGraph) -> None:
    """Write ResNet-50 (He et al. 2015), with the stride in the 3x3 convolutions as in torchvision: 53 convolutions."""
    x = b.add("Relu", b.conv(b.input("input", _IMAGE), 3, 64, 7, strides=[2, 2]))
    x = b.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = b.add("Relu", b.conv(x, channels, width))
            y = b.add("Relu", b.conv(y, width, width, 3, strides=[stride] * 2))
            y = b.conv(y, width, 4 * width, gain=0.5)
            if not block:
                x = b.conv(x, channels, 4 * width, gain=1.0, strides=[stride] * 2)
            x = b.add("Relu", b.add("Add", y, x))
            channels = 4 * width
    _classify(b, x, channels)


def mobilenet_v2(b: NetworkGraph) -> None:
    """Write MobileNetV2 (Sandler et al. 2018)."""

    def bounded(x: str) -> str:
        return str(b.add("Clip", x, b.number(0), b.number(6)))

    x = bounded(b.conv(b.input("input", _IMAGE), 3, 32, 3, strides=[2, 2]))
    channels = 32
    for factor, outputs, blocks, first in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for block in range(blocks):
            stride, wide = (1 if block else first), channels * factor
            y = x if factor == 1 else bounded(b.conv(x, channels, wide))
            y = bounded(b.conv(y, wide, wide, 3, strides=[stride] * 2, group=wide))
            y = b.conv(y, wide, outputs, gain=1.0)
            x = b.add("Add", x, y) if stride == 1 and channels == outputs else y
            channels = outputs
    _classify(b, bounded(b.conv(x, channels, 1280)), 1280)


def efficientnet_b0(b: NetworkGraph) -> None:
    """Write EfficientNet-B0 (Tan and Le 2019): inverted bottlenecks with squeeze-and-excitation."""
    x = b.silu(b.conv(b.input("input", _IMAGE), 3, 32, 3, strides=[2, 2]))
    channels = 32
    for factor, kernel, first, outputs, blocks in (
        (1, 3, 1, 16, 1),
        (6, 3, 2, 24, 2),
        (6, 5, 2, 40, 2),
        (6, 3, 2, 80, 3),
        (6, 5, 1, 112, 3),
        (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    ):
        for block in range(blocks):
            stride, wide = (1 if block else first), channels * factor
            y = x if factor == 1 else b.silu(b.conv(x, channels, wide))
            y = b.silu(b.conv(y, wide, wide, kernel, strides=[stride] * 2, group=wide))
            squeezed = b.silu(b.conv(b.add("GlobalAveragePool", y), wide, max(1, channels // 4)))
            y = b.add("Mul", b.add("Sigmoid", b.conv(squeezed, max(1, channels // 4), wide)), y)
            y = b.conv(y, wide, outputs, gain=1.0)
            x = b.add("Add", y, x) if stride == 1 and channels == outputs else y
            channels = outputs
    _classify(b, b.silu(b.conv(x, channels, 1280)), 1280)


def vit_b_16(b: NetworkGraph, layers: int = 12) -> None:
    """Write ViT-B/16 (Dosovitskiy et al. 2020): 196 patches and a class token, 12 layers of width 768."""
    hidden, count = 768, 12
    patches = b.conv(b.input("input", _IMAGE), 3, hidden, 16, gain=1.0, strides=[16, 16], pads=[0] * 4)
    rows = b.add("Transpose", b.add("Reshape", patches, b.constant([0, hidden, 196])), perm=[0, 2, 1])
    batch = b.add("Gather", b.add("Shape", rows), b.constant(0), axis=0)
    sizes = b.add("Concat", b.add("Unsqueeze", batch, b.constant([0])), b.constant([-1, -1]), axis=0)
    token = b.add("Expand", b.noise(1, 1, hidden), b.add("Abs", sizes))
    x = b.add("Add", b.add("Concat", token, rows, axis=1), b.noise(1, 197, hidden))
    for _ in range(layers):
        y = b.layer_norm(x, hidden, 1e-6)
        query, key, value = (b.heads(b.linear(y, hidden, hidden), count, hidden // count) for _ in range(3))
        mixed = b.merge_heads(b.attention(query, key, value, hidden // count), hidden)
        x = b.add("Add", b.linear(mixed, hidden, hidden), x)
        wide = b.gelu(b.linear(b.layer_norm(x, hidden, 1e-6), hidden, 4 * hidden))
        x = b.add("Add", x, b.linear(wide, 4 * hidden, hidden))
    first = b.add("Gather", b.layer_norm(x, hidden, 1e-6), b.constant(0), axis=1)
    b.output(b.gemm(first, hidden, _CLASSES), "output", ["batch", _CLASSES])


def unet(b: NetworkGraph) -> None:
    """Write U-Net (Ronneberger et al. 2015) with padded convolutions, over images of 256 x 256."""
    x, channels, kept = b.input("input", ["batch", 3, 256, 256]), 3, []
    for level in range(5):
        width = 64 << level
        for _ in range(2):
            x, channels = b.add("Relu", b.conv(x, channels, width, 3)), width
        if level < 4:
            kept.append((x, width))
            x = b.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    for skip, width in reversed(kept):
        weight = b.noise(channels, width, 2, 2, deviation=channels**-0.5)
        x = b.add("ConvTranspose", x, weight, b.noise(width), kernel_shape=[2, 2], strides=[2, 2])
        x, channels = b.add("Concat", skip, x, axis=1), 2 * width
        for _ in range(2):
            x, channels = b.add("Relu", b.conv(x, channels, width, 3)), width
    b.output(b.conv(x, channels, 1, gain=1.0), "output", ["batch", 1, 256, 256])


def _classify(b: NetworkGraph, x: str, channels: int) -> None:
    flat = b.add("Flatten", b.add("GlobalAveragePool", x), axis=1)
    b.output(b.gemm(flat, channels, _CLASSES), "output", ["batch", _CLASSES])
