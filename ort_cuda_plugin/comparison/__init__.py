"""Results of two execution providers beside each other, and the first node that differs."""
