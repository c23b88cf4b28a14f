"""One declaration per operator: versions, types, and the lowering that is also its shape rule."""
