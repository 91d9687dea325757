// What a sparse weight is in the memory of the CPU device.
#pragma once

#include "cpu/bitmap.h"

#include "ggml.h"

namespace macko::cpu {

// stands at tensor->data; the bitmap's memory follows
struct alignas(BITMAP_ALIGNMENT) stored_matrix {
    uint64_t   magic; // STORED_MATRIX once the payload is complete
    macko_desc desc;
    int32_t    value_type;      // desc.type, or quantized
    int64_t    rows_per_matrix; // ne1; experts and other matrices follow each other

    bitmap_matrix bitmap() const { return bitmap_bind(desc, value_type, const_cast<stored_matrix *>(this) + 1); }
};
constexpr uint64_t STORED_MATRIX = 0x78697274616d6b6dull;

// nullptr if the tensor's payload did not come
inline const stored_matrix * stored(const ggml_tensor * tensor) {
    const auto * m = static_cast<const stored_matrix *>(tensor->data);
    return m && m->magic == STORED_MATRIX ? m : nullptr;
}

} // namespace macko::cpu
