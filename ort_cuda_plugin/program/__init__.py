"""The program IR: symbolic sizes, scalar expressions, strided tensors, steps, and the context that
records the steps.
"""
