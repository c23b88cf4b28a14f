"""Storage of compiled models: container, files, hashes, graphs and constants."""
