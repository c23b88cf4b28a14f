"""A reference interpreter of programs, and the search for the first pass after which a program computes something else.

    PYTHONPATH=tests/harness python -m programs --count 500 --device sm_90

`values` evaluates expressions and element types in NumPy, `interpreter` executes steps, `library` the calls of vendor
libraries, `opaque` stands for operators' own kernels, `states` records a program after each pass and compares, and
`campaign` does so for many models and devices.
"""
