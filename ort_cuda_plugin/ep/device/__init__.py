"""The device of a session: which there are, opening one, its libraries, and its clusters in C."""
