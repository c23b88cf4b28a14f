"""Commands that run a model or a program."""
