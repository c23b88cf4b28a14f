"""The base of the package's exceptions."""

from __future__ import annotations


class Error(Exception):
    """Base of the exceptions that this package defines and that can reach a caller.

    A program that catches it also gets, for example, OptionError, PluginError and the errors of compiled models. Wrong
    arguments of a Python function raise Python's own ValueError and TypeError, and a Run raises ONNX Runtime's
    exceptions.

    ::

        try:
            session = ort_cuda_plugin.session("model.onnx")
        except ort_cuda_plugin.Error as error:
            print(error)
    """
