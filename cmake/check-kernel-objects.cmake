# Fails if an object file of cpu/kernels/kernels-*.cpp defines a symbol that another translation unit may define, too.
#
# These files are compiled for instruction sets that not every CPU has. If several translation units define an inline
# function or a template instance, the linker keeps any one: a copy with AVX-512 instructions could then run on any CPU.
# The objects are compiled without optimization, because inlining hides such functions.
#
#   cmake -DNM=nm "-DOBJECTS=a.o;b.o" -P check-kernel-objects.cmake
if(NOT OBJECTS)
    message(FATAL_ERROR "no object files")
endif()
foreach(object ${OBJECTS})
    execute_process(COMMAND ${NM} --demangle --defined-only ${object} OUTPUT_VARIABLE symbols RESULT_VARIABLE failed)
    if(failed)
        message(FATAL_ERROR "cannot read ${object}")
    endif()
    # D: the kernel_set. Lower case: local to the file.
    string(REGEX MATCHALL "[0-9a-f]+ [A-Zuv] [^\n]+" global "${symbols}")
    # .refptr: on Windows, the address of a variable of another file
    list(FILTER global EXCLUDE REGEX " [DR] (macko::cpu::kernels_|\\.refptr\\.)")
    if(global)
        list(JOIN global "\n  " text)
        message(SEND_ERROR "${object} defines\n  ${text}")
    endif()
endforeach()
