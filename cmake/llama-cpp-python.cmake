# Included when tools/dev.py builds llama-cpp-python (CMAKE_PROJECT_llama.cpp_INCLUDE), as its llama.cpp is configured.
# llama-cpp-python forces the library of the command-line programs on. No Python module loads it, and it is a third of
# the files to compile.
set(LLAMA_BUILD_COMMON OFF)

# GCC's bug 114098 (fixed in 12.4, 13.3 and 14) breaks the AMX kernels of llama.cpp's CPU backend: the compiler removes
# the stores of a tile configuration, and `ldtilecfg` ends the process when a dense quantized model reads a prompt on a
# CPU with AMX. -march=native enables AMX, so these flags must follow all others.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND
   CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 11 AND # the first that knows AMX
   (CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12.4 OR
    (CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13 AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13.3)))
    foreach(language C CXX)
        string(REPLACE "<FLAGS>" "<FLAGS> -mno-amx-tile -mno-amx-int8 -mno-amx-bf16" CMAKE_${language}_COMPILE_OBJECT
            "${CMAKE_${language}_COMPILE_OBJECT}")
    endforeach()
endif()
