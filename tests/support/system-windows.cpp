#include "system.h"

#include <cstdlib>
#include <windows.h>
// after windows.h
#include <psapi.h>

namespace test_system {

constexpr size_t PAGE = 4096;

uint8_t * map_guarded(size_t * n) {
    *n            = (*n + PAGE - 1) / PAGE * PAGE;
    auto * memory = static_cast<uint8_t *>(VirtualAlloc(nullptr, *n + PAGE, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE));
    DWORD  before = 0;
    return memory && VirtualProtect(memory + *n, PAGE, PAGE_NOACCESS, &before) ? memory : nullptr;
}

void unmap_guarded(uint8_t * memory, size_t) { VirtualFree(memory, 0, MEM_RELEASE); }

void set_variable(const char * name, const char * value) { _putenv_s(name, value ? value : ""); }

double peak_memory() {
    PROCESS_MEMORY_COUNTERS usage = {};
    K32GetProcessMemoryInfo(GetCurrentProcess(), &usage, sizeof(usage));
    return static_cast<double>(usage.PeakWorkingSetSize);
}

} // namespace test_system
