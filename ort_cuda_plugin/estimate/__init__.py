"""A model of GPUs: what a plan costs on one that is not there."""
