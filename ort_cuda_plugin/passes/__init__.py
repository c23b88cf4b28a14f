"""Compiler passes: functions from a program to a program, between the operators' lowering and the launches."""
