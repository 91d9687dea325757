// y = W x for 9 to 32 columns of x on tensor cores, with W in the layout INLINE_DELTA or EXP_CODED. Two kernels:
//
//   stage_x_kernel  writes x, normalized, in 16 bits and in the order of the tensor cores' operands, to the caller's
//                   memory (tiles.cu)
//   tiles_kernel    makes tiles of 8, 16 or 24 rows dense in shared memory and multiplies them there
//
// One .cu file per layout and type includes this file, so that the kernels compile in parallel. lab/kernels-gpu.md has
// measurements and limits. tiles_kernel is longer than other functions because its phases share registers and unrolled
// loops.
#pragma once

#include "cuda/lib/mma.cuh"
#include "cuda/sparse/product.cuh"
#include "cuda/sparse/row-split-groups.cuh"

#include <algorithm>

namespace macko::cuda {

struct tiles_launch {
    row_split_launch p;            // its warp_rows are tiles
    const uint4 *    x16;          // for each 32 columns of W, for each 16 columns of x: two operands of a warp
    int32_t          pitch;        // bytes of a row in shared memory
    int32_t          shares;       // warps that multiply: those whose sums fit shared memory
    bool             sums_in_tile; // the sums replace the rows, because they do not fit next to them
};

// Launches tiles_kernel. T: inline_delta<__half>, exp_coded<__half> or exp_coded<__nv_bfloat16>, one per .cu file.
template <typename T>
cudaError_t launch_tiles(tiles_launch & q, int delta_bits, int lanes, const cuda_device_info & device,
                         cudaStream_t stream);

// ---- the kernel ----

template <int OFFSET> __device__ __forceinline__ void store_half(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b16 [%0+%1], %2;" ::"r"(address), "n"(OFFSET), "h"(static_cast<uint16_t>(value))
                 : "memory");
}
// Loads four words and overwrites them with zeros.
__device__ __forceinline__ uint4 take_words(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
    return v;
}

// Bytes from one delta step to the next: 32 columns of 16 bits, or one column with deltas of 6 bits.
constexpr uint32_t tile_step_nbytes(int bits) { return bits == 6 ? 2 : 64; }

template <typename T, // layout and type of the values: inline_delta<...> or exp_coded<...>
          int BITS,   // bits of a delta
          int LANES,  // runs per row: 8, 16 or 32
          int BLOCKS, // blocks of 8 rows in a tile: 1, 2 or 3
          int SETS,   // sets of 16 columns of x: 1 or 2
          int WARPS,  // warps of a block
          int DEPTH>  // groups of a run that are requested ahead
