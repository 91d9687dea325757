"""A tiny Llama as a Hugging Face checkpoint in the format of compressed-tensors, and a converter back to GGUF.

`main` replaces llama.cpp's convert_hf_to_gguf.py, which needs PyTorch: it has the same command line, reads and refuses
the same files (config.json, safetensors), and writes the same names. Its vocabulary is that of tiny_models.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from support import gguf_bytes, tiny_models

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


AS_PROGRAM = f"""import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from support import hf_checkpoint
hf_checkpoint.main()
"""
"""The lines of a program that calls main()."""


def hf_name(name: str) -> str:
    """The name in the checkpoint of a tensor of a GGUF file."""
    *block, role, _ = name.split(".")
    return (f"model.layers.{block[1]}." if block else "") + NAMES[role] + ".weight"


def pack(w: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of the sparse-bitmask format for one matrix."""
    mask = w != 0
    counts = mask.sum(axis=-1)
    return {
        "shape": np.array(w.shape, np.int64),
        "compressed": w[mask],
        "bitmask": np.packbits(mask, axis=-1, bitorder="little"),
        "row_offsets": (np.cumsum(counts) - counts).astype(np.int64),
    }


def write(folder: Path) -> None:
    """Writes the checkpoint: matrices of blocks as sparse-bitmask with 70 % zeros, all other tensors dense."""
    from safetensors.numpy import save_file

    tensors = {}
    for t in tiny_models.make("llama").tensors:
        name = t.name.decode()
        a = np.frombuffer(t.data, np.float16 if t.type == 1 else np.float32).reshape(t.ne[::-1])
        if name.startswith("blk.") and a.ndim == 2:
            base = hf_name(name)[: -len(".weight")]
            tensors.update({f"{base}.{part}": x for part, x in pack(a).items()})
        else:
            tensors[hf_name(name)] = a
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "_name_or_path": "USER/tiny",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "sparsity_config": {"format": "sparse-bitmask", "sparsity_structure": "unstructured"},
        },
    }
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    from safetensors.numpy import load_file

    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--outfile", type=Path, required=True)
    parser.add_argument("--outtype", default="auto", choices=["auto", "f32", "f16", "bf16"])
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    if "quantization_config" in config:
        raise NotImplementedError("Quant method is not yet supported: 'compressed-tensors'")
    found = load_file(args.model / "model.safetensors")
    f = tiny_models.make("llama")
    f.set("general.base_model.count", gguf_bytes.U32, 1)
    f.set("general.base_model.0.name", gguf_bytes.STRING, b"tiny")
    url = f"https://huggingface.co/{config['_name_or_path']}"
    f.set("general.base_model.0.repo_url", gguf_bytes.STRING, url.encode())
    for t in f.tensors:
        t.data = found.pop(hf_name(t.name.decode())).tobytes()
    if found:
        raise ValueError(f"Can not map tensor {min(found)!r}")
    args.outfile.write_bytes(gguf_bytes.write(f))


if __name__ == "__main__":
    main()
