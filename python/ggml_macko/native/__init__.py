"""The C library and the hook with which llama_cpp opens sparse files. No other package uses cffi.

Modules here may import `errors` and `values`, and nothing else of the package.
"""
