"""One build works with many versions: tests/data/llama-cpp-versions.json lists the structs, enums and functions that
the plugin uses in the headers of every llama-cpp-python in the range (made by check_versions.py), and the plugin must
not depend on a difference. It checks the structs of the running ggml and never decides by its version: a ggml with an
unknown layout is refused before a device of the plugin is used.
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
    "an argument of graph_optimize: used if ggml passes it (passed_optimize_params)": r"ggml_backend_i\.graph_optimize",
    "a fifth byte of the capabilities: padding before, and written as zero": r"sizeof ggml_backend_dev_caps",
    "operations of newer versions: their functions are looked up by name (abi/parameter-check.cpp)": (
        r"GGML_GLU_OP_SWIGLU_CLAMP|ggml_(swiglu_clamp|dsv4_hc_comb|dsv4_hc_pre_gated)\(\)"
    ),
    "the hint of a product: no version without it writes that parameter, which is zero": r"GGML_HINT_SRC0_IS_HADAMARD",
}


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_record_covers_the_range_that_is_declared():
    oldest, newest = build_llama_cpp.tested_range()
    assert list(VERSIONS) == check_versions.versions_in_range()
    assert library.llama_cpp_python_range() == (oldest, newest)
    tested = [numbers(version) for version in library.ggml_range()]
    assert f'"llama-cpp-python>={oldest},' in (generators.ROOT / "pyproject.toml").read_text()
    assert tested[0] == numbers(VERSIONS[oldest]["ggml"]) and tested[1] >= numbers(VERSIONS[newest]["ggml"])


def test_record_is_of_the_headers_that_the_plugin_is_built_with():
    tree = upstream.header_tree()
    assert check_versions.ggml_version_of(tree) == VERSIONS[library.llama_cpp_python_range()[1]]["ggml"]
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
    # OFFLOAD_MIN_BATCH is part of the name of an environment variable, the last two are kinds of POOL_2D
    other = {"COUNT", "", "OFFLOAD_MIN_BATCH", "POOL_AVG", "POOL_MAX"}
    used = check_versions.names_in_sources(r"\bGGML_OP_([A-Z0-9_]+)\b") - other
    resolved = re.findall(r"\b(?:NEW_)?USED\((\w+)\)", (check_versions.SOURCES / "abi" / "op-numbers.cpp").read_text())
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


def test_names_and_parameters_that_the_devices_read_are_checked():
    source = (check_versions.SOURCES / "abi" / "parameter-check.cpp").read_text()
    for kind in ("UNARY", "GLU"):
        used = check_versions.names_in_sources(rf"\bGGML_{kind}_OP_([A-Z0-9_]+)\b") - {""}
        assert used == set(re.findall(rf"\b(?:{kind}\(|GGML_{kind}_OP_)(\w+)", source)) - {"NAME"}


def test_versions_inside_the_range_are_tested():
    oldest, newest = library.llama_cpp_python_range()
    assert all(llama_hook.is_tested(version) for version in (*VERSIONS, f"{newest}+cpu"))
    assert not any(
        llama_hook.is_tested(version) for version in ("0.3.20", "0.3.37", "0.2.90", "0.4.0", "1.0.0", f"{newest}.1")
    )


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
    "ggml_backend_buffer_type.iface.get_alignment": """
        unsigned long ggml_backend_buft_get_alignment(void ** type) {
            return ((unsigned long (*)(void **))type[3])(type);
        }""",
    "the number of a unary operation": 'const char * ggml_unary_op_name(int op) { return "NEW"; }',
    "the parameters of CLAMP": "void * ggml_clamp(void * ctx, void * a, float min, float max) { return a; }",
}
# The buffer types of ggml 0.27 instead of those of the installed version: the struct has two more functions. Buffer
# types of ggml itself keep their layout.
BUFFER_TYPES_OF_0_27 = """
    #include <dlfcn.h>
    #include <string.h>
    typedef void * type[16];
    static int is_installed(type t) {
        const char * name = ((const char * (*)(void **))t[0])(t);
        return strncmp(name, "MACKO", 5) && strcmp(name, "probe");
    }
    #define CALL(result, installed, place, absent, parameters, ...)       \
        void * f = t[is_installed(t) ? installed : place];                \
        return f ? ((result (*) parameters)f)(t, ##__VA_ARGS__) : absent;
    static unsigned long nbytes(void * tensor) {
        void * base = dlopen("libggml-base.so.0", RTLD_NOW);
        return ((unsigned long (*)(void *))dlsym(base, "ggml_nbytes"))(tensor);
    }
    void * ggml_backend_buft_alloc_buffer_n(type t, void ** tensors, int n) {
        CALL(void *, 15, 2, 0, (type, void **, int), tensors, n)
    }
    unsigned long ggml_backend_buft_get_alignment(type t) { CALL(unsigned long, 2, 3, 0, (type)) }
    unsigned long ggml_backend_buft_get_max_size(type t) { CALL(unsigned long, 3, 4, -1UL, (type)) }
    unsigned long ggml_backend_buft_get_alloc_size(type t, void * tensor) {
        CALL(unsigned long, 4, 5, nbytes(tensor), (type, void *), tensor)
    }
    unsigned long ggml_backend_buft_get_alloc_size_n(type t, void ** tensors, int n) {
        CALL(unsigned long, 15, 6, 0, (type, void **, int), tensors, n)
    }
    _Bool ggml_backend_buft_is_host(type t) { CALL(_Bool, 5, 7, 0, (type)) }
    void * ggml_backend_buft_get_device(type t) { return t[is_installed(t) ? 6 : 8]; }
"""


def run_with(
    tmp_path: pathlib.Path,
    source: str,
    *args: object,
    command: tuple = (sys.executable, "-c", GENERATE),
    **environment: str,
) -> subprocess.CompletedProcess:
    """Runs a command, or Python, with functions of the running ggml replaced by those of a C source."""
    (tmp_path / "doctored.c").write_text(source)
    library = tmp_path / "doctored.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, tmp_path / "doctored.c"], check=True)
    return subprocess.run(
        [*map(str, command), *map(str, args)],
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
    done = run_with(tmp_path, DOCTORED[member], sparse)
    assert done.returncode == 1, done
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(rf"VersionMismatchError: .*does not fit ggml [\d.]+: {re.escape(member)} ", last), last


@pytest.mark.parametrize("op", ["FLASH_ATTN_EXT", "LIGHTNING_INDEXER"])
def test_library_without_an_op_is_refused_if_every_version_has_it(op, sparse, tmp_path):
    source = """
        #include <dlfcn.h>
        #include <string.h>
        const char * ggml_op_name(int op) {
            void * base = dlopen("libggml-base.so.0", RTLD_NOW);
            const char * name = ((const char * (*)(int))dlsym(base, "ggml_op_name"))(op);
            return strcmp(name, "LACKING") ? name : "ANOTHER";
        }"""
    done = run_with(tmp_path, source.replace("LACKING", op), sparse)
    if op == "LIGHTNING_INDEXER":
        assert done.returncode == 0, done.stderr
        return
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "it has no operation FLASH_ATTN_EXT" in last, last


def test_buffer_types_of_ggml_0_27_work(sparse, tmp_path):
    print_text = GENERATE.replace("Llama(sys", "print(Llama(sys").replace(
        "1)", "8, temperature=0)['choices'][0]['text'])"
    )
    command = (sys.executable, "-c", print_text)
    done = [run_with(tmp_path, source, sparse, command=command) for source in ("", BUFFER_TYPES_OF_0_27)]
    assert [d.returncode for d in done] == [0, 0], done
    assert done[0].stdout == done[1].stdout and len(done[0].stdout) > 10


UNTESTED = "ggml-macko {} is tested with ggml {} to {}, and ggml {} is running"


@pytest.mark.parametrize("version", ["0.9.11", "0.99.0", "1.0.0", "new"])
def test_version_that_nobody_tested_warns_once_and_is_refused_if_asked_for(version, sparse, tmp_path):
    source = f'const char * ggml_version(void) {{ return "{version}"; }}'
    line = UNTESTED.format(library.version(), *library.ggml_range(), version)
    done = run_with(tmp_path, source, sparse)
    assert done.returncode == 0 and done.stderr.splitlines().count(line) == 1, done.stderr
    done = run_with(tmp_path, source, sparse, GGML_MACKO_ENABLE="strict-versions")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.endswith(f"{line}; GGML_MACKO_ENABLE=strict-versions refuses it"), last


def test_reason_is_the_last_line_of_a_program_and_dense_files_still_load(sparse, tmp_path):
    program = upstream.compile_program(generators.ROOT / "tests" / "support" / "run-llama.c", tmp_path / "run-llama")
    command = (sys.executable, "-m", "ggml_macko.commands.cli", "run", "--", program)
    source = DOCTORED["the number of a unary operation"]
    done = run_with(tmp_path, source, sparse, 1, "The", command=command)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and re.search(
        r"^ggml-macko: .* does not fit .*: the number of a unary operation ", last
    ), done.stderr
    assert done.stderr.count("does not fit") == 1
    done = run_with(tmp_path, source, generators.DEMO, 1, "The", command=command)
    assert done.returncode == 0 and "does not fit" not in done.stderr, done.stderr


def test_layout_of_parameters_is_found_without_ctypes():
    """Programs under `macko run` use the layout that follows from the size of the running llama.cpp's struct."""
    import ctypes

    import llama_cpp.llama_cpp as api

    macko = ctypes.CDLL(str(library.LIBRARY_PATH))
    default_params = ctypes.cast(api._lib.llama_model_default_params, ctypes.c_void_p)
    has_load_mode = hasattr(api._lib, "llama_load_mode_name")
    layout = (ctypes.c_int32 * 11)()
    assert macko.ggml_macko_find_params_layout(default_params, has_load_mode, layout) == 0
    names = ["progress_callback", "progress_callback_user_data", "vocab_only", "check_tensors", "no_alloc",
             "split_mode", "load_mode", "use_mmap", "use_direct_io", "use_mlock"]  # fmt: skip
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
               "split_mode", "load_mode", "use_mmap", "use_direct_io", "use_mlock"]  # fmt: skip
    places = [facts.get(f"llama_model_params.{m}") for m in members]
    row = [int(facts["sizeof llama_model_params"]), *(-1 if p is None else int(p.split()[0]) for p in places)]
    assert row in known
