"""Observes the sessions of the process: which providers they asked for, and where their nodes run."""
