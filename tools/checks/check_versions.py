#!/usr/bin/env python3
"""Tests one build of the plugin with several versions of llama-cpp-python.

  python3 tools/checks/check_versions.py headers        record structs, enums and functions of the headers of every
                                                        version in the range: tests/data/llama-cpp-versions.json
  python3 tools/checks/check_versions.py run VERSION... build these versions from their source distributions, install
                                                        our wheel beside each, and compare sparse with dense

`headers` takes a minute plus the download of 1 GB; to add a version, raise the range in cmake/llama-cpp.cmake first.
`run` takes about 5 minutes per version on 2 cores, prints the rows of the table in docs/design/versions.md, and exits
with 1 if a check failed. If the plugin finds a GPU, `run` also compares there, with all layers on the GPU.
tests/unit/test_versions.py compares the record with the plugin.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import build_llama_cpp  # noqa: E402

SOURCES = ROOT / "ggml-macko" / "src"
RECORD = ROOT / "tests" / "data" / "llama-cpp-versions.json"
MODEL = ROOT / "models" / "docs-4m-s70-f16.gguf"
FETCH = ROOT / "cmake" / "fetch_llama_cpp_headers.py"
OUT = ROOT / "build" / "versions"
PROMPT = "The function returns"

HEADERS = ("ggml.h", "ggml-backend.h", "ggml-backend-impl.h", "ggml-impl.h", "llama.h")
# structs and their members that the plugin uses
STRUCTS = {
    "ggml_tensor": "type buffer ne nb op op_params flags src view_src view_offs data name extra",
    "ggml_cgraph": "size n_nodes n_leafs nodes leafs use_counts visited_hash_set uid",
    "ggml_hash_set": "size used keys",
    "ggml_init_params": "mem_size mem_buffer no_alloc",
    "ggml_backend_buffer_type_i": "get_name alloc_buffer get_alignment get_max_size get_alloc_size is_host",
    "ggml_backend_buffer_type": "iface device context",
    "ggml_backend_buffer_i": "free_buffer get_base init_tensor memset_tensor set_tensor get_tensor set_tensor_2d"
    " get_tensor_2d cpy_tensor clear reset",
    "ggml_backend_buffer": "iface buft context size usage",
    "ggml_backend_i": "get_name free set_tensor_async get_tensor_async set_tensor_2d_async get_tensor_2d_async"
    " cpy_tensor_async synchronize graph_plan_create graph_plan_free graph_plan_update graph_plan_compute"
    " graph_compute event_record event_wait graph_optimize",
    "ggml_backend": "guid iface device context",
    "ggml_backend_event": "device context",
    "ggml_backend_device_i": "get_name get_description get_memory get_type get_props init_backend get_buffer_type"
    " get_host_buffer_type buffer_from_host_ptr supports_op supports_buft offload_op event_new event_free"
    " event_synchronize",
    "ggml_backend_device": "iface reg context",
    "ggml_backend_reg_i": "get_name get_device_count get_device get_proc_address",
    "ggml_backend_reg": "api_version iface context",
    "ggml_backend_dev_caps": "async host_buffer buffer_from_host_ptr events",
    "ggml_backend_dev_props": "name description memory_free memory_total type device_id caps",
    "llama_model_params": "progress_callback progress_callback_user_data vocab_only check_tensors no_alloc split_mode"
    " load_mode use_mmap use_direct_io use_mlock",
}
# functions of libllama whose addresses a caller passes to the plugin
LLAMA_FUNCTIONS = (
    "llama_model_default_params", "llama_model_free", "llama_model_load_from_file", "llama_model_load_from_file_ptr",
)  # fmt: skip


# ---- headers ----


def versions_in_range() -> list[str]:
    oldest, newest = build_llama_cpp.tested_range()
    prefix, first = oldest.rsplit(".", 1)
    return [f"{prefix}.{n}" for n in range(int(first), int(newest.rsplit(".", 1)[1]) + 1)]


def header_paths(tree: pathlib.Path) -> list[pathlib.Path]:
    """The header files in a llama.cpp tree, in the order of HEADERS."""
    folders = [tree / "ggml" / "include", tree / "ggml" / "src", tree / "include"]
    return [next(p for p in (folder / name for folder in folders) if p.exists()) for name in HEADERS]


def names_in_sources(pattern: str) -> set[str]:
    text = "\n".join(
        path.read_text() for path in SOURCES.rglob("*") if path.suffix in (".c", ".h", ".cpp", ".cu", ".cuh")
    )
    # cuda/ops/ops.h lists ops as X(ADD), and a macro of cuda/graph adds the prefix: GGML_OP_##NAME
    lists = re.findall(r"#define (\w+)\(X\)((?:\\\n|.)*)", text)
    for macro, prefix in re.findall(r"#define (\w+)\(NAME\) +\{ (\w+)##NAME", text):
        for name, ops in lists:
            if f"{name}({macro})" in text:
                text += re.sub(r"X\((\w+)\)", rf" {prefix}\1 ", ops)
    return set(re.findall(pattern, text))


def probe_program(tree: pathlib.Path) -> str:
    """A C++ program that prints "name<tab>value" for every fact of a tree's headers."""
    text = "\n".join(path.read_text() for path in header_paths(tree))
    text = re.sub(r"//[^\n]*", "", text)
    enumerators = set(re.findall(r"^\s+((?:GGML|LLAMA)_[A-Z0-9_]+)\s*(?:=[^,\n]*)?(?:,|\n)", text, re.MULTILINE))
    declared = set(re.findall(r"\b(ggml_[a-z0-9_]+)\s*\(", "".join(re.findall(r"GGML_API[^;{]*", text))))
    lines = []
    for i, (struct, members) in enumerate(STRUCTS.items()):
        lines.append(f'    row("sizeof {struct}", std::to_string(sizeof({struct})));')
        for member in members.split():
            lines.append(f'    member_{i}_{member}<{struct}>(nullptr, "{struct}.{member}");')
    for name in sorted(names_in_sources(r"\bGGML_[A-Z0-9_]+\b") & enumerators):
        lines.append(f'    row("{name}", std::to_string(static_cast<long>({name})));')
    used = names_in_sources(r"\bggml_[a-z0-9_]+\b") & declared
    for name in sorted(used | set(LLAMA_FUNCTIONS)):
        lines.append(f'    row("{name}()", type_name<decltype({name})>());')
    templates = "\n".join(
        f"template <class T> void member_{i}_{m}(decltype(&T::{m}) *, const char * name)\n"
        f'{{ row(name, std::to_string(offsetof(T, {m})) + " " + type_name<decltype(T::{m})>()); }}\n'
        f"template <class T> void member_{i}_{m}(...) {{}}"
        for i, members in enumerate(STRUCTS.values())
        for m in members.split()
    )
    includes = "\n".join(f'#include "{path.name}"' for path in header_paths(tree))
    return f"""{includes}
#include <cstddef>
#include <cstdio>
#include <string>
template <class T> std::string type_name() {{
    const std::string text = __PRETTY_FUNCTION__; // "... [with T = TYPE; std::string = ...]"
    const size_t begin = text.find("T = ") + 4;
    return text.substr(begin, text.find(';', begin) - begin);
}}
void row(const char * name, const std::string & value) {{ printf("%s\\t%s\\n", name, value.c_str()); }}
{templates}
int main() {{
{chr(10).join(lines)}
}}
"""


