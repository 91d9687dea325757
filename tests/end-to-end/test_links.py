"""Links (FORMAT.md section 11): llama.cpp opens a sparse model with GGML_BACKEND_PATH alone, without `macko run` and
register(). The processes of this page import llama_cpp, but not ggml_macko.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import struct
import subprocess
import sys

import pytest

from ggml_macko import Llama
from ggml_macko.gguf.files import make_key
from ggml_macko.native import library
from support import generators

STOCK = """
import sys
import llama_cpp
llama_cpp.llama_cpp._lib.ggml_backend_load_all()
for path in sys.argv[2:]:
    llama = llama_cpp.Llama(path, n_ctx=64, use_mmap=sys.argv[1] == "mmap", verbose=True)
    print(llama("The function", max_tokens=8, temperature=0)["choices"][0]["text"])
    llama.close()
"""


def stock(*paths: object, how: str = "mmap", code: str = STOCK, **environment: str) -> subprocess.CompletedProcess[str]:
    """Loads models with llama_cpp, which finds the plugin through GGML_BACKEND_PATH."""
    return subprocess.run(
        [sys.executable, "-c", code, how, *map(str, paths)],
        capture_output=True, text=True, timeout=120, errors="replace",
        env={**os.environ, "GGML_BACKEND_PATH": str(library.LIBRARY_PATH), **environment},
    )  # fmt: skip


def assert_refused(path: pathlib.Path, message: str) -> None:
    """llama.cpp refuses the file with this line in its log. Nothing is computed, and nothing crashes."""
    done = stock(path)
    assert done.stdout == "" and done.returncode == 1, done
    assert [line for line in done.stderr.splitlines() if line.startswith("ggml-macko: ")] == [f"ggml-macko: {message}"]
    assert "Failed to load model from file" in done.stderr.splitlines()[-1]


@pytest.fixture
def models(tmp_path, macko) -> pathlib.Path:
    """A folder with the bundled model as sparse.gguf, and its link."""
    assert macko("convert", generators.DEMO, tmp_path / "sparse.gguf", "--quiet").code == 0
    done = macko("link", tmp_path / "sparse.gguf")
    assert done.code == 0 and done.out.startswith(f"{tmp_path}/sparse.link.gguf: ")
    return tmp_path


@pytest.fixture(scope="module")
def text() -> str:
    """What the dense model generates."""
    return Llama(str(generators.DEMO), n_ctx=64, verbose=False)("The function", max_tokens=8, temperature=0)["choices"][
        0
    ]["text"]


@pytest.mark.parametrize("how", ["mmap", "read"])
def test_stock_llama_cpp_generates_the_same_text_through_a_link(models, text, how):
    done = stock(models / "sparse.link.gguf", how=how)
    assert (done.returncode, done.stdout) == (0, text + "\n"), done.stderr
    assert "MACKO_CPU model buffer size" in done.stderr


def test_process_loads_dense_models_and_links_in_turn(models, text):
    link = models / "sparse.link.gguf"
    done = stock(link, generators.DEMO, link)
    assert (done.returncode, done.stdout) == (0, 3 * (text + "\n")), done.stderr


def test_link_loads_after_a_load_of_its_sizes_only(models, text):
    """llama.cpp's programs first load a model without memory (no_alloc), to fit it to the devices."""
    code = f"""
import llama_cpp.llama_cpp as api
api._lib.ggml_backend_load_all()
params = api.llama_model_default_params()
params.no_alloc = True
if hasattr(params, "load_mode"):
    params.load_mode = api.LLAMA_LOAD_MODE_NONE
else:
    params.use_mmap = False
model = api.llama_model_load_from_file({str(models / "sparse.link.gguf")!r}.encode(), params)
api.llama_free(api.llama_init_from_model(model, api.llama_context_default_params()))
api.llama_model_free(model)
"""
    done = stock(models / "sparse.link.gguf", code=code + STOCK)
    assert (done.returncode, done.stdout) == (0, text + "\n"), done.stderr


def test_link_takes_only_the_space_of_its_dense_tensors(models):
    sparse, link = models / "sparse.gguf", models / "sparse.link.gguf"
    found = link.stat()
    if found.st_blocks * 512 >= found.st_size:
        pytest.skip("this file system has no holes")
    assert found.st_blocks * 512 < sparse.stat().st_size < found.st_size


def test_link_loads_like_its_model_under_the_hook(models, text):
    llama = Llama(str(models / "sparse.link.gguf"), n_ctx=64, sparse_only=True, verbose=False)
    assert llama("The function", max_tokens=8, temperature=0)["choices"][0]["text"] == text


