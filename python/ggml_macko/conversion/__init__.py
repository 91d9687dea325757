"""Between dense and sparse files: convert, restore, verify, inspect.

Modules here may import `errors`, `console`, `values`, `native`, `codecs` and `gguf`. They name no storage format: what
a format can do is asked of its codec.
"""
