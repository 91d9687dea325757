"""Storage formats of sparse matrices: what a codec is (codec.py), which there are (registry.py), one module for each.

A codec module holds the NumPy twin of the C codec, the readable reference that tests hold the C library against byte
for byte, and a `Codec` that tells the tools what they need to know of the format. No other package names a format.
Modules here may import `errors`, `values` and `native`.
"""
