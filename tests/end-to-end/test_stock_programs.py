"""llama.cpp's own programs through `macko run`. LLAMA_CPP_BIN names the folder that tools/build_llama_cpp.py made.

tools/checks/check_llama_cpp.py makes more comparisons and takes longer.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import subprocess
import sys

import pytest

from support import generators, lora_files
from support import llama_programs as programs

SAMPLE = generators.ROOT / "models" / "sample.txt"


@pytest.fixture(scope="module")
def folder():
    """The folder of llama.cpp's programs."""
    path = pathlib.Path(os.environ.get("LLAMA_CPP_BIN", "/nonesuch"))
    if not (path / "llama-server").exists():
        pytest.skip("LLAMA_CPP_BIN names no folder with llama-server")
    return path


def test_program_writes_the_same_text(folder, sparse):
    want = programs.simple(folder, generators.DEMO)
    assert programs.simple(folder, sparse) == want
    want = programs.completion(folder, generators.DEMO)
    assert programs.completion(folder, sparse) == want
    assert programs.completion(folder, generators.DEMO, compress=True) == want


def test_perplexity_of_the_program_is_the_same(folder, sparse):
    dense, got = (programs.perplexity(folder, m, SAMPLE, "--chunks", 4, "-t", 1) for m in (generators.DEMO, sparse))
    assert got == pytest.approx(dense, rel=2e-4)


def test_bench_program_reports_its_figures(folder, sparse):
    assert set(programs.bench(folder, sparse, "-t", 1, "-p", 16, "-n", 8, "-r", 1)) == {"pp16", "tg8"}


def test_memory_fit_sees_sparse_sizes(folder, sparse):
    """The sizes are 8.01 MiB dense and 6.34 MiB sparse, because token embeddings stay dense."""
    assert programs.host_memory(folder, generators.DEMO) == 8
    assert programs.host_memory(folder, sparse) == 6
    assert programs.host_memory(folder, generators.DEMO, compress=True) == 6


def test_split_parts_run_and_merge(folder, sparse, tmp_path):
    programs.run(folder / "llama-gguf-split", "--split", "--split-max-tensors", 31, sparse, tmp_path / "part")
    (first,) = tmp_path.glob("part-00001-of-*.gguf")
    assert programs.simple(folder, first, 16) == programs.simple(folder, generators.DEMO, 16)
    programs.run(folder / "llama-gguf-split", "--merge", first, tmp_path / "merged.gguf")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ggml_macko.commands.cli",
            "verify",
            str(generators.DEMO),
            str(tmp_path / "merged.gguf"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "identical" in done.stdout, done.stderr


def test_sparse_file_that_llama_quantize_wrote_is_refused(folder, sparse, tmp_path):
    """llama-quantize quantizes the components as if they were weights."""
    programs.run(folder / "llama-quantize", sparse, tmp_path / "q8.gguf", "Q8_0")
    with pytest.raises(RuntimeError, match="is not a component, or is out of place"):
        programs.simple(folder, tmp_path / "q8.gguf", 4)


def test_lora_and_draft_model_give_the_text_of_dense(folder, sparse, tmp_path):
    adapter = lora_files.write(tmp_path / "lora.gguf", generators.DEMO)
    texts = [programs.completion(folder, m, "--lora", adapter) for m in (generators.DEMO, sparse)]
    assert texts[0] == texts[1] != programs.completion(folder, sparse)
    spec = (
        "accept ",
        "-m",
        generators.DEMO,
        "-p",
        programs.PROMPT,
        "-n",
        32,
        "--temp",
        0,
        "-t",
        1,
        "-c",
        256,
        "--spec-type",
        "draft-simple",
        "--spec-draft-n-max",
        4,
    )
    drafted = [
        programs.whole_output(folder / "llama-speculative-simple", *spec, "-md", m) for m in (generators.DEMO, sparse)
    ]
    assert drafted[0] == drafted[1]


def test_prompt_cache_file_is_restored(folder, sparse, tmp_path):
    cache = tmp_path / "session.bin"
    texts = [programs.completion(folder, sparse, "--prompt-cache", cache) for _ in range(2)]
    assert texts[0] == texts[1] and cache.stat().st_size > 1000


def test_server_answers_several_clients(folder, sparse):
    """With one slot, all answers are those of a single client; with four slots, only ties may differ."""
    prompts = [SAMPLE.read_text()[i * 400 : i * 400 + 60 + 30 * i] for i in range(6)]
    with programs.Server(folder, sparse, "-np", 1, "-t", 1, "-c", 512) as server:
        found = programs.soak(server, prompts, clients=4, seconds=2, n=8)
        assert found.answers > 4 and not found.ties and not found.errors
    assert server.process.returncode == 0  # after SIGTERM
    with programs.Server(
        folder, sparse, "-np", 4, "-t", 1, "-c", 2048, "--metrics", "--embeddings", "--pooling", "mean"
    ) as server:
        found = programs.soak(server, prompts, clients=4, seconds=2, n=8)
        assert found.answers > 4 and not found.errors and all(tie < 0.05 for tie in found.ties)
        assert max(found.rss) < 2**28
        assert "llamacpp:tokens_predicted_total" in server.get("/metrics")
        assert len(server.post("/v1/embeddings", input=["hello world", "a pointer"])["data"]) == 2
        chat = server.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "What is a pointer?"}],
            max_tokens=8,
            temperature=0,
        )
        assert chat["usage"]["completion_tokens"] == 8
        answer = server.complete("Is it? ", 8, grammar='root ::= ("yes" | "no") "!"')
        assert answer in ("yes!", "no!")
    assert server.process.returncode == 0


