"""Compiler passes: functions from a program (a sequence of steps) to an equivalent program. They run after operators
are lowered to steps and before the plan is built from launches.
"""
