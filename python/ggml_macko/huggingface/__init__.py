"""Checkpoints of Hugging Face: safetensors files, compressed-tensors weights, the way to GGUF, and the hub.

Modules here may import `errors`, `console`, `values`, `native`, `codecs` and `gguf`. Nothing needs PyTorch; what
downloads needs huggingface-hub, and what makes a GGUF needs llama.cpp's converter, where it is used.
"""

from __future__ import annotations
