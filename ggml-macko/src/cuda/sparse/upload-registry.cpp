#include "cuda/sparse/upload-registry.h"

#include "codec/ec-csr/ec-csr.h"
#include "codec/packed/packed.h"
#include "cuda/sparse/ec-csr/upload.h"
#include "cuda/sparse/quantized.h"

#include <cstring>

namespace macko::cuda {

namespace {

int packed_upload(const codec_view & view, const whole_upload & to) {
    const packed_view & packed = static_cast<const packed_view &>(view);
    return to.uploader.packed(packed, cuda_quantized_shape(packed.arrays().desc, to.shared_nbytes), to.dst,
                              to.n_threads, to.out, to.outgrown);
}

int ec_csr_upload(const codec_view & view, const whole_upload & to) {
    // the blocks of stacked matrices lie across all of them
    const bool in_blocks = !to.stacked && cuda_ec_csr_in_blocks(view.desc(), to.shared_nbytes);
    return cuda_ec_csr_upload(to.uploader, static_cast<const ec_csr_view &>(view), in_blocks, to.n_threads, to.dst,
                              to.room, to.out, to.part);
}

} // namespace

const upload_row * find_upload(const char * format) {
    static const upload_row ROWS[] = {
        { "packed", packed_upload },
        { "ec-csr", ec_csr_upload },
    };
    for (const upload_row & row : ROWS) {
        if (!strcmp(row.format, format)) {
            return &row;
        }
    }
    return nullptr;
}

} // namespace macko::cuda
