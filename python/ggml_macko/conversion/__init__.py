"""Between dense and sparse files: convert, restore, verify, inspect.

Modules here may import `errors`, `console`, `values`, `native`, `codecs` and `gguf`. They name no storage format:
codecs report the features of their formats.
"""
