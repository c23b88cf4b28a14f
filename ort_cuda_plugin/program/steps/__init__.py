"""Data types of programs: tensors, steps, schedules, and the trace, which holds the steps in order."""
