// The limits of FORMAT.md section 4 and SECURITY.md, and arithmetic on numbers from files. No ggml, no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace macko {

constexpr int64_t  MAX_DIM           = int64_t(1) << 24; // rows, cols
constexpr int64_t  MAX_STORED        = 0x7fffffff - 512; // n_stored
constexpr int64_t  MAX_TENSOR_BYTES  = int64_t(16) << 30;
constexpr int64_t  MAX_MODEL_BYTES   = int64_t(2) << 40;
constexpr int64_t  MAX_EXPANSION     = 64; // dense bytes / file bytes
constexpr int64_t  MAX_ROWS_PER_BYTE = 2;  // rows of a matrix / file bytes
constexpr uint64_t MAX_TENSORS       = 65536;
constexpr uint64_t MAX_KEYS          = 65536;
constexpr uint64_t MAX_STRING        = uint64_t(64) << 20;
constexpr uint64_t MAX_ARRAY         = uint64_t(1) << 24;
constexpr size_t   MAX_NAME          = 63;
constexpr uint64_t MIN_ALIGNMENT     = 8;
constexpr uint64_t MAX_ALIGNMENT     = uint64_t(1) << 20;
constexpr int      MAX_DIMS          = 4;

// true on success; on overflow false, with *out unspecified
template <typename T> [[nodiscard]] bool checked_mul(T a, T b, T * out) { return !__builtin_mul_overflow(a, b, out); }
template <typename T> [[nodiscard]] bool checked_add(T a, T b, T * out) { return !__builtin_add_overflow(a, b, out); }
// Rounds a up to the next multiple of b (a power of two).
template <typename T> [[nodiscard]] bool checked_align(T a, T b, T * out) {
    if (!checked_add(a, static_cast<T>(b - 1), out)) {
        return false;
    }
    *out &= static_cast<T>(~(b - 1));
    return true;
}

} // namespace macko
