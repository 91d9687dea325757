# The plugin with failing CUDA calls, for tests/stress/inject_cuda_failures.py: the objects of the plugin, whose calls
# of the CUDA runtime go through tests/support/failing-cuda.c.
if(TARGET ggml-macko AND TARGET macko-cuda)
    set(failing_source ${PROJECT_SOURCE_DIR}/tests/support/failing-cuda.c)
    add_library(ggml-macko-failing MODULE EXCLUDE_FROM_ALL ${failing_source} $<TARGET_OBJECTS:ggml-macko>)
    set_target_properties(ggml-macko-failing PROPERTIES LINKER_LANGUAGE CXX C_STANDARD 11
        OUTPUT_NAME ggml-macko LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/failing/ggml_macko SKIP_BUILD_RPATH ON)
    target_include_directories(ggml-macko-failing SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
    get_target_property(libraries ggml-macko LINK_LIBRARIES)
    target_link_libraries(ggml-macko-failing PRIVATE ${libraries})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${failing_source})
    file(STRINGS ${failing_source} wrapped REGEX "^(WRAP\\(|cudaError_t __wrap_)")
    foreach(line ${wrapped})
        string(REGEX REPLACE "^(WRAP\\(|cudaError_t __wrap_)([A-Za-z0-9_]+).*" "\\2" name "${line}")
        target_link_options(ggml-macko-failing PRIVATE -Wl,--wrap=${name})
    endforeach()
endif()
