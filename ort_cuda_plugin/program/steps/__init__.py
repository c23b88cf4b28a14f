"""Data types of programs: tensors, the steps that compute them, and the trace that has the steps in order."""
