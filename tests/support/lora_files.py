"""A random LoRA adapter for a model, in the format of llama.cpp's convert_lora_to_gguf.py."""

from __future__ import annotations

import pathlib
import re

import gguf
import numpy as np


def write(path: pathlib.Path, model: pathlib.Path, rank: int = 4, scale: float = 0.4, seed: int = 7) -> pathlib.Path:
    """Adapts the attention and feed-forward matrices of all blocks, strongly enough to change the text."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for t in gguf.GGUFReader(model).tensors:
        if re.fullmatch(r"blk\.\d+\.(attn_q|attn_v|attn_output|ffn_up|ffn_down)\.weight", t.name):
            cols, rows = (int(n) for n in t.shape)
            writer.add_tensor(f"{t.name}.lora_a", rng.normal(0, 1 / np.sqrt(cols), (rank, cols)).astype(np.float32))
            writer.add_tensor(f"{t.name}.lora_b", rng.normal(0, scale / np.sqrt(rank), (rows, rank)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
