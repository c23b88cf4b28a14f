"""Session creation: reads session entries, finds the model's path, records verdicts, and warns of declined nodes."""
