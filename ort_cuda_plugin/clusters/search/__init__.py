"""Token searches of com.microsoft: a decoder and the choice of tokens run as a repetition."""