__global__ void __launch_bounds__(WARPS * 32, 1)
    tiles_kernel(const __grid_constant__ tiles_launch q) { // matrices, staged x, layout of shared memory
    // One block per multiprocessor:
    //
    //   shared memory   | row 0: `pitch` bytes | row 1 | ... | row TILE - 1 | sums of warp 0 | sums of warp 1 | ... |
    //   scatter         warp w: rows w * ROWS ... of each WARPS * ROWS rows, 32 runs at a time
    //   multiply        warp w: columns 32 w ... 32 w + 31 of each 32 * shares columns, of all rows
    //
    // Phases for each tile: scatter the values of its rows, and then the outliers; barrier; multiply the warp's columns
    // and leave zeros; barrier; add up the sums of the warps and store the results. The first groups of the next rows
    // are requested before the multiplication.
    constexpr int ROWS             = 32 / LANES; // rows of a warp at a time
    constexpr int TILE             = 8 * BLOCKS; // rows
    using group_type               = group_bits<T, BITS>;
    constexpr int      PART        = group_type::ENTRIES / group_type::PARTS; // entries of a part
    constexpr bool     BANK_ORDER  = BITS != 6;
    constexpr uint32_t STEP_NBYTES = tile_step_nbytes(BITS);     // bytes from one delta step to the next
    constexpr int      SUMS        = BLOCKS * SETS * 4;          // per thread
    constexpr int      TURNS = std::max(1, TILE / ROWS / WARPS); // a warp has rows warp * ROWS ... of each WARPS * ROWS
    constexpr int X_AHEAD = WARPS == 24 ? 1 : SETS == 1 ? 3 : 2; // steps whose x is requested ahead, as registers allow
    static_assert(TILE % ROWS == 0 && (TURNS == 1 || TILE == TURNS * WARPS * ROWS),
                  "all warps with rows have equally many");
    extern __shared__ __align__(128) uint8_t tile[];
    const row_split_launch &                 p = q.p;
    float * sums = reinterpret_cast<float *>(q.sums_in_tile ? tile : tile + TILE * q.pitch);

    const int lane = threadIdx.x % LANES, warp = threadIdx.x / 32, row_of_tile = warp * ROWS + threadIdx.x % 32 / LANES;
    const uint32_t x_period = static_cast<uint32_t>(p.modulus) * 2;

    // Row r of tile t. Gate and up each have half of a tile.
    const auto task_of = [&](int t, int r) {
        if (p.silu_mul) {
            const int row = t * (TILE / 2) + r % (TILE / 2);
            return sparse_task{ r / (TILE / 2), row, t < p.n_warp_rows && row < p.m[0].n_rows };
        }
        return task_at<true, TILE>(p, t, 0, r, 0);
    };
    struct row_start {
        int      matrix, begin, end;
        uint32_t base;
        int      trailing;
    };
    const auto fetch = [&](int turn) { // the warp has TURNS turns per tile
        const int         r    = row_of_tile + turn % TURNS * (WARPS * ROWS);
        const sparse_task task = task_of(blockIdx.x + turn / TURNS * gridDim.x, r);
        row_start         s    = {};
        if (task.valid && r < TILE) {
            const row_split_operand & m = p.m[task.matrix];
            s.matrix                    = task.matrix;
            const int row               = m.row_begin + task.row;
            s.begin                     = __ldg(m.row_ptr + row);
            s.end                       = __ldg(m.row_ptr + row + 1);
            s.trailing                  = __ldg(m.trailing + row);
            s.base                      = __ldg(m.bases + static_cast<int64_t>(row) * LANES + lane);
        }
        return s;
    };
    // This thread's run: groups in steps begin ... end - 1, then outliers up to end_of_outliers. whole: the steps
    // before the last step of any run; one of the runs ends with the row.
    struct cursor {
        int             matrix, begin, end, end_of_outliers, whole, steps;
        uint32_t        base;
        const uint8_t * groups;
    };
    const auto begin_row = [&](const row_start & s) {
        const row_span row(s.begin, s.end, s.trailing);
        cursor         c;
        c.matrix          = s.matrix;
        c.groups          = group_type::values_at(p.m[s.matrix].groups, row.slot(lane, LANES, 0));
        c.begin           = row.first_step(lane);
        c.end             = row.end_step(lane, LANES);
        c.end_of_outliers = row.end_of_outliers(lane, LANES);
        c.whole           = row.end_step(LANES - 1, LANES) - 1;
        c.steps           = row.end_of_outliers(0, LANES);
#pragma unroll
        for (int offset = LANES; offset < 32; offset *= 2) {
            c.whole = min(c.whole, __shfl_xor_sync(FULL_WARP, c.whole, offset));
            c.steps = max(c.steps, __shfl_xor_sync(FULL_WARP, c.steps, offset));
        }
        c.base = s.base;
        return c;
    };
    group_type now[DEPTH];
    const auto load = [&](const cursor & c, int first) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (first + d >= c.begin && first + d < c.end_of_outliers) {
                now[d].load(c.groups + static_cast<int64_t>(first + d) * (LANES * group_type::NBYTES));
            }
        }
    };

    cursor c = begin_row(fetch(0));
    load(c, 0);
    row_start ahead = fetch(1);
    int       turn  = 0;
    for (int i = threadIdx.x; i < TILE * q.pitch / 16; i += WARPS * 32) {
        reinterpret_cast<uint4 *>(tile)[i] = make_uint4(0, 0, 0, 0);
    }
    cuda_allow_next();
    cuda_wait_for_previous();
    __syncthreads();

    for (int t = blockIdx.x; t < p.n_warp_rows; t += gridDim.x) {
        for (int row = row_of_tile; warp * ROWS < TILE && row < TILE; row += WARPS * ROWS, turn++) {
            const uint32_t mine = shared_address(tile) + row * q.pitch;
            uint32_t       limit[PART + 1]; // where the row repeats, minus the steps up to an entry
#pragma unroll
            for (int k = 0; k <= PART; k++) {
                limit[k] = mine + x_period - k % PART * STEP_NBYTES;
                asm volatile("mov.u32 %0, %0;" : "+r"(limit[k])); // keep it in a register
            }
            const auto scale = group_type::scale_of(p.m[c.matrix].power);
            const int  begin = c.begin, end = c.end, end_of_outliers = c.end_of_outliers, whole = c.whole,
                      steps         = c.steps;
            uint32_t   at           = mine + c.base * 2;
            const auto scatter_part = [&](const group_type & group, auto all, auto part) {
                uint32_t words[(PART + 1) / 2];
                group.template scaled<decltype(part)::value>(words, scale);
                at = group.template walk<decltype(part)::value>(at, p.weight, [&](auto entry, uint32_t x_slot) {
                    constexpr int  k     = decltype(entry)::value % PART;
                    const uint32_t value = k % 2 ? words[k / 2] >> 16 : words[k / 2];
                    if (BANK_ORDER) {
                        reduce_once(x_slot, limit[k], x_period);
                    }
                    if (decltype(all)::value || (value & 0xffff)) {
                        store_half<k * STEP_NBYTES>(x_slot, value);
                    }
                });
                at += PART * STEP_NBYTES;
                if (BANK_ORDER) {
                    reduce_once(at, limit[PART], x_period);
                }
            };
            const auto scatter = [&](const group_type & group, auto all) {
                scatter_part(group, all, std::integral_constant<int, 0>());
                if constexpr (group_type::PARTS == 2) {
                    scatter_part(group, all, std::integral_constant<int, 1>());
                }
            };
            int  step = 0;
            bool more;
            do {
                group_type have[DEPTH];
#pragma unroll
                for (int d = 0; d < DEPTH; d++) {
                    have[d] = now[d];
                }
                more = step + DEPTH < steps;
                if (!more) {
                    c     = begin_row(ahead);
                    ahead = fetch(turn + 2);
                }
                load(c, more ? step + DEPTH : 0);
#pragma unroll
                for (int d = 0; d < DEPTH; d++) {
                    if (step + d < whole) {
                        if (step + d >= begin) {
                            scatter(have[d], std::true_type());
                        }
                        // fillers after the last entry of the row would overwrite its first entries
                    } else if (step + d >= begin && step + d < end) {
                        scatter(have[d], std::false_type());
                    }
                }
                __syncwarp(); // another lane may have an outlier where a group has a zero
                if (step + DEPTH > end && step < end_of_outliers) {
#pragma unroll
                    for (int d = 0; d < DEPTH; d++) {
                        if (step + d >= end && step + d < end_of_outliers) {
                            have[d].for_each_outlier([&](int, uint32_t column, uint32_t value) {
                                if (value) {
                                    store_half<0>(mine + column * 2, group_type::half_of_outlier(value));
                                }
                            });
                        }
                    }
                }
                step += DEPTH;
            } while (more);
        }
        // A thread has 8 columns of row l / 4 of each 8 rows of W, and the same columns of rows l / 4 and l / 4 + 8 of
        // each 16 columns of x. The order of columns within a product does not matter.
        const int  l = threadIdx.x % 32, last = p.cols / 32 - 1;
        uint4      a[X_AHEAD][2 * SETS];
        const auto request = [&](uint4 * to, int k) {
#pragma unroll
            for (int i = 0; i < 2 * SETS; i++) {
                to[i] = q.x16[min(k, last) * (SETS * 64) + i * 32 + l];
            }
        };
#pragma unroll
        for (int i = 0; i < X_AHEAD; i++) {
            request(a[i], warp + i * q.shares);
        }
        __syncthreads();
        float sum[BLOCKS][SETS][4] = {};
        if (warp < q.shares) {
            const uint32_t rows_at = shared_address(tile) + l / 4 * q.pitch + l % 4 * 16;
#pragma unroll X_AHEAD
            for (int k = warp; k <= last; k += q.shares) {
                uint4 x[2 * SETS];
#pragma unroll
                for (int i = 0; i < X_AHEAD * 2 * SETS; i++) {
                    (i < 2 * SETS ? x[i] : a[i / (2 * SETS) - 1][i % (2 * SETS)]) = a[i / (2 * SETS)][i % (2 * SETS)];
                }
                request(a[X_AHEAD - 1], k + X_AHEAD * q.shares);
#pragma unroll
                for (int r = 0; r < BLOCKS; r++) {
                    const uint4 b = take_words(rows_at + r * 8 * q.pitch + k * 64);
#pragma unroll
                    for (int s = 0; s < SETS; s++) {
                        const uint32_t lower[4] = { x[2 * s].x, x[2 * s].y, x[2 * s].z, x[2 * s].w },
                                       upper[4] = { x[2 * s + 1].x, x[2 * s + 1].y, x[2 * s + 1].z, x[2 * s + 1].w };
                        multiply_add<value16<T>>(sum[r][s], lower, b.x, b.y);
                        multiply_add<value16<T>>(sum[r][s], upper, b.z, b.w);
                    }
                }
            }
        }
        if (q.sums_in_tile) {
            __syncthreads();
        }
        if (warp < q.shares) {
#pragma unroll
            for (int i = 0; i < SUMS; i++) {
                sums[(warp * SUMS + i) * 32 + l] = sum[i / (4 * SETS)][i / 4 % SETS][i % 4];
            }
        }
        __syncthreads();
        const auto sum_of = [&](int row, int column) {
            const float * s = sums + ((row / 8 * SETS + column / 16) * 4 + column % 16 / 8 * 2 + row % 2) * 32 +
                              column % 8 * 4 + row % 8 / 2;
            float y = 0.0f;
#pragma unroll 4
            for (int w = 0; w < q.shares; w++) {
                y += s[w * SUMS * 32];
            }
            return y;
        };
        for (int i = threadIdx.x; i < TILE * p.n_columns; i += WARPS * 32) {
            const int         row = i % TILE, column = i / TILE;
            const sparse_task task = task_of(t, row);
            if (task.valid && !(p.silu_mul && task.matrix)) {
                store_result<true>(p, task, column, sum_of(p.silu_mul ? row + TILE / 2 : row, column),
                                   p.silu_mul ? sum_of(row, column) : 0.0f);
            }
        }
        if (q.sums_in_tile) {
            __syncthreads();
            for (int i = threadIdx.x; i < q.shares * SUMS * 32; i += WARPS * 32) {
                sums[i] = 0;
            }
            __syncthreads();
        }
    }
}

