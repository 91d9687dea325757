"""Storage formats of sparse matrices: what a codec is (codec.py), which there are (registry.py), one module for each.

A codec module holds a `Codec`, which tells the tools what they need to know about the format. No other package names a
format.
Modules here may import `errors`, `values` and `native`.
"""
