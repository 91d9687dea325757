"""A variant of a loadable sparse model either fails with an error, or loads and computes finite logits. It never ends
the process.

Each variant loads in a forked child of a warm parent, which itself runs no parallel region (OpenMP threads do not
survive a fork). HOSTILE_LOADS sets the number of variants, HOSTILE_SEED the seed; the file of a failing variant is
kept.
"""

from __future__ import annotations

import copy
import faulthandler
import os
import pathlib
import random
import resource
import signal
import struct
import subprocess
import sys
import time

import pytest

from support import gguf_bytes as gb
from support import llama_faults, tiny_models

N_MUTANTS = int(os.environ.get("HOSTILE_LOADS", 1200))
SEED = int(os.environ.get("HOSTILE_SEED", time.time() // 86400))
TIMEOUT = 60  # seconds for one load; on a busy machine a load takes 50 ms
LOADED, REFUSED, NOT_FINITE = 0, 1, 2

ODD = (0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 65, 96, 127, 255, 256, 257, 512, 513, 1024, 1025, 65535, 65536,
       2**24, 2**24 + 1,
       2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, -1, -2)  # fmt: skip
ODD_FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-6,
    1e-30,
    1e-45,
    1e6,
    1e18,
    1e30,
    3e38,
    float("inf"),
    float("-inf"),
    float("nan"),
)
ODD_TEXTS = (b"", b"none", b"linear", b"yarn", b"longrope", b"llama", b"gpt2", b"bert", b"t5", b"rwkv", b"no_vocab",
             b"plamo2", b"test", b"model",
             b"adapter", b"default", b"llama-bpe", b"gemma4", b"sarvam-moe", b"whitespace", b"phi-3", b"a\0b",
             b"\xff\xfe", b"x" * 5000, b"{{",
             b"<0x0A>", b"<0x", "▁".encode(), b" ", b"\n")  # fmt: skip
# further keys that llama.cpp reads for these architectures; %: the architecture
MORE_KEYS = {
    gb.U32: ("%.vocab_size", "%.embedding_length_out", "%.nextn_predict_layers", "%.expert_count",
             "%.expert_used_count", "%.expert_group_count",
             "%.expert_group_used_count", "%.expert_feed_forward_length", "%.expert_shared_feed_forward_length",
             "%.expert_shared_count",
             "%.expert_gating_func", "%.pooling_type", "%.classifier.pooling_type", "%.attention.key_length_swa",
             "%.attention.value_length_swa",
             "%.attention.sliding_window", "%.attention.sliding_window_pattern", "%.rope.dimension_count_swa",
             "%.rope.scaling.original_context_length", "%.leading_dense_block_count", "%.n_deepstack_layers",
             "%.token_shift_count",
             "%.ssm.conv_kernel", "%.ssm.inner_size", "%.ssm.state_size", "%.wkv.head_size", "%.adapters.count",
             "%.dense_2_feat_out",
             "%.dense_3_feat_in", "%.attention.temperature_length", "%.attention.shared_kv_layers",
             "%.attention.q_lora_rank",
             "general.file_type", "general.quantization_version", "general.alignment", "split.count", "split.no",
             "tokenizer.ggml.token_type_count",
             *(f"tokenizer.ggml.{x}_token_id" for x in ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding",
               "cls", "mask", "fim_pre",
                                                         "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep",
                                                         "prefix", "suffix", "middle"))),
    gb.F32: ("%.rope.scaling.factor", "%.rope.scale_linear", "%.rope.scaling.attn_factor", "%.rope.scaling.alpha",
             "%.rope.freq_base_swa",
             "%.rope.scaling.yarn_log_multiplier", "%.rope.scaling.yarn_beta_fast", "%.rope.scaling.yarn_beta_slow",
             "%.rope.scaling.yarn_ext_factor", "%.rope.scaling.yarn_attn_factor", "%.attention.layer_norm_epsilon",
             "%.attention.scale",
             "%.attention.clamp_kqv", "%.attention.max_alibi_bias", "%.attention.temperature_scale",
             "%.attn_logit_softcapping",
             "%.final_logit_softcapping", "%.logit_scale", "%.residual_scale", "%.embedding_scale",
             "%.expert_weights_scale"),
    gb.BOOL: ("%.attention.causal", "%.rope.scaling.finetuned", "%.expert_weights_norm", "%.use_parallel_residual",
              "tokenizer.ggml.add_bos_token",
              "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_sep_token", "tokenizer.ggml.add_space_prefix",
              "tokenizer.ggml.remove_extra_whitespaces"),
    gb.STRING: ("%.rope.scaling.type", "general.type", "general.name", "tokenizer.ggml.pre", "tokenizer.chat_template"),
    gb.ARRAY: ("%.attention.head_count", "%.attention.head_count_kv", "%.feed_forward_length", "%.expert_used_count",
               "%.attention.sliding_window_pattern", "%.rope.dimension_sections", "%.classifier.output_labels",
               "tokenizer.ggml.suppress_tokens", "tokenizer.ggml.merges", "tokenizer.ggml.precompiled_charsmap",
               "tokenizer.ggml.scores",
               "tokenizer.ggml.token_type"),
}  # fmt: skip


