// Functions of the system that only tests need.
#pragma once

#include <cstddef>
#include <cstdint>

namespace test_system {

// At least n bytes, in whole pages, before an inaccessible page; *n becomes their number. nullptr on failure.
uint8_t * map_guarded(size_t * n);
void      unmap_guarded(uint8_t * memory, size_t n);

// Sets an environment variable, or removes it if value is nullptr.
void set_variable(const char * name, const char * value);

// The most memory that this process has used, in bytes.
double peak_memory();

} // namespace test_system
