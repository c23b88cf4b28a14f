"""Web pages that need nothing else: no server, no network, no other file."""
