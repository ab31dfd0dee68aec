"""Bytes to numbers: the GGUF reader, quant formats, reference ops, backends, the combine."""
