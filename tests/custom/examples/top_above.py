# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
"""At most k of the largest elements above a threshold: how many there are is known after the kernel has run."""

from numba import cuda

from ort_cuda_plugin.custom.kernels import numba_kernel
from ort_cuda_plugin.custom.operator import Port
from ort_cuda_plugin.custom.plugin import (
    Phase,
    Plugin,
    PluginBuild,
    PluginCore,
    PluginCreator,
    PluginField,
    PluginFieldCollection,
    PluginFieldType,
    PluginRuntime,
    register_creator,
)
from ort_cuda_plugin.model.ir import DType


def top_above(x, values, indices, count, n, k, threshold):
    i = cuda.grid(1)
    if i < n:
        place = 0
        for j in range(n):
            if x[j] > x[i] or (x[j] == x[i] and j < i):
                place += 1
        if place < k and x[i] > threshold:
            values[place] = x[i]
            indices[place] = i
    if i == 0:
        found = 0
        for j in range(n):
            if x[j] > threshold:
                found += 1
        count[0] = min(found, k)


KERNEL = numba_kernel(top_above)


class TopAbove(Plugin, PluginCore, PluginBuild, PluginRuntime):
    def __init__(self, k, threshold):
        self.k, self.threshold = k, threshold

    def get_plugin_name(self):
        return "TopAbove"

    def get_plugin_namespace(self):
        return "my.domain"

    def clone(self):
        return TopAbove(self.k, self.threshold)

    def get_nb_outputs(self):
        return 3

    def get_output_data_types(self, input_types):
        return [input_types[0], DType.INT64, DType.INT64]

    def get_output_shapes(self, inputs, shape_inputs, expr_builder):
        (n,) = inputs[0]
        most = expr_builder.min(n, self.k)
        found = expr_builder.declare_size_tensor(2, opt=most, upper=most)
        return [(found,), (found,), ()]

    def configure_plugin(self, inputs, outputs):
        if len(inputs[0].desc.dims) != 1:
            raise ValueError(f"x has {len(inputs[0].desc.dims)} dimensions, not 1")

    def enqueue(self, input_desc, output_desc, inputs, outputs, workspace, stream):
        (n,) = input_desc[0].dims
        arguments = [inputs[0], *outputs, n, self.k, self.threshold]
        stream.launch(KERNEL, grid=n // 64 + 1, block=64, args=arguments)

    def get_fields_to_serialize(self):
        return PluginFieldCollection(
            [
                PluginField.of("k", self.k, PluginFieldType.INT64),
                PluginField.of("threshold", self.threshold, PluginFieldType.FLOAT32),
            ]
        )


@register_creator
class TopAboveCreator(PluginCreator):
    inputs = (Port("x", frozenset({DType.FLOAT32})),)
    outputs = (
        Port("values", frozenset({DType.FLOAT32})),
        Port("indices", frozenset({DType.INT64})),
        Port("count", frozenset({DType.INT64})),
    )

    def get_plugin_name(self):
        return "TopAbove"

    def get_plugin_namespace(self):
        return "my.domain"

    def get_field_names(self):
        return PluginFieldCollection(
            [
                PluginField("k", type=PluginFieldType.INT64),
                PluginField("threshold", type=PluginFieldType.FLOAT32),
            ]
        )

    def create_plugin(self, name, fields, phase: Phase):
        k, threshold = fields.get("k"), fields.get("threshold", 0.0)
        if k is None or k < 1:
            raise ValueError(f"field k = {k} is not at least 1")
        return TopAbove(k, threshold)
