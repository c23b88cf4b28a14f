"""Token searches of com.microsoft: a decoder and the choice of tokens as a repetition."""
