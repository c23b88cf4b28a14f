"""Generation of kernel source from scalar expressions: parameters, index types, fragments, epilogues."""
