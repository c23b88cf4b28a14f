"""Reports on a program: memory traffic, readable text, JSON data, and violations of the invariants."""
