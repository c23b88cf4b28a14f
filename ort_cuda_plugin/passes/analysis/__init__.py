"""What passes ask of a program: def-use chains, views, equal expressions, bounds of values; it changes nothing."""
