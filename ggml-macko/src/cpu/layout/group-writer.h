// Collects finished groups from the packer of bundles (bundles.h).
#pragma once

#include "cpu/layout/layouts.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace macko::cpu {

// A growing byte buffer. Each vector is zeroed before it is added.
class group_bytes {
public:
    size_t          size() const { return size_; }
    const uint8_t * data() const { return bytes_.get(); }
    void            clear() { size_ = 0; }
    // Reserves n bytes at the end; the next append() adds them to the content.
    uint8_t * room_for(size_t n) {
        if (capacity_ - size_ < n) {
            capacity_ = 2 * capacity_ + n;
            std::unique_ptr<uint8_t[]> larger(new uint8_t[capacity_]);
            if (size_ > 0) {
                memcpy(larger.get(), bytes_.get(), size_);
            }
            bytes_ = std::move(larger);
        }
        return bytes_.get() + size_;
    }
    void append(size_t n) { size_ += n; }

private:
    std::unique_ptr<uint8_t[]> bytes_;
    size_t                     size_ = 0, capacity_ = 0;
};

// Writes the groups of a matrix one after the other, in whatever order and on whatever threads they are made. No thread
// waits for another: a group that arrives early is kept until all groups before it are there.
class group_writer {
public:
    explicit group_writer(const bundles_layout & w) : w_(w) {}

    // Whether the matrix can still be in bundles. If not, groups may be empty.
    bool fits() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return has_room();
    }
    // Returns memory for a group.
    group_bytes take() {
        const std::lock_guard<std::mutex> lock(mutex_);
        group_bytes                       bytes;
        if (!spare_.empty()) {
            bytes = std::move(spare_.back());
            spare_.pop_back();
            bytes.clear();
        }
        return bytes;
    }
    void put(int64_t group, group_bytes made) {
        std::unique_lock<std::mutex> lock(mutex_);
        waiting_.emplace(group, std::move(made));
        for (auto next = waiting_.begin(); next != waiting_.end() && next->first == next_; next = waiting_.begin()) {
            group_bytes    bytes = std::move(next->second);
            const uint64_t at    = total_;
            waiting_.erase(next);
            w_.group_off[next_++] = at;
            total_ += bytes.size();
            if (bytes.size() > 0 && has_room()) {
                lock.unlock(); // other threads write to other places
                memcpy(w_.bundles + at, bytes.data(), bytes.size());
                lock.lock();
            }
            spare_.push_back(std::move(bytes));
        }
    }
    // Call after the last group. Returns whether the matrix is in bundles.
    bool finish() {
        w_.group_off[next_] = total_;
        return fits() && total_ > 0;
    }

private:
    bool has_room() const { return total_ <= static_cast<uint64_t>(w_.bundles_nbytes); }

    const bundles_layout           w_;
    std::mutex                     mutex_;
    std::map<int64_t, group_bytes> waiting_;
    std::vector<group_bytes>       spare_;
    int64_t                        next_  = 0;
    uint64_t                       total_ = 0; // bytes of the groups before next_
};

} // namespace macko::cpu
