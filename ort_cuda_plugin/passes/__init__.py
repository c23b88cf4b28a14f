"""Compiler passes: functions from a program, a sequence of steps, to an equivalent program."""