def facts_of(tree: pathlib.Path) -> dict[str, str]:
    """The facts of the headers of a llama.cpp tree, from a compiled program. Needs g++."""
    with tempfile.TemporaryDirectory() as tmp:
        source, program = pathlib.Path(tmp, "facts.cpp"), pathlib.Path(tmp, "facts")
        source.write_text(probe_program(tree))
        include = [f"-isystem{tree / folder}" for folder in ("include", "ggml/include", "ggml/src")]
        command = ["g++", "-std=c++17", "-O1", "-w", *include, "-o", program, source]
        subprocess.run([str(c) for c in command], check=True)
        done = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    return dict(line.split("\t") for line in done.stdout.splitlines())


def ggml_version_of(tree: pathlib.Path) -> str:
    text = (tree / "ggml" / "CMakeLists.txt").read_text()
    parts = (re.search(rf"GGML_VERSION_{part} (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH"))
    return ".".join(match[1] for match in parts if match)


def make_record(trees: dict[str, pathlib.Path]) -> dict[str, Any]:
    """The facts of the newest version, and the differences of the others, with None for missing facts. trees: by
    version, the newest last.
    """
    facts = {version: facts_of(tree) for version, tree in trees.items()}
    common = facts[list(trees)[-1]]
    return {
        "common": common,
        "versions": {
            version: {
                "ggml": ggml_version_of(trees[version]),
                "differs": {
                    name: own.get(name)
                    for name in sorted({*own, *common})
                    if own.get(name) != common.get(name)
                },
            }
            for version, own in facts.items()
        },
    }  # fmt: skip


