"""Progress of long work: events that report it, and a display of the events."""
