"""fork() after the package has used threads, and systems that refuse threads: work continues on the other threads.

Each case runs in a process of its own, because earlier calls have an effect on later ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from support import generators

# The parent runs some steps, the child others. n is large enough for two threads.
SCRIPT = """
import os, signal, sys
import numpy as np
from ggml_macko import Llama, SparseMatrix
from ggml_macko.commands import cli

dense_path, sparse_path, out = sys.argv[3:6]
dense = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float16)
dense[np.random.default_rng(1).random(dense.shape) < 0.7] = 0
x = np.ones(1024, dtype=np.float32)
state = {}

def load():
    state["llama"] = Llama(sparse_path, n_ctx=64, n_threads=2, verbose=False)

def load_dense():
    state["llama"] = Llama(dense_path, n_ctx=64, n_threads=2, verbose=False)

def load_compressed():
    Llama(dense_path, n_ctx=64, n_threads=2, verbose=False, compress=True)

def generate():
    assert state["llama"]("The", max_tokens=3, temperature=0)["choices"][0]["text"]

def multiply():
    for name in ("macko", "packed", "ec-csr", "sparse-q8"):
        s = SparseMatrix.from_dense(dense, format=name, n_threads=2)
        s.to_dense(n_threads=2)
        np.testing.assert_allclose(s @ x, dense.astype(np.float64) @ x, atol=1)

def convert():
    assert cli.main(["convert", "--force", dense_path, out, "auto"]) == 0

for step in sys.argv[1].split():
    globals()[step]()
pid = os.fork()
if pid == 0:
    signal.alarm(40)
    for step in sys.argv[2].split():
        globals()[step]()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "sparse.gguf"
    command = [
        sys.executable,
        "-m",
        "ggml_macko.commands.cli",
        "convert",
        str(generators.DEMO),
        str(path),
        "sparse-q8",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return path


def run(parent: str, child: str, sparse, tmp_path, **env: str) -> subprocess.CompletedProcess:
    arguments = [parent, child, str(generators.DEMO), str(sparse), str(tmp_path / "out.gguf")]
    threads = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(sys.path), **env},
    )


@pytest.mark.parametrize(
    "parent, child",
    [
        ("load_dense", "generate"),  # llama-cpp-python itself supports this
        ("load", "generate load generate multiply"),
        ("load_compressed multiply convert", "load generate multiply convert"),
    ],
)
def test_child_of_a_process_that_used_threads_works(parent, child, sparse, tmp_path):
    done = run(parent, child, sparse, tmp_path)
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr[-2000:]}"


def test_work_goes_on_where_the_system_refuses_threads(sparse, tmp_path):
    """libgomp would end the process: "Thread creation failed"."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "refuse.c", tmp_path / "refuse.so"
    source.write_text(
        "#include <errno.h>\nint pthread_create(void * a, void * b, void * c, void * d)\n{ return EAGAIN; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    done = run("multiply convert load load_compressed", "multiply", sparse, tmp_path, LD_PRELOAD=str(library))
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr[-2000:]}"
