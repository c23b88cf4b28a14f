# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disable-error-code="name-defined"
"""Counts the elements that pass through it, over all Runs: the output of the counter is its input's memory."""

from ort_cuda_plugin.custom.kernels import numba_kernel
from ort_cuda_plugin.custom.operator import Port
from ort_cuda_plugin.custom.plugin import (
    Plugin,
    PluginBuild,
    PluginCore,
    PluginCreator,
    PluginRuntime,
    register_creator,
)
from ort_cuda_plugin.model.ir import DType


def add(counter, n):
    atomic_add_i64(counter, 0, n)  # noqa: F821 - kernels have it


KERNEL = numba_kernel(add)


class Counter(Plugin, PluginCore, PluginBuild, PluginRuntime):
    def get_plugin_name(self):
        return "Counter"

    def get_plugin_namespace(self):
        return "my.domain"

    def clone(self):
        return Counter()

    def get_nb_outputs(self):
        return 2

    def get_output_data_types(self, input_types):
        return input_types

    def get_output_shapes(self, inputs, shape_inputs, expr_builder):
        return inputs

    def get_aliased_input(self, output_index):
        return 1 if output_index == 1 else -1

    def enqueue(self, input_desc, output_desc, inputs, outputs, workspace, stream):
        stream.copy(outputs[0], inputs[0])
        stream.launch(KERNEL, grid=1, block=1, args=[outputs[1], inputs[0].size])


@register_creator
class CounterCreator(PluginCreator):
    inputs = (Port("x", frozenset({DType.FLOAT32})), Port("counter", frozenset({DType.INT64})))
    outputs = (Port("y", frozenset({DType.FLOAT32})), Port("counted", frozenset({DType.INT64})))

    def get_plugin_name(self):
        return "Counter"

    def get_plugin_namespace(self):
        return "my.domain"

    def create_plugin(self, name, fields, phase):
        return Counter()
