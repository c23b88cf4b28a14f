"""Selection of schedules: which engine, tile and split of k computes a step. A schedule is plain data."""
