"""Checkpoints of Hugging Face: safetensors files, compressed-tensors weights, the conversion to GGUF, and the hub.

Modules here may import `errors`, `console`, `values`, `native`, `codecs` and `gguf`. No module needs PyTorch; downloads
need huggingface-hub, and the conversion to GGUF runs llama.cpp's converter.
"""

from __future__ import annotations