def test_server_with_draft_model_writes_the_same_text(folder, sparse):
    with programs.Server(folder, generators.DEMO, "-np", 1, "-t", 1, "-c", 512) as server:
        want = server.complete(programs.PROMPT, 32)
    with programs.Server(
        folder, sparse, "-md", sparse, "--spec-type", "draft-simple", "-np", 1, "-t", 1, "-c", 512
    ) as server:
        assert server.complete(programs.PROMPT, 32) == want


def test_environment_lines_do_what_run_does(folder, sparse):
    lines = subprocess.run(
        [sys.executable, "-m", "ggml_macko.commands.cli", "env"], check=True, capture_output=True, text=True
    ).stdout
    command = [folder / "llama-simple", "-m", sparse, "-n", 8, programs.PROMPT]
    script = f"{lines}\n{shlex.join(map(str, command))}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == programs.simple(folder, generators.DEMO, 8)


# ---- without the programs ----


def env_lines(*args: object) -> list[str]:
    return subprocess.run(
        [sys.executable, "-m", "ggml_macko.commands.cli", "env", *args], check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_env_prints_lines_that_each_format_reads():
    from ggml_macko.commands import env as env_command
    from ggml_macko.native import library

    preload, plugin = str(library.PRELOAD_PATH), str(library.LIBRARY_PATH)
    assert env_lines("--format", "docker") == [f"LD_PRELOAD={preload}", f"GGML_MACKO_PLUGIN={plugin}"]
    assert env_lines("--format", "systemd", "--compress")[1:] == [
        f'Environment="GGML_MACKO_PLUGIN={plugin}"',
        'Environment="GGML_MACKO_LOAD=compress"',
    ]
    assert env_command.systemd_line("A", '/a%b"c\\d') == 'Environment="A=/a%%b\\"c\\\\d"'
    shown = subprocess.run(
        ["sh", "-c", "LD_PRELOAD=; " + "\n".join(env_lines()) + '\necho "$LD_PRELOAD|$GGML_MACKO_PLUGIN"'],
        capture_output=True,
        text=True,
    ).stdout.strip()
    assert shown == f"{preload}|{plugin}"


def test_preload_path_that_the_linker_would_cut_is_refused(tmp_path):
    """A space or a colon separates paths in LD_PRELOAD."""
    import shutil

    import ggml_macko

    package = tmp_path / "a b" / "ggml_macko"
    shutil.copytree(pathlib.Path(ggml_macko.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "ggml_macko.commands.cli", "run", "true"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
    )
    assert done.returncode == 1 and "LD_PRELOAD cannot name a path with a space or a colon" in done.stderr


def test_weights_are_judged_by_name_and_dimensions():
    """The C library has the only rule for weights that may be sparse; convert and compress on load use it."""
    from ggml_macko.gguf import tensor_rules

    in_block = ["attn_q", "ffn_gate", "ffn_up_shexp", "attn_qkv", "ssm_in", "shortconv.in_proj"]
    sparse = [f"blk.{i}.{part}.weight" for i, part in enumerate(in_block, 8)] + ["output.weight", "token_embd.weight"]
    in_block = [
        "attn_norm",
        "attn_q_norm",
        "ffn_gate_inp",
        "ffn_gate_inp_shexp",
        "attn_rel_b",
        "attn_sinks",
        "ffn_exp_probs_b",
        "ssm_a",
        "shortconv.conv",
        "attn_",
        "attn_q-x",
    ]
    other = [f"blk.0.{part}.weight" for part in in_block]
    other += [
        "position_embd.weight",
        "output_norm.weight",
        "blk.0.attn_q.bias",
        "blk..attn_q.weight",
        "blk.x.attn_q.weight",
        "xblk.0.attn_q.weight",
        "",
    ]
    other += ["blk.0.attn_q.weight.values"]
    assert [n for n in sparse + other if tensor_rules.may_be_sparse(n, 2)] == sparse
    assert tensor_rules.is_block_weight("blk.0.ffn_up_exps.weight", 3) and not tensor_rules.is_block_weight(
        "blk.0.ffn_up.weight", 3
    )
    assert (
        not tensor_rules.is_block_weight("output.weight", 2)
        and not tensor_rules.may_be_sparse("output.weight", 3)
        and not tensor_rules.may_be_sparse("blk.0.attn_q.weight", 1)
    )
