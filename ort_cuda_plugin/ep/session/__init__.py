"""Session creation: reads session entries, finds the model's path, and records which nodes were claimed, or why not.

It warns of declined nodes.
"""
