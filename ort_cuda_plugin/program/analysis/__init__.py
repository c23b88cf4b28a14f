"""What is known of a program: its traffic, its text, its plain data, and whether it keeps the invariants."""
