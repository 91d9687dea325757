#include "cpu/layout/codecs.h"

namespace macko::cpu {

namespace {

struct packer {
    const codec & (*format)();
    void (*pack)(const codec_view & view, int n_threads, const bitmap_matrix & dst);
};

const packer PACKERS[] = {
    { packed_codec,
      [](const codec_view & view, int n_threads, const bitmap_matrix & dst) {
          bitmap_pack(static_cast<const packed_view &>(view), n_threads, dst);
      } },
};

const packer * find(const codec & format) {
    for (const packer & p : PACKERS) {
        if (&p.format() == &format) {
            return &p;
        }
    }
    return nullptr;
}

} // namespace

bool cpu_takes(const codec & format) { return find(format) != nullptr; }

void cpu_pack(const codec_view & view, int n_threads, const bitmap_matrix & dst) {
    find(view.format())->pack(view, n_threads, dst);
}

} // namespace macko::cpu
