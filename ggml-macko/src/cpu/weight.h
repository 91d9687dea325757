// What tensor->data of a sparse weight points to on the CPU device: a header, and the memory of a bitmap_matrix.
#pragma once

#include "cpu/bitmap.h"

#include "ggml.h"

namespace macko::cpu {

struct alignas(BITMAP_ALIGNMENT) weight {
    uint64_t   magic; // WEIGHT_MAGIC when the whole payload has been read
    macko_desc desc;
    int32_t    value_type;      // in memory (type_in_memory)
    int64_t    rows_per_matrix; // ne[1]; the ne[2] * ne[3] matrices of the tensor follow each other
    int64_t    values_nbytes;   // on file

    bitmap_matrix bitmap() const {
        return bitmap_bind(desc, value_type, const_cast<weight *>(this) + 1, values_nbytes);
    }
};
constexpr uint64_t WEIGHT_MAGIC = 0x78697274616d6b6dull;

// nullptr if the tensor's payload has not been read
inline const weight * weight_of(const ggml_tensor * tensor) {
    const auto * m = static_cast<const weight *>(tensor->data);
    return m && m->magic == WEIGHT_MAGIC ? m : nullptr;
}

} // namespace macko::cpu
