// Appends codes of 1, 2, 4 or 8 bits to a stream of bytes, low bits first.
#pragma once

#include <cstdint>

namespace macko {

// Starts at any bit. Two threads may share the first and last byte of their ranges, because the writer ORs these bytes
// into zeroed memory.
class code_writer {
public:
    code_writer(uint8_t * codes, int64_t bit)
        : out_(codes + bit / 8), n_bits_(static_cast<int>(bit & 7)), shared_(true) {}
    void put(uint32_t code, int bits) {
        buffer_ |= code << n_bits_;
        n_bits_ += bits;
        if (n_bits_ == 8) { // widths divide 8, so a code never crosses a byte
            flush();
        }
    }
    void finish() {
        shared_ = true;
        if (n_bits_ > 0) {
            flush();
        }
    }

private:
    void flush() {
        if (shared_) {
            __atomic_fetch_or(out_, static_cast<uint8_t>(buffer_), __ATOMIC_RELAXED);
        } else {
            *out_ = static_cast<uint8_t>(buffer_);
        }
        out_++;
        buffer_ = 0;
        n_bits_ = 0;
        shared_ = false;
    }
    uint8_t * out_;
    uint32_t  buffer_ = 0;
    int       n_bits_;
    bool      shared_;
};

} // namespace macko