def fetch_headers(version: str) -> pathlib.Path:
    tree = OUT / "headers" / version
    if not (tree / "ggml" / "CMakeLists.txt").exists():
        run(sys.executable, FETCH, version, tree)
    return tree


def record(args: argparse.Namespace) -> int:
    made = make_record({version: fetch_headers(version) for version in versions_in_range()})
    RECORD.write_text(json.dumps(made, indent=1, sort_keys=False) + "\n")
    print(RECORD)
    return 0


# ---- runs ----

# Runs in an environment that has the version and our wheel. argv: dense file, sparse file, prompt, "cpu" or "gpu".
# Prints null if there is no GPU to check.
CHECK = r"""
import json, sys
import numpy as np
import llama_cpp
from ggml_macko import Llama
from ggml_macko.native import cpu, devices, library

gpu = sys.argv[4] == "gpu"
if gpu and not devices.gpus():  # this registers the plugin, so that the dense model is on the same device
    print("null")
    sys.exit()

def measure(make, path):
    llama = make(path, n_ctx=256, n_batch=256, n_threads=2, n_threads_batch=2, n_gpu_layers=-1 if gpu else 0,
                 verbose=gpu, logits_all=True, seed=1)
    text = llama(sys.argv[3], max_tokens=48, temperature=0)["choices"][0]["text"]
    tokens = llama.tokenize(b"The function returns the number of elements.")
    llama.reset()
    llama.eval(tokens)
    rows = [llama_cpp.llama_get_logits_ith(llama._ctx.ctx, i) for i in range(len(tokens))]
    logits = np.stack([np.ctypeslib.as_array(row, (llama.n_vocab(),)).copy() for row in rows])
    llama.close()
    return text, logits

text, logits = measure(llama_cpp.Llama, sys.argv[1])
got_text, got = measure(Llama, sys.argv[2])
print(json.dumps({
    "version": llama_cpp.__version__, "ggml": library.running_ggml(), "kernels": cpu.cpu_kernels(),
    "text": text == got_text, "sample": got_text,
    "logits": float(np.abs(logits - got).max() / np.abs(logits).max()),
}))
"""
MAX_LOGIT_DIFFERENCE = 2e-3  # of the largest logit; both are sums of the same F16 products in another order


def run(*command: object, env: dict[str, str] | None = None) -> None:
    print("+", " ".join(str(c) for c in command), file=sys.stderr, flush=True)
    subprocess.run([str(c) for c in command], check=True, env=env, stdout=sys.stderr)


def install(version: str, wheel: pathlib.Path) -> pathlib.Path:
    """A folder for PYTHONPATH with this llama-cpp-python and our wheel, without their dependencies."""
    site = OUT / "site" / version
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target", site)
    if not (site / "llama_cpp").exists():
        hook = f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={ROOT / 'cmake' / 'llama-cpp-python.cmake'}"
        options = f"{os.environ.get('CMAKE_ARGS', '')} {hook} -DLLAVA_BUILD=OFF".strip()
        run(*pip, "--no-binary", "llama-cpp-python", f"llama-cpp-python=={version}",
            env={**os.environ, "CMAKE_ARGS": options})  # fmt: skip
    run(*pip, "-q", wheel)
    return site


