// Structs of the C API that will grow: their first member is the size that the caller was compiled with. A member is
// added at the end only, and check_size() then keeps the size of the first version as its bound (RELEASE.md).
#pragma once

#include "codec/status.h"

namespace macko {

// a T of zeros that knows its size
template <typename T> T sized() {
    T s           = {};
    s.struct_size = sizeof(T);
    return s;
}

// BAD_ARGUMENT if s is null or smaller than T
template <typename T> [[nodiscard]] int check_size(const T * s) {
    if (!s) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
    }
    if (s->struct_size < static_cast<int64_t>(sizeof(T))) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "struct_size is %lld, at least %lld is needed",
                    static_cast<long long>(s->struct_size), static_cast<long long>(sizeof(T)));
    }
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
