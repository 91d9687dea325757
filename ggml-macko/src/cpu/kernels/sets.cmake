# One file per instruction set; dispatch.cpp picks one at run time, after a check that the CPU has these instructions.
set(macko_sets "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64")
    set(macko_avx2         -mavx2 -mfma -mf16c -mbmi -mbmi2 -mpopcnt)
    set(macko_avx512       -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mbmi -mbmi2 -mpopcnt)
    set(macko_avx512-vbmi2 ${macko_avx512} -mavx512vbmi -mavx512vbmi2 -mavx512vnni)
    set(macko_sets avx2 avx512 avx512-vbmi2)
    include(CheckCXXCompilerFlag)
    check_cxx_compiler_flag(-mavxvnni macko_has_avx_vnni) # not GCC 10
    if(macko_has_avx_vnni)
        set(macko_avx2-vnni ${macko_avx2} -mavxvnni)
        list(APPEND macko_sets avx2-vnni)
        set_source_files_properties(cpu/kernels/dispatch.cpp PROPERTIES COMPILE_DEFINITIONS GGML_MACKO_AVX2_VNNI)
    endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64")
    set(macko_neon "")
    set(macko_neon-dotprod -march=armv8.2-a+dotprod)
    set(macko_neon-fhm     -march=armv8.2-a+dotprod+fp16fml)
    set(macko_sets neon neon-dotprod neon-fhm)
endif()
foreach(set ${macko_sets})
    target_sources(macko-core PRIVATE cpu/kernels/kernels-${set}.cpp)
    set_source_files_properties(cpu/kernels/kernels-${set}.cpp PROPERTIES COMPILE_OPTIONS "${macko_${set}}")
endforeach()

get_target_property(kernel_sources macko-core SOURCES)
list(FILTER kernel_sources INCLUDE REGEX "/kernels-[^/]*\\.cpp$")
# kernels throw nothing; with exceptions, gcc adds a weak symbol for the personality function, and tables to unwind
set_property(SOURCE ${kernel_sources} APPEND PROPERTY COMPILE_OPTIONS -fno-exceptions -fno-asynchronous-unwind-tables)
if(GGML_MACKO_FUZZ) # clang needs many minutes for them with sanitizers, which gcc's builds have
    set_property(SOURCE ${kernel_sources} APPEND PROPERTY COMPILE_OPTIONS
        -O2 -fno-sanitize=all -fno-sanitize=fuzzer-no-link)
elseif(GGML_MACKO_SANITIZE) # -O3 takes gcc two to four minutes per file, -O1 20 seconds
    set_property(SOURCE ${kernel_sources} APPEND PROPERTY COMPILE_OPTIONS -O1)
endif()

if(GGML_MACKO_TESTS AND NOT GGML_MACKO_FUZZ) # without optimization, only to see which symbols they define
    add_library(unoptimized-kernels OBJECT ${kernel_sources})
    target_include_directories(unoptimized-kernels PRIVATE ${macko_includes})
    target_compile_options(unoptimized-kernels PRIVATE -O0 -fno-sanitize=all)
endif()
