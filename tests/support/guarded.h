// Memory that ends at an inaccessible page, for tests of code that could read or write past its arrays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

// n bytes that end at an inaccessible page, filled with ones (NaN in each float type). intact() checks the 256 bytes
// before them.
struct guarded {
    static constexpr uint8_t CANARY   = 0xA7;
    static constexpr size_t  FRONT    = 256;
    uint8_t *                map      = nullptr;
    size_t                   map_size = 0;
    uint8_t *                data     = nullptr;

    explicit guarded(int64_t n) {
        const size_t page  = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t inner = (static_cast<size_t>(n) + FRONT + page - 1) / page * page;
        map_size           = inner + page;
        map =
            static_cast<uint8_t *>(mmap(nullptr, map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (map == MAP_FAILED || mprotect(map + inner, page, PROT_NONE) != 0) {
            perror("mmap");
            exit(1);
        }
        data = map + inner - n;
        memset(map, CANARY, inner);
        memset(data, 0xFF, static_cast<size_t>(n));
    }
    guarded(const guarded &) = delete;
    ~guarded() { munmap(map, map_size); }
    bool intact() const {
        return std::all_of(data - FRONT, data, [](uint8_t b) { return b == CANARY; });
    }
    float * floats() const { return reinterpret_cast<float *>(data); }
};
