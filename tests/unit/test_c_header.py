"""The Python package matches the C header, from which cffi's declarations are generated."""

from __future__ import annotations

import re

import pytest

from support import generators

HEADER = generators.ROOT / "ggml-macko" / "include" / "ggml-macko.h"


def test_library_has_every_function_and_constant_of_the_header():
    from ggml_macko.native import library

    header, lib = HEADER.read_text(), library.lib()
    functions = re.findall(r"^GGML_MACKO_API [^(]*?(ggml_macko_\w+)\(", header, re.MULTILINE)
    constants = re.findall(r"^\s+(GGML_MACKO_\w+)\s*= (\d+)", header, re.MULTILINE)
    assert len(functions) > 25 and len(constants) > 35
    assert all(callable(getattr(lib, name)) for name in functions)
    assert [(name, str(getattr(lib, name))) for name, _ in constants] == constants


def test_python_status_codes_match_the_header():
    from ggml_macko import errors

    codes = {name: int(value) for name, value in re.findall(r"GGML_MACKO_STATUS_(\w+)\s*=\s*(\d+)", HEADER.read_text())}
    mine = {name: value for name, value in vars(errors).items() if name.isupper()}
    assert len(mine) > 10
    for name, value in mine.items():
        assert codes[name] == value


def test_every_status_has_a_class_and_a_name():
    from ggml_macko import errors
    from ggml_macko.native import library

    for name, value in re.findall(r"(GGML_MACKO_STATUS_\w+)\s*=\s*(\d+)", HEADER.read_text()):
        assert library.text(library.lib().ggml_macko_status_name(int(value))) == name
        assert issubclass(errors.error_class(int(value)), errors.MackoError)
    assert library.text(library.lib().ggml_macko_status_name(9999)) == "unknown"


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
