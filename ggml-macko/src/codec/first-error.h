// The error of work whose parts run at the same time: that of the first part, independent of which thread finds it.
// Parts after that part can be skipped.
#pragma once

#include "codec/status.h"

#include <atomic>
#include <mutex>
#include <new>
#include <string>

namespace macko {

struct first_error {
    std::atomic<int64_t> part{ INT64_MAX };
    std::mutex           mutex;
    int                  status = GGML_MACKO_STATUS_OK;
    std::string          text; // empty if out of memory

    bool any() const { return status != GGML_MACKO_STATUS_OK; } // only valid after all threads have ended

    // Keeps s and the message of this thread's last error, if they are of an earlier part.
    void set(int64_t p, int s) noexcept {
        const std::lock_guard<std::mutex> lock(mutex);
        if (p < part) {
            part   = p;
            status = s;
            try {
                text = ggml_macko_last_error();
            } catch (const std::bad_alloc &) {
                text.clear();
            }
        }
    }
};

} // namespace macko
