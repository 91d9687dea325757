// Buffer types in the layout of the running ggml. From ggml 0.26 on, the struct has two more functions, which are
// optional: alloc_buffer_n before get_alignment, and get_alloc_size_n before is_host.
#pragma once

#include "ggml-backend-impl.h"

#include <array>
#include <cstddef>

namespace macko {

// Places of members of a ggml_backend_buffer_type in the running ggml, in words. In every version, get_name and
// alloc_buffer are the first words. check_running_ggml() finds the places; until then they are those of our headers.
struct buffer_type_layout {
    size_t get_alignment  = 2;
    size_t get_alloc_size = 4;
    size_t is_host        = 5;
    size_t device         = 6;
};
inline buffer_type_layout running_buffer_type;

// The functions of a buffer type; get_alloc_size and is_host may be null. Functions that are not listed are null.
struct buffer_type_functions {
    decltype(ggml_backend_buffer_type_i::get_name)       get_name;
    decltype(ggml_backend_buffer_type_i::alloc_buffer)   alloc_buffer;
    decltype(ggml_backend_buffer_type_i::get_alignment)  get_alignment;
    decltype(ggml_backend_buffer_type_i::get_alloc_size) get_alloc_size;
    decltype(ggml_backend_buffer_type_i::is_host)        is_host;
};

class buffer_type {
public:
    buffer_type() = default;
    buffer_type(const buffer_type_functions & functions, ggml_backend_dev_t device, void * context)
        : context_(context) {
        words_[0]                                  = reinterpret_cast<void *>(functions.get_name);
        words_[1]                                  = reinterpret_cast<void *>(functions.alloc_buffer);
        words_[running_buffer_type.get_alignment]  = reinterpret_cast<void *>(functions.get_alignment);
        words_[running_buffer_type.get_alloc_size] = reinterpret_cast<void *>(functions.get_alloc_size);
        words_[running_buffer_type.is_host]        = reinterpret_cast<void *>(functions.is_host);
        words_[running_buffer_type.device]         = device;
    }
    ggml_backend_buffer_type_t get() { return reinterpret_cast<ggml_backend_buffer_type_t>(words_.data()); }

    // buft: a buffer type of this plugin
    static const buffer_type & of(ggml_backend_buffer_type_t buft) {
        return *reinterpret_cast<const buffer_type *>(buft);
    }
    void * context() const { return context_; }

private:
    std::array<void *, 16> words_   = {}; // more than the struct has in any version
    void *                 context_ = nullptr;
};

} // namespace macko
