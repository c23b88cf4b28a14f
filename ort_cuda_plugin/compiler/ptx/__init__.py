"""PTX as a source language of the emulated device: a parser, and a translation into LLVM IR."""
