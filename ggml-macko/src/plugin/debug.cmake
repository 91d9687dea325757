# The plugin for checks: unoptimized, with libstdc++'s assertions, and linked with LTO, so that the linker compares the
# definitions that different translation units have of one name. Its CUDA kernels are those of macko-cuda: nvcc compiles
# nothing again.
if(TARGET ggml-macko AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(debug_sources "")
    foreach(target macko-core ggml-macko macko-cuda)
        if(TARGET ${target})
            get_target_property(sources ${target} SOURCES)
            list(APPEND debug_sources ${sources})
        endif()
    endforeach()
    list(FILTER debug_sources INCLUDE REGEX "\\.cpp$")
    set(debug_options -O0 -g -UNDEBUG -D_GLIBCXX_ASSERTIONS -flto=auto -Werror=odr -Werror=lto-type-mismatch)
    add_library(ggml-macko-debug MODULE EXCLUDE_FROM_ALL ${debug_sources})
    set_target_properties(ggml-macko-debug PROPERTIES
        OUTPUT_NAME ggml-macko LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/debug/ggml_macko SKIP_BUILD_RPATH ON)
    target_include_directories(ggml-macko-debug PRIVATE $<TARGET_PROPERTY:macko-core,INCLUDE_DIRECTORIES>)
    target_include_directories(ggml-macko-debug SYSTEM PRIVATE $<TARGET_PROPERTY:ggml-macko,INCLUDE_DIRECTORIES>)
    target_compile_definitions(ggml-macko-debug PRIVATE
        $<TARGET_PROPERTY:macko-core,COMPILE_DEFINITIONS> $<TARGET_PROPERTY:ggml-macko,COMPILE_DEFINITIONS>)
    target_compile_options(ggml-macko-debug PRIVATE ${debug_options})
    target_link_options(ggml-macko-debug PRIVATE ${debug_options})
    target_link_libraries(ggml-macko-debug PRIVATE OpenMP::OpenMP_CXX ${CMAKE_DL_LIBS} ${macko_ggml_base}
        -Wl,--build-id)
    if(TARGET macko-cuda)
        target_link_libraries(ggml-macko-debug PRIVATE macko-cuda)
    endif()
endif()
