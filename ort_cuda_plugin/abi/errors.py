"""The base of the package's exceptions."""

from __future__ import annotations


class Error(Exception):
    """Base of the exceptions that this package defines and that can reach a caller.

    A program that catches it also gets, for example, OptionError, PluginError and the errors of compiled models. Wrong
    arguments of a Python function raise Python's own ValueError and TypeError, and a Run raises ONNX Runtime's
    exceptions.

    Examples:
        >>> try:
        ...     session = ort_cuda_plugin.session("model.onnx", provider_options={"use_tf_32": 0})
        ... except ort_cuda_plugin.Error as error:
        ...     print(str(error).partition(" known:")[0])
        CudaPluginExecutionProvider has no option 'use_tf_32'; did you mean 'use_tf32'?
    """
