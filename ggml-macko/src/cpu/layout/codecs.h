// The formats that the CPU packs from their own arrays, as a table from codec to function. Matrices of all other
// formats arrive as MACKO rows. A format with a packer of its own adds one row to the table. Does not use ggml.
#pragma once

#include "codec/codec.h"
#include "cpu/layout/bitmap.h"

namespace macko::cpu {

bool cpu_takes(const codec & format);
// Packs a view that passed all checks, in a format that cpu_takes(); dst is bound to memory for it.
void cpu_pack(const codec_view & view, int n_threads, const bitmap_matrix & dst);

} // namespace macko::cpu
