"""From an OrtGraph to plans: IR, symbolic shapes, claims, partitioning, lowering."""
