"""Storage formats of sparse matrices: the interface (codec.py), the list (registry.py), and a module per format.

A module defines a `Codec`, through which the tools use the format. No other package names a format.
Modules here may import `errors`, `values` and `native`.
"""
