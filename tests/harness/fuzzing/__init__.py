"""Fuzzer: random networks against ONNX Runtime's CPU provider.

    PYTHONPATH=tests/harness python -m fuzzing sizes --count 20000
    PYTHONPATH=tests/harness python -m fuzzing graphs --count 5000 --lowering sm_90 --check --adversarial

`network` grows a network and evaluates each node as soon as it is added, `makers_*` choose the nodes, `judge` runs the
network on the plugin, `minimise` makes a finding small, and `campaign` runs many in worker processes.
"""
