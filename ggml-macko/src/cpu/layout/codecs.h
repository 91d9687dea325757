// Which formats the CPU packs from their own arrays; matrices of all others reach it as MACKO rows. The CPU's table
// from codec to function: a format that gets a packer of its own is one more row of it. No ggml.
#pragma once

#include "codec/codec.h"
#include "cpu/layout/bitmap.h"

namespace macko::cpu {

bool cpu_takes(const codec & format);
// view is of a format that cpu_takes(), and passed all checks; dst is bound to memory for it
void cpu_pack(const codec_view & view, int n_threads, const bitmap_matrix & dst);

} // namespace macko::cpu
