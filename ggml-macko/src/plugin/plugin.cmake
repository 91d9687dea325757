# The plugin: core + ggml's vtables; built against llama.cpp's headers, linked to nothing of it but a soname.
# An empty library with ggml's soname: it gives the plugin the dependency, which the process's own libggml-base
# satisfies.
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/empty.c "")
add_library(ggml-base-soname SHARED ${CMAKE_CURRENT_BINARY_DIR}/empty.c)
set_target_properties(ggml-base-soname PROPERTIES
    OUTPUT_NAME ggml-base SOVERSION 0 LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/soname)
set(macko_ggml_base -Wl,--no-as-needed ggml-base-soname -Wl,--as-needed)

add_library(ggml-macko MODULE
    abi/ggml-abi.cpp
    abi/op-numbers.cpp
    abi/parameter-check.cpp
    abi/struct-check.cpp
    backend/host-weights.cpp
    backend/load-session.cpp
    backend/offload.cpp
    backend/planned-buffer.cpp
    backend/registered-devices.cpp
    rpc/buffer.cpp
    rpc/client.cpp
    rpc/cpu.cpp
    rpc/graph.cpp
    rpc/message.cpp
    cpu/device/device.cpp
    cpu/device/graph-plan.cpp
    cpu/device/rpc-device.cpp
    cpu/device/rpc-memory.cpp
    cpu/device/weight.cpp
    capi/load-api.cpp
    load/weight-cache.cpp
    plugin/registry.cpp)
target_include_directories(ggml-macko SYSTEM PRIVATE
    ${LLAMA_CPP_DIR}/include ${LLAMA_CPP_DIR}/ggml/include ${LLAMA_CPP_DIR}/ggml/src ${LLAMA_CPP_DIR}/vendor/hash)
target_compile_definitions(ggml-macko PRIVATE GGML_BACKEND_DL GGML_BACKEND_BUILD GGML_BACKEND_SHARED
    GGML_MACKO_OLDEST_LLAMA_CPP_PYTHON="${LLAMA_CPP_PYTHON_OLDEST}"
    GGML_MACKO_NEWEST_LLAMA_CPP_PYTHON="${LLAMA_CPP_PYTHON_NEWEST}"
    GGML_MACKO_OLDEST_GGML="${LLAMA_CPP_OLDEST_GGML}"
    GGML_MACKO_NEWEST_GGML="${LLAMA_CPP_NEWEST_GGML}")
target_link_libraries(ggml-macko PRIVATE -Wl,--whole-archive macko-core -Wl,--no-whole-archive ${macko_ggml_base}
    -Wl,--build-id) # platform::build_id()
set_target_properties(ggml-macko PROPERTIES BUILD_RPATH "" INSTALL_RPATH "" SKIP_BUILD_RPATH ON)
target_compile_options(ggml-macko PRIVATE -ffunction-sections -fdata-sections)
if(NOT WIN32) # exports the C API and ggml's entry point, but no functions of libstdc++'s headers
    target_link_options(ggml-macko PRIVATE -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map)
    set_property(TARGET ggml-macko APPEND PROPERTY LINK_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/exports.map)
    if(NOT TARGET macko-cuda)
        target_link_options(ggml-macko PRIVATE -Wl,--gc-sections)
    endif()
endif()

if(TARGET macko-cuda)
    file(GLOB macko_cuda_device CONFIGURE_DEPENDS cuda/device/*.cpp cuda/graph/*.cpp)
    target_sources(ggml-macko PRIVATE ${macko_cuda_device})
    list(JOIN GGML_MACKO_CUDA_ARCHITECTURES ", sm_" archs)
    target_compile_definitions(ggml-macko PRIVATE
        GGML_MACKO_CUDA="CUDA ${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR}, sm_${archs}")
    target_link_libraries(ggml-macko PRIVATE macko-cuda)
endif()

add_library(ggml-macko-preload MODULE plugin/preload.c platform/broken-output.c)
target_include_directories(ggml-macko-preload SYSTEM PRIVATE ${LLAMA_CPP_DIR}/include ${LLAMA_CPP_DIR}/ggml/include)
target_include_directories(ggml-macko-preload PRIVATE ${macko_includes})
target_compile_options(ggml-macko-preload PRIVATE -fvisibility=hidden)
target_link_libraries(ggml-macko-preload PRIVATE ${CMAKE_DL_LIBS} pthread)

if(GGML_MACKO_EDITABLE)
    foreach(target ggml-macko ggml-macko-preload)
        add_custom_command(TARGET ${target} POST_BUILD COMMAND ${CMAKE_COMMAND} -E create_symlink
            $<TARGET_FILE:${target}> ${PROJECT_SOURCE_DIR}/python/ggml_macko/$<TARGET_FILE_NAME:${target}>)
    endforeach()
endif()
install(TARGETS ggml-macko ggml-macko-preload DESTINATION ggml_macko COMPONENT python)
install(FILES ${PROJECT_SOURCE_DIR}/ggml-macko/include/ggml-macko.h DESTINATION ggml_macko/include COMPONENT python)
install(FILES ${LLAMA_CPP_DIR}/vendor/hash/xxhash/LICENSE # xxHash is part of the plugin
    DESTINATION ggml_macko RENAME LICENSE-xxHash COMPONENT python)
