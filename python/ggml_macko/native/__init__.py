"""The C library: the only package that uses cffi, and how llama_cpp learns to open sparse files.

Modules here may import `errors` and `values`, and nothing else of the package.
"""
