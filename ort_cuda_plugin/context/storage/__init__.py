"""How a compiled model is stored: container, files, hashes, graphs and constants."""
