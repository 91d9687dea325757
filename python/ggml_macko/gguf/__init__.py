"""GGUF model files: dense or sparse, whole or split; imatrix files; which tensors the tools work on.

Modules here may import `errors`, `console`, `values`, `native` and `codecs`.
"""
