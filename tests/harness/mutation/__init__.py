"""Mutation fuzzer: mutated ONNX models against the CPU provider: `bases` are changed by `mutators`, `oracle` judges,
`campaign` runs.

    PYTHONPATH=tests/harness python -m mutation --count 20000 --jobs 2 --out findings

A mutant is a base and a list of seeded steps, so that its number is enough to make it again.
"""
