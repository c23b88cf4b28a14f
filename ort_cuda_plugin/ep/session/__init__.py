"""What a session's creation asks beside its nodes: session entries, the model's path, verdicts, warnings."""
