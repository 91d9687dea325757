# Headers of the llama.cpp inside the newest tested llama-cpp-python (ggml-backend-impl.h is in no wheel), and of the
# xxHash in that llama.cpp. Sets
#   LLAMA_CPP_PYTHON_OLDEST   the versions of llama-cpp-python that the plugin is tested with (docs/design/versions.md);
#   LLAMA_CPP_PYTHON_NEWEST   tools/build_llama_cpp.py reads them here
#   LLAMA_CPP_OLDEST_GGML     the same of ggml
#   LLAMA_CPP_NEWEST_GGML
#   LLAMA_CPP_DIR             tree with include/, ggml/include/, ggml/src/*.h, vendor/hash/xxhash/xxhash.h
set(LLAMA_CPP_PYTHON_OLDEST 0.3.21)
set(LLAMA_CPP_PYTHON_NEWEST 0.3.36)
set(LLAMA_CPP_OLDEST_GGML 0.10.0)
set(LLAMA_CPP_NEWEST_GGML 0.27.0)

if(GGML_MACKO_LLAMA_CPP_DIR)
    set(LLAMA_CPP_DIR ${GGML_MACKO_LLAMA_CPP_DIR})
else()
    set(LLAMA_CPP_DIR ${CMAKE_CURRENT_BINARY_DIR}/llama-cpp-python-${LLAMA_CPP_PYTHON_NEWEST})
    if(NOT EXISTS ${LLAMA_CPP_DIR}/vendor/hash/xxhash/xxhash.h)
        message(STATUS "fetching the headers of llama-cpp-python ${LLAMA_CPP_PYTHON_NEWEST}")
        execute_process(
            COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/fetch_llama_cpp_headers.py
                ${LLAMA_CPP_PYTHON_NEWEST} ${LLAMA_CPP_DIR}
            RESULT_VARIABLE failed)
        if(failed)
            message(FATAL_ERROR "cannot fetch the headers of llama-cpp-python ${LLAMA_CPP_PYTHON_NEWEST}; "
                "set GGML_MACKO_LLAMA_CPP_DIR to the llama.cpp source tree inside it")
        endif()
    endif()
endif()
