"""Self-contained web pages: they need no server, network or other file."""
