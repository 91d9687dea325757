# OpenMP::OpenMP_CXX: the compiler's OpenMP, or, where a sanitizer does not know it, threads of our own.
if(GGML_MACKO_FUZZ OR GGML_MACKO_SANITIZE STREQUAL "thread")
    add_library(OpenMP::OpenMP_CXX INTERFACE IMPORTED)
    target_include_directories(OpenMP::OpenMP_CXX INTERFACE ${PROJECT_SOURCE_DIR}/tests/fuzz/no-openmp)
    target_compile_definitions(OpenMP::OpenMP_CXX INTERFACE _OPENMP)
    target_compile_options(OpenMP::OpenMP_CXX INTERFACE -Wno-unknown-pragmas)
    find_package(Threads REQUIRED)
    target_link_libraries(OpenMP::OpenMP_CXX INTERFACE Threads::Threads)
else()
    if(APPLE AND NOT OpenMP_ROOT) # Apple's compiler comes without OpenMP; Homebrew keeps libomp out of the search paths
        find_program(brew brew)
        if(brew)
            execute_process(COMMAND ${brew} --prefix libomp
                OUTPUT_VARIABLE OpenMP_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
        endif()
    endif()
    find_package(OpenMP REQUIRED)
endif()
