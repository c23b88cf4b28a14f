"""Fuzzer: compares random networks on the plugin with ONNX Runtime's CPU provider.

    PYTHONPATH=tests/harness python -m fuzzing sizes --count 20000
    PYTHONPATH=tests/harness python -m fuzzing graphs --count 5000 --lowering sm_90 --check --adversarial

`network` builds a network node by node, and evaluates each node as soon as it is added. A maker (`makers_*`) is a
function that tries to add nodes of one kind. `judge` runs a network on the plugin, `minimize` reduces one with a wrong
result, and `campaign` judges many networks in worker processes.
"""
