"""Performance model: estimates the cost of a plan on a described GPU."""
