"""GGUF model files, dense or sparse, whole or split; imatrix files; rules about tensors.

Modules here may import `errors`, `console`, `values`, `native` and `codecs`.
"""
