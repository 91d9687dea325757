#include "cuda/sparse/upload-registry.h"

#include "codec/ec-csr/ec-csr.h"
#include "codec/packed/packed.h"
#include "cuda/sparse/ec-csr/upload.h"
#include "cuda/sparse/quantized.h"

#include <cstring>

namespace macko::cuda {

namespace {

// ---- packed: quantized values; others arrive as MACKO rows ----

quantized_shape packed_shape(const macko_desc & desc, int32_t value_type, int32_t bits, int64_t shared_nbytes) {
    return cuda_quantized_shape({ desc, value_type, bits }, shared_nbytes);
}

bool packed_takes(const macko_desc & desc, int32_t value_type, int32_t bits, int64_t shared_nbytes) {
    return packed_shape(desc, value_type, bits, shared_nbytes).lanes != 0;
}

int64_t packed_nbytes(const macko_desc & desc, int32_t value_type, int32_t bits, int64_t shared_nbytes) {
    const quantized_shape shape = packed_shape(desc, value_type, bits, shared_nbytes);
    const packed_desc     m     = { desc, value_type, bits };
    return shape.lanes ? cuda_quantized_bind(m, shape, cuda_quantized_max_outliers(m, shape), nullptr).nbytes : 0;
}

int packed_upload(const codec_view & view, const whole_upload & to) {
    const packed_view & packed = static_cast<const packed_view &>(view);
    return to.uploader.packed(packed, cuda_quantized_shape(packed.arrays().desc, to.shared_nbytes), to.dst,
                              to.n_threads, to.out, to.outgrown);
}

// ---- ec-csr: in blocks or recoded to MACKO rows, in the memory of the latter ----

bool ec_csr_takes(const macko_desc &, int32_t, int32_t, int64_t) { return true; }

int64_t ec_csr_nbytes(const macko_desc &, int32_t, int32_t, int64_t) { return 0; }

int ec_csr_upload(const codec_view & view, const whole_upload & to) {
    // blocks lie across the rows of stacked matrices
    const ec_csr_choice choice = to.stacked ? ec_csr_choice::ROWS : ec_csr_choice_of_environment();
    return cuda_ec_csr_upload(to.uploader, static_cast<const ec_csr_view &>(view), choice, to.n_threads, to.dst,
                              to.room, to.out, to.part);
}

} // namespace

const upload_row * find_upload(const char * format) {
    static const upload_row ROWS[] = {
        { "packed", packed_nbytes, packed_takes, packed_upload },
        { "ec-csr", ec_csr_nbytes, ec_csr_takes, ec_csr_upload },
    };
    for (const upload_row & row : ROWS) {
        if (!strcmp(row.format, format)) {
            return &row;
        }
    }
    return nullptr;
}

} // namespace macko::cuda
