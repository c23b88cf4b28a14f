"""The context that operators get, and the mechanisms that record steps in it."""