def test_tools_name_the_model_of_a_link(models, macko):
    link = models / "sparse.link.gguf"
    for args in (("inspect", link), ("convert", link, models / "new.gguf")):
        done = macko(*args)
        assert done.code == 1 and done.err.endswith(
            f"{link}: is a link to the sparse model sparse.gguf: use that file\n"
        )
    assert not (models / "new.gguf").exists()


def test_both_files_may_be_moved_together(models, text):
    folder = models / "elsewhere"
    folder.mkdir()
    for name in ("sparse.gguf", "sparse.link.gguf"):
        shutil.copy2(models / name, folder)
    assert stock(folder / "sparse.link.gguf").stdout == text + "\n"


# ---- what is refused ----


def test_link_to_a_model_that_has_changed_or_is_gone_is_refused(models):
    sparse, link = models / "sparse.gguf", models / "sparse.link.gguf"
    os.utime(sparse)
    assert_refused(
        link,
        f"{link}: links to sparse.gguf, which has changed since (its size or its time): macko link --force writes the "
        "link again",
    )
    sparse.unlink()
    assert_refused(link, f"{link}: links to sparse.gguf: No such file or directory")
    os.mkfifo(sparse)
    assert_refused(link, f"{link}: links to sparse.gguf: not a regular file")


def test_model_with_a_damaged_matrix_is_refused_through_a_link(models):
    sparse, link = models / "sparse.gguf", models / "sparse.link.gguf"
    time = sparse.stat().st_mtime_ns
    with open(sparse, "r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\xff" * 4096)
    os.utime(sparse, ns=(time, time))
    done = stock(link)
    assert done.returncode == 1 and done.stdout == "" and "Failed to load model from file" in done.stderr
    assert f"ggml-macko: {sparse}: blk." in done.stderr


HOSTILE = {
    "key macko.link.file is not the name of a file in the folder of the link": [
        "", ".", "..", "/etc/passwd", "../sparse.gguf", "x/../sparse.gguf", "sparse.gguf\0", "x" * 300,
    ],
    "links to sparse.link.gguf, which is a link": ["sparse.link.gguf"],
}  # fmt: skip


@pytest.mark.parametrize("problem", HOSTILE)
def test_link_names_only_a_model_beside_it(models, problem):
    link = models / "sparse.link.gguf"
    header = link.read_bytes()
    at = header.index(b"sparse.gguf") - 8
    rest = header[at + 8 + len("sparse.gguf") :]
    for name in HOSTILE[problem]:
        bad = models / "bad.gguf"
        value = name.encode()
        data = header[:at] + struct.pack("<Q", len(value)) + value + rest
        found = link.stat() if "is a link" in problem else None
        if found:  # the size and the time that the link states must fit
            size, time = (make_key(f"macko.link.{k}", "u64", v).record for k, v in
                          (("size", found.st_size), ("mtime", found.st_mtime_ns)))  # fmt: skip
            begin = data.index(b"macko.link.size") - 8
            data = data[:begin] + size + time + data[begin + len(size) + len(time) :]
        bad.write_bytes(data + bytes(64))  # the data section moves by some bytes
        assert_refused(bad, f"{bad}: {problem}")


def test_two_links_at_once_are_refused(models):
    """The plugin cannot tell which of them llama.cpp loads."""
    link, other = models / "sparse.link.gguf", models / "other.link.gguf"
    shutil.copy2(link, other)
    done = stock(link, code=f"other = open({str(other)!r})\n{STOCK}")
    assert (
        done.returncode == 1 and done.stdout == "" and "another link is open: load one after the other" in done.stderr
    )


def test_link_without_the_plugin_generates_nothing(models):
    """Its holes are of a type that llama.cpp cannot multiply with, so it ends instead of using zeros as weights."""
    done = stock(models / "sparse.link.gguf", GGML_BACKEND_PATH="")
    assert done.returncode != 0 and done.stdout == ""


def test_link_is_written_beside_a_sparse_model_only(models, macko, tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    done = macko("link", models / "sparse.gguf", folder / "x.gguf")
    assert done.code == 1 and done.err == (
        f"error: {folder}/x.gguf: a link must be in the folder of its model, sparse.gguf\n"
    )
    done = macko("link", generators.DEMO, models / "x.gguf")
    assert done.code == 1 and done.err == (
        f"error: {generators.DEMO}: is not sparse: llama.cpp opens it without a link\n"
    )
    done = macko("link", models / "sparse.gguf")
    assert done.code == 1 and "exists; use --force to replace it" in done.err
    assert macko("link", models / "sparse.gguf", "--force", "--quiet").code == 0
