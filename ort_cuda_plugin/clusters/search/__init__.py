"""Token searches of com.microsoft: the decoder and the choice of tokens run as a `Repetition`."""
