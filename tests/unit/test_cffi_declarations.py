"""The declarations of pybind/*.h against the C header that they repeat. In ABI mode a wrong declaration crashes or
corrupts memory silently, so the compiler compares the two here.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sysconfig

import cffi
import pytest

from support import generators

HEADER = generators.ROOT / "ggml-macko" / "include" / "ggml-macko.h"


def declarations() -> str:
    spec = importlib.util.spec_from_file_location("build_ffi", generators.ROOT / "pybind" / "build_ffi.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.declarations()


def checks(text: str) -> str:
    """C text that compiles only if the declarations say what the header says."""
    ffi = cffi.FFI()
    ffi.cdef(text)
    lines = ["#include <stddef.h>", '#include "ggml-macko.h"']
    # a prototype that differs from an earlier one is an error in C
    lines += re.findall(r"^[^/\n ][^\n{}]*\([^;{}]*\);$", text, re.MULTILINE)
    # a struct cannot be declared twice: a renamed copy of ours, compared field by field
    for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL):
        lines.append(f"struct ours_{name} {{\n{body}}};")
        lines.append(f'_Static_assert(sizeof(struct {name}) == sizeof(struct ours_{name}), "size of {name}");')
        for field, _ in ffi.typeof(f"struct {name}").fields:
            places = (f"offsetof(struct {prefix}{name}, {field})" for prefix in ("", "ours_"))
            types = (f"__typeof__(((struct {prefix}{name} *) 0)->{field})" for prefix in ("", "ours_"))
            lines.append(f'_Static_assert({" == ".join(places)}, "place of {name}.{field}");')
            lines.append(f'_Static_assert(__builtin_types_compatible_p({", ".join(types)}), "type of {name}.{field}");')
    for constant, value in re.findall(r"^\s+(GGML_MACKO_\w+)\s*=\s*(\d+),", text, re.MULTILINE):
        lines.append(f'_Static_assert({constant} == {value}, "{constant}");')
    return "\n".join(lines) + "\n"


def compiles(text: str, tmp_path) -> subprocess.CompletedProcess:
    compiler = (
        shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) or shutil.which("cc") or shutil.which("gcc")
    )
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / "check.c"
    source.write_text(checks(text))
    return subprocess.run(
        [compiler, "-fsyntax-only", "-I", str(HEADER.parent), str(source)], capture_output=True, text=True
    )


def test_declarations_match_the_header(tmp_path):
    done = compiles(declarations(), tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_function_and_constant_is_declared():
    header, text = HEADER.read_text(), declarations()
    functions = re.findall(r"^GGML_MACKO_API [^(]*?(ggml_macko_\w+)\(", header, re.MULTILINE)
    constants = re.findall(r"^\s+(GGML_MACKO_\w+)\s*=", header, re.MULTILINE)
    assert len(functions) > 25 and len(constants) > 35
    for name in functions + constants:
        assert re.search(rf"\b{name}\b", text), f"{name} is not declared in pybind/"


@pytest.mark.parametrize(
    "old, new",
    [
        ("int64_t rows, int64_t cols,", "int32_t rows, int64_t cols,"),  # argument
        ("int64_t ggml_macko_file_size", "int32_t ggml_macko_file_size"),  # result
        ("int64_t nnz;", ""),  # field gone
        ("const char * format;", "const int8_t * format;"),  # field type of the same size
        ("GGML_MACKO_STATUS_BAD_NNZ = 54", "GGML_MACKO_STATUS_BAD_NNZ = 55"),
    ],
)
def test_changed_declaration_is_noticed(tmp_path, old, new):
    text = "\n".join(re.sub(" +", " ", line) for line in declarations().splitlines())  # not aligned
    assert old in text
    assert compiles(text.replace(old, new, 1), tmp_path).returncode != 0


def test_python_status_codes_match_the_header():
    from ggml_macko import errors

    codes = {name: int(value) for name, value in re.findall(r"GGML_MACKO_STATUS_(\w+)\s*=\s*(\d+)", HEADER.read_text())}
    mine = {name: value for name, value in vars(errors).items() if name.isupper()}
    assert len(mine) > 10
    for name, value in mine.items():
        assert codes[name] == value


def test_every_status_has_a_class_and_a_name():
    from ggml_macko import errors
    from ggml_macko.native import bindings

    for name, value in re.findall(r"(GGML_MACKO_STATUS_\w+)\s*=\s*(\d+)", HEADER.read_text()):
        assert bindings.status_name(int(value)) == name
        assert issubclass(errors.error_class(int(value)), errors.MackoError)
    assert bindings.status_name(9999) == "unknown"


def test_library_has_the_api_version_of_the_header():
    from ggml_macko.native import library

    assert re.search(r"#define GGML_MACKO_API_VERSION (\d+)", HEADER.read_text())[1] == str(
        library.lib().ggml_macko_api_version()
    )


@pytest.mark.parametrize(
    "struct",
    re.findall(r"^struct (\w+) \{[^\n]*\n +int64_t +struct_size;", HEADER.read_text(), re.MULTILINE),
)
def test_struct_of_another_size_is_refused(struct):
    """Each function that takes the struct compares its size before it reads another member."""
    from ggml_macko import errors
    from ggml_macko.native.library import check, ffi, lib, new_struct

    calls = {
        "ggml_macko_matrix": lambda s: lib().ggml_macko_validate(s, 1),
        "ggml_macko_codec_info": lambda s: lib().ggml_macko_codec_at(0, s),
        "ggml_macko_error": lambda s: lib().ggml_macko_measure_error(
            new_struct("ggml_macko_matrix"), b"", ffi().NULL, 0, 1, s
        ),
        "ggml_macko_layout": lambda s: lib().ggml_macko_cpu_layout(new_struct("ggml_macko_matrix"), s),
        "ggml_macko_tensor_info": lambda s: lib().ggml_macko_file_tensor(ffi().NULL, 0, s),
        "ggml_macko_sparse_info": lambda s: lib().ggml_macko_file_sparse(ffi().NULL, 0, s),
        "ggml_macko_llama": lambda s: lib().ggml_macko_load_model(b"", ffi().NULL, 0, s, ffi().NULL),
    }
    argument = new_struct(struct)
    argument.struct_size -= 1
    with pytest.raises(errors.MackoError, match="struct_size"):
        check(calls[struct](argument))
