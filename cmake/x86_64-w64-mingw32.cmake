# Toolchain file: builds for 64-bit Windows with a cross compiler, and runs the tests with Wine (on Debian:
# g++-mingw-w64-x86-64-posix, wine). tools/dev.py test uses it where both are installed.
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(CMAKE_C_COMPILER x86_64-w64-mingw32-gcc-posix)
set(CMAKE_CXX_COMPILER x86_64-w64-mingw32-g++-posix)
# Windows aligns the stack to 16 bytes, and gcc cannot align it further (its bug 54412), but it assumes that spilled AVX
# vectors are aligned.
# -Wno-format: the attribute format(printf) means Microsoft's function there, not the one that is called.
set(CMAKE_C_FLAGS_INIT -Wa,-muse-unaligned-vector-move)
set(CMAKE_CXX_FLAGS_INIT "-Wa,-muse-unaligned-vector-move -Wno-format")
# -O3 would take a third of the build's time for kernels that need not be fast here
set(CMAKE_CXX_FLAGS_RELEASE "-O1 -DNDEBUG" CACHE STRING "")
# with the libraries of the compiler, OpenMP's included; CMake would find its DLL
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
set(OpenMP_gomp_LIBRARY gomp CACHE STRING "")
find_program(WINE wine REQUIRED)
set(CMAKE_CROSSCOMPILING_EMULATOR
    ${CMAKE_COMMAND};-E;env;WINEPREFIX=${CMAKE_BINARY_DIR}/wine;WINEDEBUG=-all;${WINE})
