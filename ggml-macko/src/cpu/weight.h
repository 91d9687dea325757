// What a sparse weight is in the memory of the CPU device.
#pragma once

#include "cpu/bitmap.h"

#include "ggml.h"

namespace macko::cpu {

// stands at tensor->data; the bitmap's memory follows
struct alignas(BITMAP_ALIGNMENT) weight {
    uint64_t   magic; // WEIGHT_MAGIC once the payload is complete
    macko_desc desc;
    int32_t    value_type;      // desc.type, or quantized
    int64_t    rows_per_matrix; // ne1; experts and other matrices follow each other

    bitmap_matrix bitmap() const { return bitmap_bind(desc, value_type, const_cast<weight *>(this) + 1); }
};
constexpr uint64_t WEIGHT_MAGIC = 0x78697274616d6b6dull;

// nullptr if the tensor's payload did not come
inline const weight * weight_of(const ggml_tensor * tensor) {
    const auto * m = static_cast<const weight *>(tensor->data);
    return m && m->magic == WEIGHT_MAGIC ? m : nullptr;
}

} // namespace macko::cpu
