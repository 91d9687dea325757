// Packs matrices as BITMAP and CODED_BITMAP (layouts.h).
#pragma once

#include "cpu/layout/layouts.h"

namespace macko::cpu {

// Writes the view's rows. first_value: number of non-zeros in all rows before view.rows().row_begin. Views of one
// matrix may be packed in any order and at the same time; the view with the last rows also writes row_off[rows] and the
// slack.
void bitmap_pack(const macko_view & view, int64_t first_value, const bitmap_layout & dst);
void bitmap_pack(const packed_view & view, int n_threads, const bitmap_layout & dst);
void bitmap_pack(const packed_view & view, int n_threads, const coded_bitmap_layout & dst);

} // namespace macko::cpu
