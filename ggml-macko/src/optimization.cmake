# Of a release: -O3 only where it makes loops over weights faster, -Os for what runs a few times per model, else -O2.
string(CONCAT macko_fast "^cpu/kernels/(kernels|rope)|^cpu/layout/|^codec/macko/|^codec/ec-csr/extract"
    "|^codec/(matrix-|negative-)|/cuda/")
string(CONCAT macko_cold "^(abi|capi|gguf|load|platform|plugin)/|-codec\\.cpp$|^codec/(codec|registry|status|team)\\."
    "|^backend/[^o]|layout/(choose|layouts|plan)\\.|^cpu/device/(rpc|weight)|^rpc/[^g]")
foreach(target macko-core ggml-macko)
    if(NOT TARGET ${target} OR NOT CMAKE_BUILD_TYPE STREQUAL "Release" OR GGML_MACKO_SANITIZE OR GGML_MACKO_FUZZ)
        continue()
    endif()
    # a property of the target, because ggml-macko-debug has the same sources
    set_target_properties(${target} PROPERTIES MACKO_OPTIMIZED ON)
    get_target_property(sources ${target} SOURCES)
    foreach(source ${sources})
        if(source MATCHES "${macko_cold}")
            set(level -Os)
        elseif(source MATCHES "${macko_fast}")
            continue()
        else()
            set(level -O2)
        endif()
        set_property(SOURCE ${source} APPEND PROPERTY
            COMPILE_OPTIONS $<$<BOOL:$<TARGET_PROPERTY:MACKO_OPTIMIZED>>:${level}>)
    endforeach()
endforeach()
