"""Plans: the planner, which makes them from a program's launches, and their binary encoder and decoder."""
