"""Reports on a program: its traffic, its text, its plain data, and violations of the invariants."""
