"""Plans: the planner, which converts a program's launches to a plan, and the encoder and decoder of its binary form."""
