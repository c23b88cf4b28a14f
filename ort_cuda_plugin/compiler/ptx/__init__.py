"""PTX as a source language of the emulated device: a parser, a linker, and a translation to LLVM IR."""
