#include "cpu/device/rpc-memory.h"
#include "backend/log.h"
#include "platform/platform.h"

#include <cstring>

namespace macko::cpu {

namespace {

struct unmap {
    size_t nbytes;
    void   operator()(void * memory) const { platform::unmap_memory(memory, nbytes); }
};
using mapping = std::unique_ptr<void, unmap>;

mapping map_memory(size_t nbytes, bool reserve) { return mapping(platform::map_memory(nbytes, reserve), { nbytes }); }

struct mapped_weight : rpc_weight {
    mapping memory; // mapping of a weight

    explicit mapped_weight(mapping m) : memory(std::move(m)) {}
    weight * get() const { return static_cast<weight *>(memory.get()); }
    void     densify(size_t offset, void * data, size_t n) const override { weight_densify(*get(), offset, data, n); }
};

struct mapped_memory : rpc_memory {
    mapping memory;
    size_t  nbytes;

    mapped_memory(mapping m, size_t n) : memory(std::move(m)), nbytes(n) {}

    void * base() const override { return memory.get(); }
    void   write(void * at, const void * data, size_t n) override { memcpy(at, data, n); }
    void   fill(void * at, uint8_t value, size_t n) override { memset(at, value, n); }
    void   read(const void * at, void * data, size_t n) override { memcpy(data, at, n); }
    void   copy(void * at, rpc_memory &, const void * source, size_t n) override { memmove(at, source, n); }
    void   clear(uint8_t value) override;
    int    make_weight(const received_file & file, std::unique_ptr<rpc_weight> * out) override;
};

void mapped_memory::clear(uint8_t value) {
    if (value != 0) {
        memset(memory.get(), value, nbytes);
    } else { // reads as zeros and needs no memory
        platform::discard_memory(memory.get(), nbytes);
    }
}

int mapped_memory::make_weight(const received_file & file, std::unique_ptr<rpc_weight> * out) {
    const sparse_tensor_info & matrix = file.sparse[0];
    const size_t               n      = weight_nbytes(matrix);
    auto                       made   = std::make_unique<mapped_weight>(map_memory(n, true));
    if (!made->memory) {
        return fail(GGML_MACKO_STATUS_OUT_OF_MEMORY, "%s: cannot allocate %.2f MiB for a sparse weight",
                    matrix.name.c_str(), static_cast<double>(n) / 1048576);
    }
    platform::use_huge_pages(made->memory.get(), n); // like a local weight
    weight_init(made->get(), matrix);
    weight_packer packer(*made->get());
    TRY(read_payload(file, file.header, matrix, 0, packer));
    made->get()->magic = WEIGHT_MAGIC;
    *out               = std::move(made);
    return GGML_MACKO_STATUS_OK;
}

} // namespace

std::unique_ptr<rpc_memory> rpc_memory_reserve(size_t nbytes) {
    mapping memory = map_memory(nbytes, false);
    if (!memory) {
        log_error("ggml-macko: cannot reserve %.2f MiB of addresses\n", static_cast<double>(nbytes) / 1048576);
        return nullptr;
    }
    // Small dense tensors lie between the addresses of sparse weights, which must not get memory along with them.
    platform::use_small_pages(memory.get(), nbytes);
    return std::make_unique<mapped_memory>(std::move(memory), nbytes);
}

const weight & rpc_weight_of(const rpc_weight & weight) { return *static_cast<const mapped_weight &>(weight).get(); }

} // namespace macko::cpu
