"""Checks of pooling, resizing and sampling of images."""

from __future__ import annotations

from collections.abc import Iterator

from .case import Case

POOLS = {
    "MaxPool": "MaxPool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(x)",
    "AveragePool": "AveragePool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(x)",
}
MODES = {
    "nearest": 'mode = "nearest"',
    "linear": 'mode = "linear"',
    "cubic": 'mode = "cubic", coordinate_transformation_mode = "align_corners"',
}


def cases(is_quick: bool) -> Iterator[Case]:
    """Yield the cases of images."""
    for type_name in ("float",) if is_quick else ("float", "float16", "bfloat16"):
        for images, channels in ((1, 3), (2, 16)):
            shape, pooled = f"{{T}}[{images}, {channels}, 17, 13]", f"{{T}}[{images}, {channels}, 9, 7]"
            results = ", ".join(f"{pooled} {name}" for name in POOLS)
            nodes = " ".join(f"{name} = {node}" for name, node in POOLS.items())
            text = f"""({shape} x) => ({results}, {{T}}[{images}, {channels}, 1, 1] GlobalAveragePool)
                {{ {nodes} GlobalAveragePool = GlobalAveragePool(x) }}"""
            yield Case(f"pools of {channels} channels, {type_name}", text, type_name, is_exact=False, by_output=True)
        for name, mode in MODES.items():
            text = f"""({{T}}[1, 3, 9, 11] x) => ({{T}}[1, 3, 20, 7] y) {{
                sizes = Constant<value_ints = [1, 3, 20, 7]>() y = Resize<{mode}>(x, , , sizes) }}"""
            is_exact = name == "nearest"
            yield Case(f"resize, {name}, {type_name}", text, type_name, operators=("Resize",), is_exact=is_exact)
    text = "(float[1, 3, 9, 11] x, float[1, 5, 6, 2] g) => (float[1, 3, 5, 6] y) { y = GridSample(x, g) }"
    yield Case("GridSample, float", text, "float", operators=("GridSample",), is_exact=False)
    text = """(float[1, 8, 6, 4] x) => (float[1, 2, 12, 8] y, float[1, 32, 3, 2] z)
        { y = DepthToSpace<blocksize = 2>(x) z = SpaceToDepth<blocksize = 2>(x) }"""
    yield Case("depth to space, float", text, "float", operators=("DepthToSpace", "SpaceToDepth"))
