"""Plans: made from a program's launches, encoded for C, and decoded."""
