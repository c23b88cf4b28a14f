"""Mutation fuzzer: compares mutated ONNX models on the plugin with the CPU provider.

    PYTHONPATH=tests/harness python -m mutation --count 20000 --jobs 2 --out findings

`mutators` change the models of `bases`, `oracle` judges the results, and `campaign` runs many mutants. A mutant is a
base model and a list of seeded mutations. Both follow from the mutant's number.
"""
