"""Inputs with default values in compiled models: ONNX Runtime turns these inputs into constants when it compiles."""

from __future__ import annotations

import os


def restore_default_inputs(compiled: str | os.PathLike[str], source: str | os.PathLike[str]) -> list[str]:
    """Add the inputs of ``source`` that have default values to the inputs of ``compiled``, the model compiled from it.

    ONNX Runtime writes a compiled model whose inputs are only those that a Run must feed. The nodes of the compiled
    model read the other inputs, such as the parameters of a LoRA adapter, as initializers. This function changes the
    file ``compiled`` if necessary, and returns the names of the added inputs.

    Raises: OSError: a file cannot be read or written. google.protobuf.message.DecodeError: one is not an ONNX model.
    """
    import onnx  # sessions and adapters need no onnx

    original, made = (onnx.load(os.fspath(path), load_external_data=False) for path in (source, compiled))
    known = {x.name for x in made.graph.input}
    lost = {x.name for x in made.graph.initializer} - known
    added = [x for x in original.graph.input if x.name in lost]
    if added:
        made.graph.input.extend(added)
        onnx.save(made, os.fspath(compiled))
    return [x.name for x in added]
