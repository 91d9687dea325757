# Included when tools/dev.py builds llama-cpp-python (CMAKE_PROJECT_llama.cpp_INCLUDE), as its llama.cpp is configured.
# llama-cpp-python forces the library of the command-line programs on. No Python module loads it, and it is a third of
# the files to compile.
set(LLAMA_BUILD_COMMON OFF)
