"""Plans: made of a program's launches, written as C reads them, and read back."""
