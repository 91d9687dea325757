# Headers of the llama.cpp inside the newest llama-cpp-python that pyproject.toml allows (ggml-backend-impl.h is in no
# wheel), and of xxHash, which llama.cpp includes. Sets
#   LLAMA_CPP_PYTHON_OLDEST   the ends of the range in pyproject.toml
#   LLAMA_CPP_PYTHON_VERSION
#   LLAMA_CPP_DIR             tree with include/, ggml/include/, ggml/src/*.h, vendor/hash/xxhash/xxhash.h
#   LLAMA_CPP_OLDEST_GGML     the versions of ggml that the plugin is tested with (docs/design/versions.md)
#   LLAMA_CPP_NEWEST_GGML
string(REGEX MATCH "\"llama-cpp-python>=([0-9.]+),<=([0-9.]+)\"" _ "${GGML_MACKO_PYPROJECT}")
set(LLAMA_CPP_PYTHON_OLDEST ${CMAKE_MATCH_1})
set(LLAMA_CPP_PYTHON_VERSION ${CMAKE_MATCH_2})
set(LLAMA_CPP_OLDEST_GGML 0.10.0)
set(LLAMA_CPP_NEWEST_GGML 0.27.0)

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
