"""Matrix products: SIMT, tensor cores, GEMV, grouped, and the choice among them."""
