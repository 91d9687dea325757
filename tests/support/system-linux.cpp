#include "system.h"

#include <cstdlib>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

namespace test_system {

static size_t page_size() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

uint8_t * map_guarded(size_t * n) {
    *n         = (*n + page_size() - 1) / page_size() * page_size();
    void * map = mmap(nullptr, *n + page_size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return map != MAP_FAILED && mprotect(static_cast<uint8_t *>(map) + *n, page_size(), PROT_NONE) == 0
               ? static_cast<uint8_t *>(map)
               : nullptr;
}

void unmap_guarded(uint8_t * memory, size_t n) { munmap(memory, n + page_size()); }

void set_variable(const char * name, const char * value) { value ? setenv(name, value, 1) : unsetenv(name); }

double peak_memory() {
    struct rusage usage = {};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<double>(usage.ru_maxrss) * 1024;
}

} // namespace test_system