# ---- mutation ----


def odd(rng: random.Random, type_: int, old=None):
    if type_ == gb.STRING:
        return rng.choice(ODD_TEXTS)
    if type_ in (gb.F32, gb.F64):
        return rng.choice(ODD_FLOATS)
    if isinstance(old, int) and rng.random() < 0.5:
        return rng.choice((old + 1, old - 1, old * 2, old // 2, old + 32, old ^ 1 << rng.randrange(32)))
    return rng.choice(ODD)


def odd_array(rng: random.Random, key: gb.Key) -> None:
    values = list(key.value)
    what = rng.randrange(6)
    if what == 0:
        del values[rng.randrange(len(values) + 1) :]
    elif what == 1 and values:
        values += values[: rng.randrange(1, len(values) + 1)]
    elif what == 2 and values:
        values[rng.randrange(len(values))] = values[rng.randrange(len(values))]
    elif what == 3:
        key.element_type = rng.choice([t for t in range(13) if t != gb.ARRAY])
        values = [odd(rng, key.element_type) for _ in values]
    elif what == 4:
        rng.shuffle(values)
    elif values:
        for _ in range(rng.randrange(1, 4)):
            i = rng.randrange(len(values))
            values[i] = odd(rng, key.element_type, values[i])
    key.value = values


def change_key(rng: random.Random, f: gb.GGUF) -> None:
    key = rng.choice(f.keys)
    what = rng.random()
    if what < 0.1:
        f.keys.remove(key)
    elif what < 0.25:
        key.type = rng.choice([t for t in range(13) if t != gb.ARRAY])
        key.value = odd(rng, key.type)
    elif key.type == gb.ARRAY:
        odd_array(rng, key)
    else:
        key.value = odd(rng, key.type, key.value)


def add_key(rng: random.Random, f: gb.GGUF) -> None:
    type_ = rng.choice((gb.U32, gb.U32, gb.U32, gb.F32, gb.F32, gb.BOOL, gb.STRING, gb.ARRAY))
    arch = next((k.name.decode().split(".")[0] for k in f.keys if k.name.endswith(b".block_count")), "llama")
    name = rng.choice(MORE_KEYS[type_]).replace("%", arch)
    if type_ == gb.ARRAY:
        element_type = rng.choice((gb.U32, gb.I32, gb.BOOL, gb.F32, gb.U8, gb.STRING))
        n = rng.choice((0, 1, 2, 3, 6, 300))
        f.set(
            name,
            type_,
            [rng.randrange(2) if element_type == gb.BOOL else odd(rng, element_type) for _ in range(n)],
            element_type,
        )
    else:
        f.set(name, type_, rng.randrange(2) if type_ == gb.BOOL else odd(rng, type_))


def change_tensor(rng: random.Random, f: gb.GGUF) -> None:
    i = rng.randrange(len(f.tensors))
    t = f.tensors[i]
    what = rng.randrange(8)
    if what == 0:
        del f.tensors[i]
    elif what == 1:
        t.name = rng.choice((rng.choice(f.tensors).name, t.name.replace(b"blk.0", b"blk.1"), t.name.replace(b".weight",
                                                                        b".bias"), b"rope_freqs.weight",
                             b"output.scale", t.name.replace(b".weight", b".scale"), b"blk.0.attn_qkv.weight",
                                                             b"blk.0.attn_rot_embd.weight"))  # fmt: skip
    elif what == 2:
        f.tensors[i], f.tensors[-1] = f.tensors[-1], t
    elif what in (3, 4):  # another type, with the right number of bytes
        t.type = rng.choice(list(gb.BLOCKS))
        block, nbytes = gb.BLOCKS[t.type]
        n = 1
        for d in t.ne:
            n *= d
        t.data = (t.data + bytes(16 * len(t.data)))[: n // block * nbytes]
    elif what == 5:
        t.ne = t.ne[::-1]
    elif what == 6:
        t.ne = rng.choice(([*t.ne, 1], t.ne[:1], [t.ne[0] // 2, 2, *t.ne[1:]], [1, *t.ne][:4]))
    else:  # one more optional tensor of llama.cpp
        name = rng.choice((b"rope_freqs.weight", b"blk.0.attn_q.bias", b"blk.0.attn_output.bias", b"output.bias",
                           b"output_norm.bias", b"blk.0.ffn_gate.bias",
                           b"blk.0.attn_q.scale", b"blk.0.ffn_up.input_scale", b"output.scale", b"cls.output.weight",
                           b"blk.0.ffn_gate_exps.scale",
                           b"rope_factors_long.weight", b"dense_2.weight", b"blk.0.attn_qkv.bias"))  # fmt: skip
        n = rng.choice((1, 4, 8, 32, 64, 96, 128))
        f.tensors.append(gb.Tensor(name, [n], rng.choice((0, 0, 0, 1, 26)), struct.pack("<f", 1.0) * n))
        block, nbytes = gb.BLOCKS[f.tensors[-1].type]
        f.tensors[-1].data = f.tensors[-1].data[: n * nbytes]


def change_payload(rng: random.Random, f: gb.GGUF) -> None:
    t = rng.choice([t for t in f.tensors if t.name.endswith((b".values", b".deltas", b".row_ptr"))])
    data = bytearray(t.data)
    for _ in range(rng.randrange(1, 4)):
        i = rng.randrange(len(data))
        if t.name.endswith(b".values"):
            data[i] ^= rng.choice((1, 2, 4, 8)) if i % 2 == 0 else rng.choice((1, 128))
        else:
            data[i] = (data[i] + rng.choice((1, -1, 16, 128))) & 255
    t.data = bytes(data)


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    what = rng.randrange(4)
    if what == 0:
        return bytes(out[: rng.randrange(len(out))])
    if what == 1:
        return bytes(out + bytes(rng.randrange(1, 100)))
    for _ in range(rng.randrange(1, 4)):
        out[rng.randrange(min(len(out), 8000))] ^= 1 << rng.randrange(8)
    return bytes(out)


def mutant(rng: random.Random, base: gb.GGUF) -> bytes:
    f = copy.deepcopy(base)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice((change_key, change_key, add_key, add_key, add_key, change_tensor, change_payload))(rng, f)
    data = gb.write(f)
    return change_bytes(rng, data) if rng.random() < 0.05 else data


# ---- one load in one child ----


def load_and_decode(path: pathlib.Path) -> int:
    import numpy as np

    from ggml_macko import Llama
    from ggml_macko.errors import MackoError

    try:
        llama = Llama(str(path), n_ctx=64, n_batch=32, n_threads=1, n_threads_batch=1, verbose=False, logits_all=True)
        tokens = llama.tokenize(b"ab a\n\xc3\xa9 <s>", add_bos=True, special=True)[:12] or [0]
        llama.eval(tokens)
        llama.eval(tokens[-1:])
        llama.detokenize(tokens)
        return LOADED if np.isfinite(llama.scores[: llama.n_tokens]).all() else NOT_FINITE
    except (MackoError, ValueError, RuntimeError, UnicodeDecodeError, OSError, MemoryError):
        return REFUSED
    except Exception as e:  # exceptions of other packages: Jinja refuses templates with its own classes
        print(f"{type(e).__module__}.{type(e).__name__}: {e}", flush=True)
        return REFUSED


def run_child(path: pathlib.Path, log: pathlib.Path) -> int:
    """The exit code of the child, or minus its signal."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            faulthandler.disable()  # pytest's handler would report each crash of a child
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.alarm(TIMEOUT)
            code = load_and_decode(path)
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> sparse file, converted in another process, because this process must not start threads."""
    folder = tmp_path_factory.mktemp("tiny")
    out = {}
    for name in tiny_models.ARCHITECTURES:
        dense, sparse = folder / f"{name}.gguf", folder / f"{name}-sparse.gguf"
        dense.write_bytes(gb.write(tiny_models.make(name)))
        subprocess.run(
            [sys.executable, "-m", "ggml_macko.commands.cli", "convert", str(dense), str(sparse)],
            check=True,
            capture_output=True,
        )
        out[name] = sparse
    return out


@pytest.fixture(scope="module")
def warm():
    os.environ["GGML_NO_BACKTRACE"] = "1"  # otherwise an abort starts a debugger
    import ggml_macko

    ggml_macko.register()


@pytest.mark.parametrize("name", llama_faults.running(tiny_models.ARCHITECTURES))
def test_valid_tiny_model_loads(name, models, warm, tmp_path):
    data = models[name].read_bytes()
    assert gb.write(gb.read(data)) == data  # only the mutation changes a variant
    code = run_child(models[name], tmp_path / "log")
    assert code == LOADED, (tmp_path / "log").read_text(errors="replace")[-2000:]


def test_harness_notices_a_crash(warm, tmp_path):
    """As a control, llama.cpp aborts on a dense file, which the plugin does not check."""
    f = tiny_models.make("llama")
    f.set("llama.block_count", gb.U32, 0)
    (tmp_path / "dense.gguf").write_bytes(gb.write(f))
    assert run_child(tmp_path / "dense.gguf", tmp_path / "log") == -signal.SIGABRT


@pytest.mark.parametrize("name", llama_faults.running(tiny_models.ARCHITECTURES))
def test_mutant_never_ends_the_process(name, models, warm, tmp_path, record_property):
    rng = random.Random(f"{name} {SEED}")
    base = gb.read(models[name].read_bytes())
    path, log = tmp_path / "mutant.gguf", tmp_path / "log"
    counts = {LOADED: 0, REFUSED: 0, NOT_FINITE: 0}
    failures = []
    for i in range(N_MUTANTS // len(tiny_models.ARCHITECTURES)):
        path.write_bytes(mutant(rng, base))
        code = run_child(path, log)
        counts[code] = counts.get(code, 0) + 1
        if code not in (LOADED, REFUSED):
            keep = tmp_path / f"failed-{i}-code{code}.gguf"
            path.rename(keep)
            lines = log.read_text(errors="replace").strip().splitlines()
            failures.append(f"{keep}: exit {code}: {' | '.join(lines[-3:])}")
    record_property("outcomes", counts)
    print(f"{name}, seed {SEED}: {counts}")
    assert not failures, "\n".join(failures[:20])
    assert counts[LOADED] and counts[REFUSED], counts  # each result must occur
