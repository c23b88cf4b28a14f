"""Claims: which nodes the plugin runs, and why it declines the other nodes."""
