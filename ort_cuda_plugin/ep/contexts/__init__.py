"""EPContext nodes: writes and loads compiled models in a session."""
