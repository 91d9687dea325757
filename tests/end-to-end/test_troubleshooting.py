"""Compares docs/guide/troubleshooting.md with real output: a test provokes every row of its tables.

The message of a row is the first `code` of its line, with <...> for variable parts. A function with the start of the
message in its decorator returns the output that must contain the message.
"""

from __future__ import annotations

import errno
import os
import pathlib
import platform
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from ggml_macko.gguf.outputs import AtomicOutput
from ggml_macko.native import library
from ggml_macko.values import TYPE_F16, TYPE_F32
from support import generators, gguf_bytes, gpu_models, llama_faults, upstream

PAGE = generators.ROOT / "docs" / "guide" / "troubleshooting.md"
PACKAGE = library.LIBRARY_PATH.parent
MESSAGES = [m[1] for m in re.finditer(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)]
PROVOKE: dict[str, Callable[[Place], str]] = {}  # start of a message -> function


def row(start: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        assert start not in PROVOKE
        PROVOKE[start] = function
        return function

    return register


def with_marks(message: str):
    gpu = message.startswith("<device>:") or "did not place it" in message
    of_llama_cpp = message.startswith("check_tensor_dims:")
    return pytest.param(message, marks=pytest.mark.gpu if gpu else llama_faults.OTHER_WORDS if of_llama_cpp else ())


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """The bundled model as a file of MACKO rows; tests that break it copy it."""
    from ggml_macko.commands import cli

    path = tmp_path_factory.mktemp("sparse") / "sparse.gguf"
    assert cli.main(["convert", str(generators.DEMO), str(path), "macko"]) == 0
    return path


class Place:
    """Files, and methods that run the tools, for the functions that provoke messages."""

    def __init__(self, tmp_path, sparse, tiny, macko, monkeypatch):
        self.tmp_path, self.sparse, self.tiny, self.monkeypatch = tmp_path, sparse, tiny, monkeypatch
        self._macko = macko

    def macko(self, *args: object) -> str:
        done = self._macko(*args)
        return done.out + done.err

    def run(self, *command: object, **environment: str) -> str:
        environment = {**os.environ, **environment}
        command = [str(c) for c in command]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        return done.stdout

    def python(self, code: str, **environment: str) -> str:
        return self.run(sys.executable, "-c", code, **environment)

    def macko_process(self, *args: object, **environment: str) -> str:
        return self.run(sys.executable, "-m", "ggml_macko.commands.cli", *args, **environment)

    def program(self) -> pathlib.Path:
        return upstream.compile_program(
            generators.ROOT / "tests" / "support" / "run-llama.c", self.tmp_path / "run-llama"
        )

    def changed(self, change) -> pathlib.Path:
        """A copy of the sparse file after the edits of `change`."""
        data = gguf_bytes.read(self.sparse.read_bytes())
        change(data)
        path = self.tmp_path / "changed.gguf"
        path.write_bytes(gguf_bytes.write(data))
        return path

    def convert(self, tensors: dict, *args: object) -> str:
        source = generators.write_gguf(self.tmp_path / "in.gguf", tensors)
        return self.macko("convert", source, self.tmp_path / "out.gguf", *args)


@pytest.fixture
def place(tmp_path, sparse, tiny, macko, monkeypatch):
    return Place(tmp_path, sparse, tiny, macko, monkeypatch)


def test_every_row_has_one_test_and_every_test_a_row():
    assert len(MESSAGES) > 30 and len(set(MESSAGES)) == len(MESSAGES)
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    rows = [line for line in lines if not line.startswith(("| message", "|---"))]
    assert len(rows) == len(MESSAGES)
    for line in lines:
        assert len(re.findall(r"(?<!\\)\|", line)) == 4, line
    for start in PROVOKE:
        assert [m for m in MESSAGES if m.startswith(start)], f"no row begins with {start}"


@pytest.mark.parametrize("message", [with_marks(m) for m in MESSAGES])
def test_message_is_what_the_page_says(place, message):
    functions = [f for start, f in PROVOKE.items() if message.startswith(start)]
    assert len(functions) == 1, f"{len(functions)} tests for this row"
    output = functions[0](place)
    pattern = re.sub(r"<[^<>=]+>", ".+", re.escape(message))
    assert re.search(pattern, output), output[-3000:]
    assert "Traceback" not in output or "Error: " in output.strip().splitlines()[-1]  # uncaught in Python code


# ---- installation ----


def run_with_other_ggml(p, function: str):
    """Runs a program with one function of ggml replaced by a function in C."""
    source, other = p.tmp_path / "other.c", p.tmp_path / "other.so"
    source.write_text(function)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", other, source], check=True)
    return p.macko_process("run", "--", p.program(), p.sparse, 1, "The", LD_PRELOAD=str(other))


def aborts_with(text: str) -> str:
    """C source of a library whose llama_backend_init() ends the program like an assertion of ggml."""
    return f"""
        void ggml_abort(const char *, int, const char *, ...);
        void llama_backend_init(void) {{ ggml_abort("other.c", 7, "%s", "{text}"); }}"""


OTHER_VERSION = "import llama_cpp; llama_cpp.__version__ = '0.3.1'; import ggml_macko; ggml_macko.register()"


@row("ggml-macko is tested with llama-cpp-python <version> to <version>, but")
def _(p):
    return p.python(OTHER_VERSION, GGML_MACKO_ENABLE="strict-versions")


@row("ggml-macko is tested with llama-cpp-python <version> to <version>, and")
def _(p):
    return p.python(OTHER_VERSION)


@row("ggml-macko cannot use this llama_cpp")
def _(p):
    return p.python(
        "from llama_cpp import llama_cpp as api; del api.llama_model_free; import ggml_macko; ggml_macko.register()"
    )


@row("ggml-macko <version> is tested with ggml")
def _(p):
    return run_with_other_ggml(p, 'const char * ggml_version(void) { return "0.99.0"; }')


@row("ggml-macko <version> does not fit ggml")
def _(p):
    return run_with_other_ggml(p, "unsigned long ggml_tensor_overhead(void) { return 400; }")


def package_without(p, name: str) -> str:
    shutil.copytree(PACKAGE, p.tmp_path / "copy" / "ggml_macko")
    (p.tmp_path / "copy" / "ggml_macko" / name).unlink()
    return str(p.tmp_path / "copy")


@row("<folder> has no <file>: it was not built")
def _(p):
    return p.macko_process("inspect", p.sparse, PYTHONPATH=package_without(p, "_ffi.py"))


@row("cannot load <file>")
def _(p):
    folder = package_without(p, "libggml-macko.so")
    (pathlib.Path(folder) / "ggml_macko" / "libggml-macko.so").write_bytes(b"not a library")
    return p.macko_process("inspect", p.sparse, PYTHONPATH=folder)


@row("the server needs the package")
def _(p):
    return p.python("import sys; sys.modules['uvicorn'] = None; from ggml_macko import server; sys.exit(server.main())")


@row("a plot needs matplotlib")
def _(p):
    p.monkeypatch.setitem(sys.modules, "matplotlib", None)
    return p.macko("inspect", p.tiny, "--plot", p.tmp_path / "plot.png")


@row("-hf needs huggingface-hub")
def _(p):
    p.monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    return p.macko("generate", "-hf", "USER/NAME", "-p", "x")


@row("<variable>=<value>: unknown word")
def _(p):
    return p.macko_process("generate", "-m", p.sparse, "-p", "The", GGML_MACKO_CPU_KERNELS="avx1024")


@row("<variable>: unknown environment variable")
def _(p):
    return p.macko_process("generate", "-m", p.sparse, "-p", "The", GGML_MACKO_KERNELS="avx2")


@row("GGML_MACKO_CPU_KERNELS=<name>: <reason>")
def _(p):
    other = "avx2" if platform.machine() == "aarch64" else "neon"
    return p.macko_process("generate", "-m", p.sparse, "-p", "The", GGML_MACKO_CPU_KERNELS=other)


@row("CPU kernels: portable")
def _(p):
    return p.macko_process("--version", GGML_MACKO_CPU_KERNELS="portable")


# ---- opening a model ----


@row("check_tensor_dims: tensor")
def _(p):
    return p.run(p.program(), p.sparse, 1, "The")


@row("Failed to load model from file")
def _(p):
    return p.python(f"import llama_cpp; llama_cpp.Llama({str(p.sparse)!r}, verbose=False)")


@row("ggml-macko: GGML_MACKO_PLUGIN is not set")
def _(p):
    return p.run(p.program(), p.sparse, 1, "The", LD_PRELOAD=str(library.PRELOAD_PATH))


@row("ggml-macko: an RPC server was stopped")
def _(p):
    return run_with_other_ggml(p, aborts_with("Remote RPC server crashed or returned malformed response"))


def test_other_aborts_are_llama_cpps_own(place):
    output = run_with_other_ggml(place, aborts_with("fatal error 100%"))
    assert "other.c:7: fatal error 100%" in output and "ggml-macko: an RPC server" not in output


@row("<file>: LD_PRELOAD cannot name")
def _(p):
    folder = p.tmp_path / "my packages" / "ggml_macko"
    shutil.copytree(PACKAGE, folder)
    return p.macko_process("run", "--", "true", PYTHONPATH=str(folder.parent))


@row("ggml-macko: this program has no shared libggml")
def _(p):
    library, source = p.tmp_path / "libllama.so", p.tmp_path / "main.c"
    source.write_text(
        "void * llama_model_load_from_file(const char * path, int params) { return 0; }\n"
        "void * llama_model_load_from_file_ptr(void * stream, int params) { return 0; }\n"
        "void llama_model_free(void * model) {}\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    source.write_text(
        '#include "llama.h"\n'
        'int main(void) { return !llama_model_load_from_file("x", (struct llama_model_params) {0}); }\n'
    )
    return p.macko_process("run", "--", upstream.compile_program(source, p.tmp_path / "main", library))


def inspect_file_with(p, content: bytes):
    (p.tmp_path / "file.gguf").write_bytes(content)
    return p.macko("inspect", p.tmp_path / "file.gguf")


@row("<file>: not a GGUF file")
def _(p):
    return inspect_file_with(p, b"hello")


@row("<file>: a Git LFS pointer, not a GGUF")
def _(p):
    return inspect_file_with(p, b"version https://git-lfs.github.com/spec/v1\n")


@row("<file>: a web page, not a GGUF")
def _(p):
    return inspect_file_with(p, b"<!DOCTYPE html><html>")


@row("<file>: a safetensors file, not a GGUF")
def _(p):
    return inspect_file_with(p, struct.pack("<Q", 2) + b"{}" + bytes(8))


@row("<file>: the file ends at")
def _(p):
    torn = p.tmp_path / "torn.gguf"
    torn.write_bytes(p.sparse.read_bytes()[:-1000])
    return p.macko("generate", "-m", torn, "-p", "The")


def with_version(p, version: bytes) -> pathlib.Path:
    path = p.tmp_path / "version.gguf"
    data = p.tiny.read_bytes()
    path.write_bytes(data[:4] + version + data[8:])
    return path


@row("<file>: GGUF version")
def _(p):
    return p.macko("convert", with_version(p, b"\1\0\0\0"), p.tmp_path / "out.gguf")


@row("<file>: big-endian GGUF")
def _(p):
    return p.macko("convert", with_version(p, b"\0\0\0\3"), p.tmp_path / "out.gguf")


@row("<file>: written in format version")
def _(p):
    def newer(data):
        data.set("macko.version", gguf_bytes.U32, 99)

    return p.macko("generate", "-m", p.changed(newer), "-p", "The")


@row("<file>: <tensor>: row")
def _(p):
    def damage(data):
        t = data.tensor("blk.1.ffn_up.weight.deltas")
        t.data = t.data[:1000] + bytes(255 - b for b in t.data[1000:1100]) + t.data[1100:]

    return p.macko_process("generate", "-m", p.changed(damage), "-p", "The")


@row("<file>: there are no rules")
def _(p):
    path = p.changed(lambda f: f.set("general.architecture", gguf_bytes.STRING, b"mamba"))
    return p.macko("generate", "--strict", "-m", path, "-p", "The")


LITTLE_MEMORY = """
import re, resource, llama_cpp
from ggml_macko import Llama, register
register()
llama_cpp.llama_backend_init()
kib = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1])
resource.setrlimit(resource.RLIMIT_AS, ((kib << 10) + ({mib} << 20), resource.RLIM_INFINITY))
Llama({path!r}, n_ctx={n_ctx}, verbose=False)
"""


@row("<file>: llama.cpp could not load the model")
def _(p):
    return p.python(f"""
import llama_cpp.llama_cpp as api
from ggml_macko import register
register()
params = api.llama_model_default_params()
params.progress_callback = stop = api.llama_progress_callback(lambda progress, user: False)
api.llama_model_load_from_file({str(p.sparse)!r}.encode(), params)""")


@row("<file>: cannot allocate <n> MiB for sparse weights")
def _(p):
    # The weights take several times the free memory; threads, vocabulary and stream, which come first, take far less.
    dense, sparse = p.tmp_path / "large.gguf", p.tmp_path / "large-sparse.gguf"
    shape = ("--layers", 2, "--embd", 1024, "--ff", 8192, "--heads", 8, "--vocab", 512, "--tied", "--density", 0.5)
    p.run(sys.executable, generators.ROOT / "tools" / "make_random_llama.py", *shape, dense)
    p.macko("convert", dense, sparse)
    return p.python(LITTLE_MEMORY.format(path=str(sparse), mib=24, n_ctx=64))


OTHER_DEVICE = """
import sys
sys.path.insert(0, {tests!r})
from support import other_device
from ggml_macko import Llama
with other_device.place("attn_q"):
    Llama({path!r}, sparse_only=True, verbose=False)
"""


@row("<file>: <tensor>: sparse, but llama.cpp did not place it")
def _(p):
    return p.python(OTHER_DEVICE.format(tests=str(generators.ROOT / "tests"), path=str(p.sparse)))


def split(p) -> list:
    return gguf_bytes.split(p.sparse, p.tmp_path, [47, 47])


@row("<file>: one of <n> files of a split model")
def _(p):
    return p.macko("inspect", split(p)[0])


@row("<file>: <file>: No such file or directory")
def _(p):
    first, second = split(p)
    second.unlink()
    return p.macko("generate", "-m", first, "-p", "The")


@row("<file>: <tensor> is not a component")
def _(p):
    return p.macko("inspect", p.changed(lambda data: data.tensors.sort(key=lambda t: t.name)))


@row("Failed to create llama_context")
def _(p):
    return p.python(LITTLE_MEMORY.format(path=str(p.sparse), mib=200, n_ctx=1 << 18))


@row("the prompt has <n> tokens")
def _(p):
    return p.macko("generate", "-m", p.sparse, "-p", "word " * 300, "-c", 64)


def test_mapping_and_locking_do_nothing_for_sparse_models(place):
    out = place.python(f"""
from ggml_macko import Llama
llama = Llama({str(place.sparse)!r}, use_mmap=True, use_mlock=True, verbose=False)
print("mapped", {place.sparse.name!r} in open("/proc/self/maps").read())
print(next(line for line in open("/proc/self/status") if line.startswith("VmLck")))""")
    assert "mapped False" in out and re.search(r"VmLck:\s+0 kB", out), out


@row("<file>: not a regular file")
def _(p):
    return p.macko("generate", "-m", "/dev/zero", "-p", "The")


@row("<file>: key tokenizer.ggml.<key>: string")
def _(p):
    f = gguf_bytes.read(p.sparse.read_bytes())
    f.key("tokenizer.ggml.tokens").value[300] = b"x" * 5000
    (p.tmp_path / "long.gguf").write_bytes(gguf_bytes.write(f))
    return p.macko("generate", "-m", p.tmp_path / "long.gguf", "-p", "The")


def failure(p, use, **options) -> str:
    """The message of the error that `use` causes with a model."""
    from ggml_macko import Llama

    with pytest.raises((ValueError, RuntimeError)) as e:
        use(Llama(str(p.sparse), n_ctx=64, verbose=False, **options))
    return str(e.value)


def with_grammar(text: str):
    import llama_cpp

    return lambda llama: llama("The", max_tokens=1, grammar=llama_cpp.LlamaGrammar.from_string(text))


@row("grammar: llama.cpp refused it")
def _(p):
    return failure(p, with_grammar('root ::= list\nlist ::= list "," "a" | "a"'))


@row("grammar: llama.cpp failed")
def _(p):
    return failure(p, with_grammar('root ::= "a"{3,1}'))


@row("grammar: no token")
def _(p):
    return failure(p, with_grammar("root ::= [z-a]"))


@row("<file>: llama.cpp refused this LoRA adapter")
def _(p):
    return failure(p, lambda _: None, lora_path="nosuch.gguf")


@row("another call has replaced the text")
def _(p):
    return failure(p, lambda llama: list(zip(llama.generate([1]), llama.generate([2]))))


@row("this Llama has been closed")
def _(p):
    return failure(p, lambda llama: (llama.close(), llama("The")))


@row("no weight would shrink")
def _(p):
    data = gguf_bytes.read(generators.DEMO.read_bytes())
    for t in data.tensors:
        if t.type == TYPE_F16:
            t.data = b"\x01\x2c" * (len(t.data) // 2)
    path = p.tmp_path / "full.gguf"
    path.write_bytes(gguf_bytes.write(data))
    return p.python(f"from ggml_macko import Llama; Llama({str(path)!r}, compress=True, verbose=True)")


# ---- GPU ----


@row("GPU: none (built without CUDA)")
def _(p):
    if "built for CUDA" in library.gpus():
        pytest.skip("this build has CUDA")
    return p.macko("--version")


@row("GPU: none (<reason>), built for CUDA")
def _(p):
    if "built for CUDA" not in library.gpus():
        pytest.skip("this build has no CUDA")
    return p.macko_process("--version", CUDA_VISIBLE_DEVICES="")


def skip_without_gpu() -> None:
    if library.gpus().startswith("none"):
        pytest.skip(f"GPU: {library.gpus()}")


@row("<device>: out of memory")
def _(p):
    skip_without_gpu()
    return p.python(gpu_models.OUT_OF_MEMORY.format(tests=str(generators.ROOT / "tests"), path=str(p.sparse)))


@row("<device>: the CUDA context belongs to the parent process")
def _(p):
    skip_without_gpu()
    return p.python(f"""
import os
from ggml_macko import Llama
llama = Llama({str(p.sparse)!r}, n_gpu_layers=-1, verbose=True)
llama("The", max_tokens=1)
child = os.fork()
if child == 0:
    try:
        llama("A", max_tokens=1)
    finally:
        os._exit(0)
os.waitpid(child, 0)""")


# ---- converting and pruning ----


@row("<folder>: a Hugging Face checkpoint needs")
def _(p):
    (p.tmp_path / "config.json").write_text("{}")
    p.monkeypatch.setenv("PATH", str(p.tmp_path))
    p.monkeypatch.delenv("GGML_MACKO_CONVERT_HF", raising=False)
    return p.macko("convert", p.tmp_path, p.tmp_path / "out.gguf")


@row("<file>: has auto_map")
def _(p):
    (p.tmp_path / "config.json").write_text('{"auto_map": {}}')
    p.monkeypatch.setenv("GGML_MACKO_CONVERT_HF", __file__)
    return p.macko("convert", p.tmp_path, p.tmp_path / "out.gguf")


def matrix(density: float, kind: int = TYPE_F16) -> tuple:
    return generators.random_bits(np.random.default_rng(1), 32, 64, density, kind), kind


@row("no tensor would shrink")
def _(p):
    return p.convert({"blk.0.attn_q.weight": matrix(1.0)})


@row("stays dense: would not shrink")
def _(p):
    return p.convert({"blk.0.attn_q.weight": matrix(1.0), "blk.0.attn_k.weight": matrix(0.3)})


@row("<n> negative zeros (<n>% of the sparse tensors' weights) count as zeros")
def _(p):
    bits = np.where(np.random.default_rng(0).random((32, 64)) < 0.3, np.uint16(0x3C00), np.uint16(0x8000))
    return p.convert({"blk.0.attn_q.weight": (bits, TYPE_F16)})


@row("stays dense: <type> values")
def _(p):
    return p.convert({"blk.0.attn_q.weight": (np.zeros((8, 68), np.uint8), 8), "blk.0.attn_k.weight": matrix(0.3)})


@row("stays dense: <n> values are not finite")
def _(p):
    bits, kind = matrix(0.3)
    bits[1, 2] = 0x7C00
    return p.convert({"blk.0.attn_q.weight": (bits, kind)})


@row("stays dense: <type> cannot represent it")
def _(p):
    tiny = generators.from_float32(1e-30 * np.random.default_rng(1).standard_normal((32, 64), np.float32), TYPE_F32)
    return p.convert({"blk.0.attn_q.weight": (tiny, TYPE_F32), "blk.0.attn_k.weight": matrix(0.3)}, "sparse-q8")


@row("stays dense: its name is longer")
def _(p):
    return p.convert({f"blk.0.attn_{'x' * 42}.weight": matrix(0.3)})


@row("<file>: is not the first shard")
def _(p):
    tensors = list(generators.tiny_tensors().items())
    paths = generators.write_split(p.tmp_path, [dict(tensors[:4]), dict(tensors[4:])])
    return p.macko("convert", paths[1], p.tmp_path / "out.gguf")


@row("<file>: exists; use --force")
def _(p):
    (p.tmp_path / "out.gguf").write_bytes(b"precious")
    return p.macko("convert", p.tiny, p.tmp_path / "out.gguf")


@row("<file>: input and output files are the same")
def _(p):
    return p.macko("convert", p.tiny, p.tiny, "--force")


@row("<file>: in use by pid")
def _(p):
    with AtomicOutput(p.tmp_path / "out.gguf", []) as output:
        output.write(output.magic)
        return p.macko("convert", p.tiny, p.tmp_path / "out.gguf")


@row("<file>: No space left on device")
def _(p):
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with p.monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        return p.macko("convert", p.tiny, p.tmp_path / "out.gguf")


def prune_with_imatrix_of(p, tensor: str) -> str:
    data = gguf_bytes.GGUF()
    data.set("general.type", gguf_bytes.STRING, b"imatrix")
    data.set("imatrix.datasets", gguf_bytes.ARRAY, [b"text"], gguf_bytes.STRING)
    data.set("imatrix.chunk_count", gguf_bytes.U32, 1)
    data.set("imatrix.chunk_size", gguf_bytes.U32, 512)
    for name, n in (("in_sum2", 64), ("counts", 1)):
        ones = np.ones(n, np.float32).tobytes()
        data.tensors.append(gguf_bytes.Tensor(f"{tensor}.{name}".encode(), [n, 1], 0, ones))
    imatrix = p.tmp_path / "imatrix.gguf"
    imatrix.write_bytes(gguf_bytes.write(data))
    return p.macko("prune", p.tiny, p.tmp_path / "o.gguf", "--sparsity", 0.5, "--method", "wanda", "--imatrix", imatrix)


@row("<file>: did not find weights for")
def _(p):
    return prune_with_imatrix_of(p, "blk.0.attn_q.weight")


@row("<file>: <tensor>: <file> has no such tensor")
def _(p):
    return prune_with_imatrix_of(p, "blk.9.attn_q.weight")