// ---- launch ----

// Bytes of a row of a tile, for all positions of the layout: a multiple of 128 plus 64, so that rows that are read
// together are in different banks.
inline int64_t tile_pitch(int modulus) { return (modulus * 2 + 2 + 63) / 128 * 128 + 64; }
// Bytes of the partial sums of a warp.
constexpr int64_t sums_nbytes(int blocks, int sets) { return blocks * sets * 4 * 32 * 4; }

constexpr int MAX_TILE_BLOCKS = 3;
// The maximum number of blocks of 8 rows that fit shared memory together with the sums of 8 warps for 32 columns. A
// single block may use all of the memory; its sums then replace the rows.
inline int max_tile_blocks(int modulus, int shared_nbytes) {
    int blocks = MAX_TILE_BLOCKS;
    while (blocks > 1 && blocks * 8 * tile_pitch(modulus) + 8 * sums_nbytes(blocks, 2) > shared_nbytes) {
        blocks--;
    }
    return 8 * tile_pitch(modulus) <= shared_nbytes ? blocks : 0;
}
// The number of blocks with which all multiprocessors finish first.
inline int best_tile_blocks(const row_split_launch & p, const cuda_device_info & device) {
    constexpr int MULTIPLICATION = 12; // of a tile: about the time to make 12 rows dense
    int           rows = 0, best = 0, least = 0;
    for (int i = 0; i < p.n_matrices; i++) {
        rows += p.m[i].n_rows;
    }
    for (int blocks = max_tile_blocks(p.modulus, device.shared_nbytes); blocks > 0; blocks--) {
        const int tiles = (rows + 8 * blocks - 1) / (8 * blocks),
                  turns = (tiles + device.multiprocessors - 1) / device.multiprocessors,
                  cost  = turns * (8 * blocks + MULTIPLICATION);
        if (!best || cost < least) {
            best  = blocks;
            least = cost;
        }
    }
    return best;
}

