"""Selection of schedules. A schedule is data: the engine (library or kernel), tile and split of k for a step.

The *rules* are heuristics that select a schedule without measured times.
"""
