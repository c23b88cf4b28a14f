"""The Python side of the execution provider: factory, provider, options, devices."""
