# Headers of the llama.cpp inside the newest llama-cpp-python that pyproject.toml allows (ggml-backend-impl.h is in no
# wheel), and of xxHash, which llama.cpp includes. Sets
#   LLAMA_CPP_PYTHON_OLDEST   the ends of the range in pyproject.toml
#   LLAMA_CPP_PYTHON_VERSION
#   LLAMA_CPP_DIR             tree with include/, ggml/include/, ggml/src/*.h, vendor/hash/xxhash/xxhash.h
#   LLAMA_CPP_OLDEST_GGML     result of ggml_version() in the oldest of the range
#   LLAMA_CPP_GGML_VERSION    and in that tree
string(REGEX MATCH "\"llama-cpp-python>=([0-9.]+),<=([0-9.]+)\"" _ "${GGML_MACKO_PYPROJECT}")
set(LLAMA_CPP_PYTHON_OLDEST ${CMAKE_MATCH_1})
set(LLAMA_CPP_PYTHON_VERSION ${CMAKE_MATCH_2})
set(LLAMA_CPP_OLDEST_GGML 0.10.0) # tests/unit/test_versions.py compares it with the record of all versions

if(GGML_MACKO_LLAMA_CPP_DIR)
    set(LLAMA_CPP_DIR ${GGML_MACKO_LLAMA_CPP_DIR})
else()
    set(LLAMA_CPP_DIR ${CMAKE_CURRENT_BINARY_DIR}/llama-cpp-python-${LLAMA_CPP_PYTHON_VERSION})
    if(NOT EXISTS ${LLAMA_CPP_DIR}/vendor/hash/xxhash/xxhash.h)
        message(STATUS "fetching the headers of llama-cpp-python ${LLAMA_CPP_PYTHON_VERSION}")
        execute_process(
            COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/fetch_llama_cpp_headers.py
                ${LLAMA_CPP_PYTHON_VERSION} ${LLAMA_CPP_DIR}
            RESULT_VARIABLE failed)
        if(failed)
            message(FATAL_ERROR "cannot fetch the headers of llama-cpp-python ${LLAMA_CPP_PYTHON_VERSION}; "
                "set GGML_MACKO_LLAMA_CPP_DIR to the llama.cpp source tree inside it")
        endif()
    endif()
endif()

file(READ ${LLAMA_CPP_DIR}/ggml/CMakeLists.txt ggml_cmake)
set(LLAMA_CPP_GGML_VERSION "")
foreach(part MAJOR MINOR PATCH)
    string(REGEX MATCH "GGML_VERSION_${part} ([0-9]+)" _ "${ggml_cmake}")
    list(APPEND LLAMA_CPP_GGML_VERSION ${CMAKE_MATCH_1})
endforeach()
list(JOIN LLAMA_CPP_GGML_VERSION "." LLAMA_CPP_GGML_VERSION)
