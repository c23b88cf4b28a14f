"""Data types of programs: tensors, the steps that compute them, and the trace, which holds the steps in order."""
