#include "backend/host-weights.h"
#include "backend/planned-buffer.h"

#include <algorithm>
#include <atomic>

namespace macko {

namespace {

std::atomic<const host_weights *> known{ nullptr };
std::atomic<size_t>               largest{ 0 };

} // namespace

void set_host_weights(const host_weights * weights) { known = weights; }

const host_weights * host_weights_of(const ggml_tensor * w) {
    return w && w->buffer && is_host_weights_buffer_type(w->buffer->buft) ? known.load() : nullptr;
}

bool is_host_weights_buffer_type(ggml_backend_buffer_type_t buft) {
    const host_weights * weights = known;
    return weights && real_buffer_type(buft) == weights->buft;
}

void note_host_weight(const ggml_tensor * w) {
    constexpr int64_t SEVERAL = int64_t(32) << 20; // bytes of small experts that are sent together
    const int64_t     matrix  = w->ne[1] * GGML_PAD(w->ne[0], 8) * 2;
    const int64_t     panel   = std::max(matrix, std::min(matrix * w->ne[2] * w->ne[3], SEVERAL));
    const auto        nbytes  = static_cast<size_t>(w->type == GGML_TYPE_F32 ? 0 : panel);
    size_t            before  = largest;
    while (before < nbytes && !largest.compare_exchange_weak(before, nbytes)) {
    }
}

size_t largest_host_weight() { return largest; }

} // namespace macko
