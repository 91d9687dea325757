#include "backend/planned-buffer.h"
#include "abi/buffer-type.h"

#include <memory>
#include <mutex>

namespace macko {

namespace {

struct planned : buffer_type {
    using buffer_type::buffer_type;
    ggml_backend_buffer_type_t              real = nullptr;
    bool                                    host = false;
    std::unordered_map<std::string, size_t> nbytes; // bytes of the sparse matrices, by name
};

const planned & planned_of(ggml_backend_buffer_type_t buft) {
    return static_cast<const planned &>(buffer_type::of(buft));
}

const char * get_name(ggml_backend_buffer_type_t buft) { return ggml_backend_buft_name(planned_of(buft).real); }

// for tensors other than the model's weights; the weights get a buffer of 0 bytes, which ggml makes itself
ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    return ggml_backend_buft_alloc_buffer(planned_of(buft).real, size);
}

size_t get_alignment(ggml_backend_buffer_type_t buft) { return ggml_backend_buft_get_alignment(planned_of(buft).real); }

size_t get_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * tensor) {
    const planned & p  = planned_of(buft);
    const auto      it = p.nbytes.find(tensor->name);
    return it != p.nbytes.end() ? it->second : ggml_backend_buft_get_alloc_size(p.real, tensor);
}

bool is_host(ggml_backend_buffer_type_t buft) { return planned_of(buft).host; }

bool is_planned(ggml_backend_buffer_type_t buft) { return buft && buft->iface.alloc_buffer == alloc_buffer; }

} // namespace

ggml_backend_buffer_type_t planned_buffer_type(ggml_backend_buffer_type_t real, const load_session & current,
                                               matrix_nbytes_t nbytes, bool host) {
    static std::mutex                            mutex;
    static std::vector<std::unique_ptr<planned>> all;
    auto                                         p = std::make_unique<planned>(
        buffer_type_functions{ get_name, alloc_buffer, get_alignment, get_alloc_size, is_host },
        ggml_backend_buft_get_device(real), buffer_type::of(real).context());
    p->real = real;
    p->host = host;
    for (const sparse_tensor_info & m : current.matrices()) {
        p->nbytes.emplace(m.name, nbytes(real, m));
    }
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto & known : all) {
        if (known->real == real && known->nbytes == p->nbytes) {
            return known->get();
        }
    }
    all.push_back(std::move(p));
    return all.back()->get();
}

ggml_backend_buffer_type_t real_buffer_type(ggml_backend_buffer_type_t buft) {
    return is_planned(buft) ? planned_of(buft).real : buft;
}

bool is_planned_matrix(ggml_backend_buffer_type_t buft, const ggml_tensor * tensor) {
    return is_planned(buft) && planned_of(buft).nbytes.count(tensor->name);
}

} // namespace macko
