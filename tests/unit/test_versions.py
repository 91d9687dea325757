"""One build supports a range of versions: tests/data/llama-cpp-versions.json lists the structs, enums and functions
that the plugin uses in the headers of every version (made by check_versions.py), and the plugin must not depend on
a difference. A ggml whose structs differ from its version is refused before a device of the plugin is used.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import build_llama_cpp
from checks import check_versions
from ggml_macko import errors
from ggml_macko.native import library, llama_hook
from support import generators, upstream

RECORD = json.loads(check_versions.RECORD.read_text())
VERSIONS = RECORD["versions"]
# The differences inside the range, with the reason why each is harmless.
HANDLED = {
    "numbers of ops: resolved by name (abi/op-numbers.cpp)": r"GGML_OP_\w+",
    "llama_model_params: the caller says where its members are (capi/load-api.cpp)": r"(sizeof )?llama_model_params.*",
    "an argument of graph_optimize: used from 0.25.3 on (abi/ggml-abi.cpp)": r"ggml_backend_i\.graph_optimize",
    "a fifth byte of the capabilities: padding before, and written as zero": r"sizeof ggml_backend_dev_caps",
    "the hint of a product: no version without it writes that parameter, which is zero": r"GGML_HINT_SRC0_IS_HADAMARD",
}


def test_record_covers_the_range_that_is_declared():
    oldest, newest = build_llama_cpp.supported_range()
    assert list(VERSIONS) == check_versions.versions_in_range()
    assert library.llama_cpp_python_range() == (oldest, newest)
    assert library.ggml_range() == (VERSIONS[oldest]["ggml"], VERSIONS[newest]["ggml"])


def test_record_is_of_the_headers_that_the_plugin_is_built_with():
    tree = upstream.header_tree()
    assert check_versions.ggml_version_of(tree) == library.ggml_range()[1]
    assert check_versions.facts_of(tree) == RECORD["common"], "run tools/checks/check_versions.py headers"


def test_what_differs_between_versions_is_handled():
    differing = {name for version in VERSIONS.values() for name in version["differs"]}
    unhandled = {name for name in differing if not any(re.fullmatch(p, name) for p in HANDLED.values())}
    assert not unhandled
    for what, pattern in HANDLED.items():
        assert any(re.fullmatch(pattern, name) for name in differing), f"not needed any more: {what}"
    # in older versions the plugin uses only the offset of graph_optimize
    assert {v["differs"].get("ggml_backend_i.graph_optimize", "120 ").split()[0] for v in VERSIONS.values()} == {"120"}


def test_every_op_that_the_devices_compare_with_is_resolved():
    # the last one is part of the name of an environment variable
    used = check_versions.names_in_sources(r"\bGGML_OP_([A-Z0-9_]+)\b") - {"COUNT", "", "OFFLOAD_MIN_BATCH"}
    resolved = re.findall(r"USED\((\w+)\)", (check_versions.SOURCES / "abi" / "op-numbers.cpp").read_text())
    assert used == set(resolved) - {"name"}
    in_any_file = re.compile(r"->op\s*(==|!=)|(switch|find_\w+|is_empty)\s*\([^()]*->op\b")
    for path in (check_versions.SOURCES / "cpu", check_versions.SOURCES / "cuda"):
        for source in path.rglob("*.*"):
            assert not in_any_file.search(source.read_text()), f"{source.name} compares node->op with our numbers"


def test_symbols_of_the_plugin_are_in_every_version():
    done = subprocess.run(
        ["nm", "-D", "--undefined-only", library.LIBRARY_PATH], check=True, capture_output=True, text=True
    )
    needed = {name for name in re.findall(r"U (\w+)", done.stdout) if name.startswith(("ggml", "gguf", "llama"))}
    known = {name[: -len("()")] for name in RECORD["common"] if name.endswith("()")}
    assert len(needed) > 50 and needed <= known


def test_versions_inside_the_range_are_tested(monkeypatch):
    oldest, newest = library.llama_cpp_python_range()
    assert all(llama_hook.is_tested(version) for version in (*VERSIONS, f"{newest}+cpu"))
    assert not any(
        llama_hook.is_tested(version) for version in ("0.3.20", "0.3.37", "0.2.90", "0.4.0", "1.0.0", f"{newest}.1")
    )
    monkeypatch.delenv("GGML_MACKO_ENABLE", raising=False)
    for version in {v["ggml"] for v in VERSIONS.values()}:
        library.check_ggml(version)
    for version in ("0.9.11", "0.25.4", "0.26.0", "1.0.0", "", "new"):
        with pytest.raises(
            errors.VersionMismatchError, match=r"is for ggml 0\.10\.0 to .*GGML_MACKO_ENABLE=any-version"
        ):
            library.check_ggml(version)
    monkeypatch.setenv("GGML_MACKO_ENABLE", "any-version")
    library.check_ggml("0.26.0")


# ---- a libggml-base whose structs differ from its version ----

GENERATE = "import sys; from ggml_macko import Llama; Llama(sys.argv[1], n_ctx=64, verbose=False)('The', max_tokens=1)"

# Each one replaces a function of the running library by that of a library with another struct layout.
DOCTORED = {
    # without set_tensor_2d and get_tensor_2d, as before ggml 0.10: clear is two words earlier
    "ggml_backend_buffer.iface.clear": """
        void ggml_backend_buffer_clear(void ** buffer, unsigned char value) {
            ((void (*)(void **, unsigned char))buffer[7])(buffer, value);
        }""",
    "ggml_backend.device": "void * ggml_backend_get_device(void ** backend) { return backend[18]; }",
    "ggml_backend.iface.event_wait": """
        void ggml_backend_event_wait(void ** backend, void * event) {
            ((void (*)(void **, void *))backend[16])(backend, event);
        }""",
    "sizeof(ggml_tensor)": "unsigned long ggml_tensor_overhead(void) { return 368 + 16; }",
    "ggml_tensor.data": "void * ggml_get_data(void ** tensor) { return tensor[30]; }",
    "ggml_cgraph.n_nodes": "int ggml_graph_n_nodes(int * graph) { return graph[2]; }",
    "sizeof(ggml_backend_dev_props)": """
        void ggml_backend_dev_get_props(void ** device, char * props) {
            __builtin_memset(props, 0, 64);
            ((void (*)(void **, char *))device[4])(device, props);
        }""",
}


def run_with(tmp_path: pathlib.Path, source: str, *args: object, **environment: str) -> subprocess.CompletedProcess:
    """Runs Python with functions of the running ggml replaced by those of a C source."""
    (tmp_path / "doctored.c").write_text(source)
    library = tmp_path / "doctored.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, tmp_path / "doctored.c"], check=True)
    return subprocess.run(
        [sys.executable, "-c", GENERATE, *map(str, args)],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "LD_PRELOAD": str(library), **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> pathlib.Path:
    from ggml_macko.commands import cli

    path = tmp_path_factory.mktemp("versions") / "sparse.gguf"
    assert cli.main(["convert", str(generators.DEMO), str(path), "--quiet"]) == 0
    return path


@pytest.mark.parametrize("member", DOCTORED)
def test_library_with_another_layout_is_refused_with_one_line(member, sparse, tmp_path):
    done = run_with(tmp_path, DOCTORED[member], sparse, GGML_MACKO_ENABLE="any-version")
    assert done.returncode == 1, done
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(rf"VersionMismatchError: .*does not fit ggml [\d.]+: {re.escape(member)} ", last), last


def test_library_without_an_op_that_is_used_is_refused_with_one_line(sparse, tmp_path):
    source = """
        #include <dlfcn.h>
        #include <string.h>
        const char * ggml_op_name(int op) {
            void * base = dlopen("libggml-base.so.0", RTLD_NOW);
            const char * name = ((const char * (*)(int))dlsym(base, "ggml_op_name"))(op);
            return strcmp(name, "FLASH_ATTN_EXT") ? name : "ATTENTION";
        }"""
    done = run_with(tmp_path, source, sparse)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "it has no operation FLASH_ATTN_EXT" in last, last


def test_version_that_nobody_tested_is_refused_unless_asked_for(sparse, tmp_path):
    source = 'const char * ggml_version(void) { return "0.99.0"; }'
    done = run_with(tmp_path, source, sparse)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "but ggml 0.99.0 is running; GGML_MACKO_ENABLE=any-version tries it" in last, last
    done = run_with(tmp_path, source, sparse, GGML_MACKO_ENABLE="any-version")
    assert done.returncode == 0, done.stderr


def test_layout_of_parameters_is_found_without_ctypes():
    """Programs under `macko run` use the layout that follows from the size of the running llama.cpp's struct."""
    import ctypes

    import llama_cpp.llama_cpp as api

    macko = ctypes.CDLL(str(library.LIBRARY_PATH))
    default_params = ctypes.cast(api._lib.llama_model_default_params, ctypes.c_void_p)
    has_load_mode = hasattr(api._lib, "llama_load_mode_name")
    layout = (ctypes.c_int32 * 10)()
    assert macko.ggml_macko_find_params_layout(default_params, has_load_mode, layout) == 0
    names = ["progress_callback", "progress_callback_user_data", "vocab_only", "check_tensors", "no_alloc", "load_mode",
             "use_mmap", "use_direct_io", "use_mlock"]  # fmt: skip
    members = [getattr(api.llama_model_params, name, None) for name in names]
    assert list(layout) == [ctypes.sizeof(api.llama_model_params), *(-1 if m is None else m.offset for m in members)]

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    def larger(address):  # a struct of 88 bytes, returned as on x86-64
        ctypes.memset(address, 1, 88)
        return address

    assert macko.ggml_macko_find_params_layout(larger, 1, layout) == errors.VERSION_MISMATCH


@pytest.mark.parametrize("version", VERSIONS)
def test_layout_of_parameters_is_known_for_every_version(version):
    """The table in capi/load-api.cpp matches the headers."""
    source = (check_versions.SOURCES / "capi" / "load-api.cpp").read_text()
    table = re.search(r"KNOWN_LAYOUTS\[\] = \{(.*?)\n\};", source, re.DOTALL)[1]
    known = [[int(n) for n in row.split(",")] for row in re.findall(r"\{ ([-\d, ]+) \}", table)]
    facts = {**RECORD["common"], **VERSIONS[version]["differs"]}
    members = ["progress_callback", "progress_callback_user_data", "vocab_only", "check_tensors", "no_alloc",
               "load_mode", "use_mmap", "use_direct_io", "use_mlock"]  # fmt: skip
    places = [facts.get(f"llama_model_params.{m}") for m in members]
    row = [int(facts["sizeof llama_model_params"]), *(-1 if p is None else int(p.split()[0]) for p in places)]
    assert row in known
