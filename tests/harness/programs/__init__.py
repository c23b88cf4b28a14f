"""Translation validation: a NumPy interpreter of programs, which finds the first pass that changes a program's results.

    PYTHONPATH=tests/harness python -m programs --count 500 --device sm_90

A program is the list of steps that passes transform. `interpreter` executes steps: `values` evaluates expressions and
element types in NumPy, `library` the calls of vendor libraries, and `opaque` replaces kernels that operators launch
themselves. `states` records a program after each pass and compares the results, `campaign` does so for many models and
device kinds.
"""
