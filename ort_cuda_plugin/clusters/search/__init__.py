"""Token searches of com.microsoft: decoder and choice of tokens run as a loop on the device, or as a `Repetition`."""
