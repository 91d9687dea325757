// Memory that ends at an inaccessible page, for tests of code that could read or write past its arrays.
#pragma once

#include "system.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// n bytes that end at an inaccessible page, filled with ones (NaN in each float type). intact() checks the 256 bytes
// before them.
struct guarded {
    static constexpr uint8_t CANARY   = 0xA7;
    static constexpr size_t  FRONT    = 256;
    uint8_t *                map      = nullptr;
    size_t                   map_size = 0;
    uint8_t *                data     = nullptr;

    explicit guarded(int64_t n) {
        map_size = static_cast<size_t>(n) + FRONT;
        map      = test_system::map_guarded(&map_size);
        if (!map) {
            perror("guarded memory");
            exit(1);
        }
        data = map + map_size - n;
        memset(map, CANARY, map_size);
        memset(data, 0xFF, static_cast<size_t>(n));
    }
    guarded(const guarded &) = delete;
    ~guarded() { test_system::unmap_guarded(map, map_size); }
    bool intact() const {
        return std::all_of(data - FRONT, data, [](uint8_t b) { return b == CANARY; });
    }
    float * floats() const { return reinterpret_cast<float *>(data); }
};