// Matrices with deltas of 6 bits have few entries: rows that suit 32 lanes are too wide for tiles.
constexpr bool tiles_built(bool coded, int bits, int lanes) {
    const lanes_range built = coded ? exp_coded_built_lanes(GGML_MACKO_TYPE_F16, bits, bits < 6)
                                    : inline_delta_built_lanes(GGML_MACKO_TYPE_F16, bits, bits < 6);
    return built.has(lanes) && (bits < 6 || lanes < 32) && (bits != 3 || !coded);
}

template <typename T, int BITS, int LANES, int BLOCKS, int SETS>
cudaError_t launch_tiles_config(tiles_launch & q, const cuda_device_info & device, cudaStream_t stream) {
    // With few runs, some warps only multiply, and the others request more groups. 24 warps make rows dense fastest; 12
    // warps read x of 32 columns faster, because they have registers for it.
    constexpr int TILE             = 8 * BLOCKS,
                  WARPS            = BLOCKS == 3 && LANES == 32 && SETS == 1      ? 24
                                     : BLOCKS == 3 || (BLOCKS == 2 && LANES < 32) ? 12
                                                                                  : 16,
                  DEPTH            = (BLOCKS == 3 ? 72 / WARPS : 128 / std::max(LANES, 16)) / (is_exp_coded<T> ? 2 : 1);
    constexpr int64_t  SUMS_NBYTES = sums_nbytes(BLOCKS, SETS);
    row_split_launch & p           = q.p;
    const int          rows        = p.silu_mul ? TILE / 2 : TILE;
    p.n_warp_rows                  = 0;
    for (int i = 0; i < p.n_matrices; i++) {
        p.m[i].first_warp_rows = p.n_warp_rows;
        p.n_warp_rows += i == 0 || !p.silu_mul ? (p.m[i].n_rows + rows - 1) / rows : 0;
    }
    q.pitch              = static_cast<int32_t>(tile_pitch(p.modulus));
    const int64_t nbytes = TILE * q.pitch, room = (device.shared_nbytes - nbytes) / SUMS_NBYTES;
    q.sums_in_tile = room < 8 && nbytes >= WARPS * SUMS_NBYTES;
    q.shares       = static_cast<int32_t>(q.sums_in_tile ? WARPS : std::min<int64_t>(WARPS, room));
    const dim3 grid(static_cast<unsigned>(std::min(device.multiprocessors, p.n_warp_rows)));
    return launch_kernel(tiles_kernel<T, BITS, LANES, BLOCKS, SETS, WARPS, DEPTH>, q, grid, WARPS * 32,
                         nbytes + (q.sums_in_tile ? 0 : q.shares * SUMS_NBYTES), p.programmatic, stream);
}
template <typename T>
cudaError_t launch_tiles(tiles_launch & q, int delta_bits, int lanes, const cuda_device_info & device,
                         cudaStream_t stream) {
    const auto launch = [&](auto bits, auto runs) {
        constexpr int BITS = decltype(bits)::value, LANES = decltype(runs)::value;
        if constexpr (tiles_built(is_exp_coded<T>, BITS, LANES)) {
            set_weights<T>(q.p.weight, BITS, tile_step_nbytes(BITS));
            return with_constant<1, 2, 3>(best_tile_blocks(q.p, device), cudaErrorNotSupported, [&](auto n) {
                constexpr int BLOCKS = decltype(n)::value;
                return q.p.n_columns <= 16 ? launch_tiles_config<T, BITS, LANES, BLOCKS, 1>(q, device, stream)
                                           : launch_tiles_config<T, BITS, LANES, BLOCKS, 2>(q, device, stream);
            });
        } else {
            return cudaErrorNotSupported; // takes_tiles() returns false
        }
    };
    return with_constant<2, 3, 4, 6>(delta_bits, cudaErrorNotSupported, [&](auto bits) {
        return with_constant<8, 16, 32>(lanes, cudaErrorNotSupported, [&](auto runs) { return launch(bits, runs); });
    });
}

} // namespace macko::cuda
