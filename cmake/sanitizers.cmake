# GGML_MACKO_SANITIZE and GGML_MACKO_FUZZ: flags for every target.
if(GGML_MACKO_SANITIZE STREQUAL "thread")
    set(macko_sanitizers thread)
elseif(GGML_MACKO_SANITIZE)
    set(macko_sanitizers address,undefined)
endif()
if(macko_sanitizers) # -O1 and line numbers alone: -O3 -g takes twice as long to compile
    add_compile_options(-fsanitize=${macko_sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1 -O1)
    add_link_options(-fsanitize=${macko_sanitizers})
endif()
if(GGML_MACKO_FUZZ)
    add_compile_options(-fsanitize=fuzzer-no-link)
    add_link_options(-static-libstdc++ -static-libgcc) # the programs also run on machines without this compiler
endif()
