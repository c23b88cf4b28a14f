"""A performance model of GPUs: estimates the cost of a plan without a GPU."""