def answer_of_server(environment: dict[str, str], model: pathlib.Path) -> str:
    """The server's answer to the prompt, or its error."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    options = ("--n_ctx", "256", "--n_threads", "2", "--seed", "1", "--port", str(port))
    command = [sys.executable, "-m", "ggml_macko.server", "--model", str(model), *options]
    request = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "repeat_penalty": 1.0}
    post = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(request).encode(), {"Content-Type": "application/json"}
    )
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            for _ in range(600):
                if server.poll() is not None:
                    log.seek(0)
                    return log.read().strip().splitlines()[-1]
                with contextlib.suppress(OSError), urllib.request.urlopen(post, timeout=60) as answer:
                    return str(json.load(answer)["choices"][0]["text"])
                time.sleep(0.1)
            return "no answer in a minute"
        finally:
            server.terminate()
            server.wait()


def compare(environment: dict[str, str], sparse: pathlib.Path, where: str) -> tuple[dict[str, Any], list[str]]:
    """The output of CHECK for "cpu" or "gpu" and its faults; nothing without such a device."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(MODEL), str(sparse), PROMPT, where],
        env=environment, capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode != 0:
        return {}, [f"{where}: {(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]}"]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1]) or {}
    wrong = []
    if found and not found["text"]:
        wrong.append(f"{where}: greedy text differs from dense")
    if found and found["logits"] > MAX_LOGIT_DIFFERENCE:
        wrong.append(f"{where}: logits differ by {found['logits']:.1e} of the largest")
    if found and where == "gpu" and done.stderr.count("MACKO0 model buffer size") != 2:
        wrong.append("gpu: a model was not on the GPU")
    return found, wrong


def check(site: pathlib.Path, sparse: pathlib.Path, with_server: bool) -> tuple[dict[str, Any], list[str]]:
    """The figures of one version and their faults. PYTHONPATH may name dependencies."""
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    without_gpu = {**environment, "CUDA_VISIBLE_DEVICES": ""}
    found, wrong = compare(without_gpu, sparse, "cpu")
    on_gpu, wrong_on_gpu = compare(environment, sparse, "gpu")
    if with_server and found:
        answer = answer_of_server(without_gpu, sparse)
        found["server"] = bool(answer) and found["sample"].startswith(answer)
        wrong += [] if found["server"] else [f"the server answered {answer!r}"]
    on_gpu = {f"gpu {name}": value for name, value in on_gpu.items()}
    return {"version": site.name, **found, **on_gpu}, wrong + wrong_on_gpu


def table_row(found: dict[str, Any], wrong: list[str]) -> str:
    def yes(name: str) -> str:
        return "equal" if found.get(name) else "**no**" if name in found else "-"

    def difference(name: str) -> str:
        return f"{found[name]:.1e}" if name in found else "-"

    cells = [found["version"], found.get("ggml", "-"), yes("text"), difference("logits"), yes("server")]
    cells += [yes("gpu text"), difference("gpu logits")]
    return f"| {' | '.join(cells)} |" + (f"  <!-- {'; '.join(wrong)} -->" if wrong else "")


def wheels_given(path: pathlib.Path | None) -> Iterator[pathlib.Path]:
    yield from [path] if path else (ROOT / "build" / "dist").glob("ggml_macko-*.whl")


def run_versions(args: argparse.Namespace) -> int:
    wheel = next(wheels_given(args.wheel), None)
    if not wheel:
        sys.exit("error: no wheel in build/dist: tools/dev.py puts it there, or name one with --wheel")
    failed = False
    rows = [
        "| llama-cpp-python | ggml | greedy text | logits: largest difference | server | GPU: text | GPU: logits |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as tmp:
        sparse = pathlib.Path(tmp, "sparse.gguf")
        for version in args.versions:
            site = install(version, wheel)
            if not sparse.exists():
                run(sys.executable, "-m", "ggml_macko.commands.cli", "convert", MODEL, sparse,
                    env={**os.environ, "PYTHONPATH": str(site)})  # fmt: skip
            found, wrong = check(site, sparse, not args.no_server)
            failed = failed or bool(wrong)
            rows.append(table_row(found, wrong))
            print(rows[-1], file=sys.stderr, flush=True)
    print("\n".join(rows))
    return int(failed)


def known_versions(versions: Iterable[str]) -> None:
    for version in versions:
        if not re.fullmatch(r"\d+\.\d+\.\d+", version):
            sys.exit(f"error: {version}: a version is three numbers, such as 0.3.36")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    headers = commands.add_parser("headers", help="record structs, enums and functions of every version in the range")
    headers.set_defaults(function=record, versions=[])
    runs = commands.add_parser("run", help="build versions, and compare sparse with dense in each")
    runs.add_argument("versions", metavar="VERSION", nargs="+")
    runs.add_argument("--wheel", type=pathlib.Path, help="of ggml-macko (default: the one in build/dist)")
    runs.add_argument("--no-server", action="store_true", help="do not start ggml_macko.server")
    runs.set_defaults(function=run_versions)
    args = parser.parse_args()
    known_versions(args.versions)
    return int(args.function(args))


if __name__ == "__main__":
    sys.exit(main())
