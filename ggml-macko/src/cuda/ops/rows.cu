// Rows of tables, copies and casts. A thread has one chunk: a value of a plain type, a block of a quantized source
// type, or an eighth of a block that it writes together with seven other threads. It reads the elements as floats and
// writes them in the other type.
#include "cuda/ops/common.cuh"

namespace macko::cuda {

namespace {

constexpr int THREADS = 256;

template <typename T, int N>
__device__ __forceinline__ void write_chunk(char * row, int64_t i, int64_t nb0, const float * x) {
    if constexpr (T::IS_PLAIN) {
        for (int k = 0; k < N; k++) {
            *reinterpret_cast<typename T::block *>(row + (i + k) * nb0) = T::from_float(x[k]);
        }
    } else {
        T::store(reinterpret_cast<typename T::block *>(row) + i / T::BLOCK, x, block_lanes());
    }
}

template <typename S, typename D> constexpr int chunk_size() { return D::IS_PLAIN ? S::BLOCK : D::BLOCK / 8; }

// The row of element e of a tensor; sets its index in the row.
__device__ __forceinline__ row_index row_of_element(const op_tensor & t, int64_t e, int64_t * i0) {
    const int64_t row = e <= INT32_MAX && t.ne[0] <= INT32_MAX
                            ? static_cast<uint32_t>(e) / static_cast<uint32_t>(t.ne[0])
                            : e / t.ne[0];
    *i0               = e - row * t.ne[0];
    return split_row(row, t.ne[1], t.ne[2]);
}
// The same with the address of the row.
__device__ __forceinline__ char * find_row(const op_tensor & t, int64_t e, int64_t * i0) {
    return row_of(t, row_of_element(t, e, i0));
}

template <typename S, typename D> __global__ void copy_kernel(op_tensor src, op_tensor dst, int64_t n) {
    wait_for_previous();
    constexpr int N = chunk_size<S, D>();
    const int64_t e = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    if (e >= n) {
        return;
    }
    int64_t      is, id;
    const char * s = find_row(src, e, &is);
    char *       d = find_row(dst, e, &id);
    float        x[N];
    read_chunk<S, N>(s, is, src.nb[0], x);
    write_chunk<D, N>(d, id, dst.nb[0], x);
}

// For equal types: moves whole elements of type U, or blocks of bytes (U: char), between tensors with any strides.
template <typename U> __global__ void move_kernel(op_tensor src, op_tensor dst, int64_t n, int64_t block) {
    wait_for_previous();
    const int64_t e = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * block;
    if (e >= n) {
        return;
    }
    int64_t      is, id;
    const char * s = find_row(src, e, &is);
    char *       d = find_row(dst, e, &id);
    s += is / block * src.nb[0];
    d += id / block * dst.nb[0];
    if constexpr (sizeof(U) > 1) {
        *reinterpret_cast<U *>(d) = *reinterpret_cast<const U *>(s);
    } else {
        for (int64_t k = 0; k < src.nb[0]; k++) {
            d[k] = s[k];
        }
    }
}

// The element of the thread, if there is one: a thread for each of the n elements of t.
__device__ __forceinline__ bool find_element(const op_tensor & t, int64_t n, row_index * row, int64_t * i0) {
    const int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (e >= n) {
        return false;
    }
    *row = row_of_element(t, e, i0);
    return true;
}

// dst has a, then b along dimension dim.
template <typename U> __global__ void concat_kernel(int dim, op_tensor a, op_tensor b, op_tensor dst, int64_t n) {
    wait_for_previous();
    row_index row;
    int64_t   i0;
    if (!find_element(dst, n, &row, &i0)) {
        return;
    }
    char *     d      = row_of(dst, row) + i0 * dst.nb[0];
    row_index  at     = row;
    int64_t &  i      = dim == 0 ? i0 : dim == 1 ? at.i1 : dim == 2 ? at.i2 : at.i3;
    const bool second = i >= a.ne[dim];
    i -= second ? a.ne[dim] : 0;
    const char * s            = second ? row_of(b, at) + i0 * b.nb[0] : row_of(a, at) + i0 * a.nb[0];
    *reinterpret_cast<U *>(d) = *reinterpret_cast<const U *>(s);
}

template <typename U> __global__ void repeat_kernel(op_tensor src, op_tensor dst, int64_t n) {
    wait_for_previous();
    row_index row;
    int64_t   i0;
    if (!find_element(dst, n, &row, &i0)) {
        return;
    }
    *reinterpret_cast<U *>(row_of(dst, row) + i0 * dst.nb[0]) =
        *reinterpret_cast<const U *>(broadcast_row(src, row) + i0 % src.ne[0] * src.nb[0]);
}

__global__ void convert_int_kernel(op_tensor src, op_tensor dst, int64_t n, bool to_int) {
    wait_for_previous();
    const int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (e >= n) {
        return;
    }
    int64_t      is, id;
    const char * s = find_row(src, e, &is);
    char *       d = find_row(dst, e, &id);
    s += is * src.nb[0];
    d += id * dst.nb[0];
    if (to_int) {
        *reinterpret_cast<int32_t *>(d) = static_cast<int32_t>(*reinterpret_cast<const float *>(s));
    } else {
        *reinterpret_cast<float *>(d) = static_cast<float>(*reinterpret_cast<const int32_t *>(s));
    }
}

// The row ids[i, j, k] of GET_ROWS.
__device__ __forceinline__ int64_t chosen_row(const op_tensor & src, const op_tensor & ids, const row_index & row) {
    const char * id = ids.data + row.i1 * ids.nb[0] + row.i2 * ids.nb[1] + row.i3 * ids.nb[2];
    return existing_row(*reinterpret_cast<const int32_t *>(id), src.ne[1]);
}

// dst[:, i, j, k] = src[:, ids[i, j, k], j, k]; dst is f32.
template <typename T> __global__ void get_rows_kernel(op_tensor src, op_tensor ids, op_tensor dst) {
    wait_for_previous();
    const row_index row = split_row(blockIdx.x, dst.ne[1], dst.ne[2]);
    const int64_t   id  = chosen_row(src, ids, row);
    const char *    s   = src.data + id * src.nb[1] + row.i2 * src.nb[2] + row.i3 * src.nb[3];
    float *         d   = reinterpret_cast<float *>(row_of(dst, row));
    constexpr int   N   = T::IS_PLAIN ? 1 : 8;
    for (int64_t i = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * N; i < dst.ne[0];
         i += static_cast<int64_t>(gridDim.y) * blockDim.x * N) {
        float x[N];
        read_chunk<T, N>(s, i, src.nb[0], x);
        for (int k = 0; k < N; k++) {
            d[i + k] = x[k];
        }
    }
}

__global__ void get_rows_i32_kernel(op_tensor src, op_tensor ids, op_tensor dst) {
    wait_for_previous();
    const row_index row = split_row(blockIdx.x, dst.ne[1], dst.ne[2]);
    const int64_t   id  = chosen_row(src, ids, row);
    const int32_t * s =
        reinterpret_cast<const int32_t *>(src.data + id * src.nb[1] + row.i2 * src.nb[2] + row.i3 * src.nb[3]);
    int32_t * d = reinterpret_cast<int32_t *>(row_of(dst, row));
    for (int64_t i = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; i < dst.ne[0];
         i += static_cast<int64_t>(gridDim.y) * blockDim.x) {
        d[i] = s[i];
    }
}

// dst[:, ids[i1], i2, i3] = src[:, i1, i2, i3], ids repeated over i2 and i3. One thread per chunk over all rows,
// because rows of one element are common (transposed V cache).
template <typename S, typename D, typename ID>
__global__ void set_rows_kernel(op_tensor src, op_tensor ids, op_tensor dst, int64_t n) {
    wait_for_previous();
    constexpr int N = chunk_size<S, D>();
    const int64_t e = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    if (e >= n) {
        return;
    }
    const int64_t   r   = e / src.ne[0];
    const int64_t   i0  = e - r * src.ne[0];
    const row_index row = split_row(r, src.ne[1], src.ne[2]);
    const char *    id_at =
        ids.data + row.i1 * ids.nb[0] + row.i2 % ids.ne[1] * ids.nb[1] + row.i3 % ids.ne[2] * ids.nb[2];
    const int64_t id = existing_row(*reinterpret_cast<const ID *>(id_at), dst.ne[1]);
    float         x[N];
    read_chunk<S, N>(row_of(src, row), i0, src.nb[0], x);
    write_chunk<D, N>(dst.data + id * dst.nb[1] + row.i2 * dst.nb[2] + row.i3 * dst.nb[3], i0, dst.nb[0], x);
}

unsigned blocks_for(int64_t n_chunks) { return static_cast<unsigned>((n_chunks + THREADS - 1) / THREADS); }

bool is_plain(tensor_type type) { return type == TYPE_F32 || type == TYPE_F16 || type == TYPE_BF16; }

// Calls f with an unsigned integer as large as an element, for types without blocks.
template <typename F> cudaError_t with_unsigned(tensor_type type, const F & f) {
    switch (type_block_nbytes(type)) {
        case 8:  return f(uint64_t());
        case 4:  return f(uint32_t());
        case 2:  return f(uint16_t());
        default: return cudaErrorInvalidValue;
    }
}
bool has_unsigned(tensor_type type) { return type == TYPE_I32 || type == TYPE_I64 || is_plain(type); }

constexpr int64_t MAX_ELEMENTS = int64_t(1) << 38; // of an op with a thread for each: fits a grid

} // namespace

bool op_copy_supported(const op_tensor & src, const op_tensor & dst) {
    if (src.n_elements() != dst.n_elements() || src.n_elements() > (int64_t(1) << 40) ||
        type_block_nbytes(src.type) == 0 || type_block_nbytes(dst.type) == 0) {
        return false;
    }
    // blocks are moved, written or read as a whole, so the rows of both tensors must consist of whole blocks
    const auto has_blocks_of = [&](tensor_type type) {
        return src.ne[0] % type_block_size(type) == 0 && dst.ne[0] % type_block_size(type) == 0;
    };
    if (src.type == dst.type || (dst.type == TYPE_F32 && type_is_weight(src.type))) {
        return has_blocks_of(src.type);
    }
    if (src.type == TYPE_F32 && type_can_store(dst.type)) {
        return has_blocks_of(dst.type);
    }
    return (src.type == TYPE_F32 && dst.type == TYPE_I32) || (src.type == TYPE_I32 && dst.type == TYPE_F32) ||
           (is_plain(src.type) && is_plain(dst.type));
}

cudaError_t op_copy(const op_context & ctx, const op_tensor & src, const op_tensor & dst) {
    const int64_t n = src.n_elements();
    if (src.type == dst.type && has_unsigned(src.type)) {
        return with_unsigned(src.type, [&](auto u) {
            return launch(ctx, move_kernel<decltype(u)>, blocks_for(n), THREADS, 0, src, dst, n, int64_t(1));
        });
    }
    if (src.type == dst.type) {
        const int64_t block = type_block_size(src.type);
        return launch(ctx, move_kernel<char>, blocks_for(n / block), THREADS, 0, src, dst, n, block);
    }
    if (src.type == TYPE_I32 || dst.type == TYPE_I32) {
        return launch(ctx, convert_int_kernel, blocks_for(n), THREADS, 0, src, dst, n, dst.type == TYPE_I32);
    }
    if (is_plain(src.type) && is_plain(dst.type)) {
        return with_type_of<TYPE_F32, TYPE_F16, TYPE_BF16>(src.type, [&](auto s) {
            return with_type_of<TYPE_F32, TYPE_F16, TYPE_BF16>(dst.type, [&](auto d) {
                return launch(ctx, copy_kernel<decltype(s), decltype(d)>, blocks_for(n), THREADS, 0, src, dst, n);
            });
        });
    }
    using f32 = value_type<TYPE_F32>;
    if (src.type == TYPE_F32) {
        return with_type(dst.type, [&](auto d) {
            if constexpr (decltype(d)::CAN_STORE) {
                return launch(ctx, copy_kernel<f32, decltype(d)>, blocks_for(n / chunk_size<f32, decltype(d)>()),
                              THREADS, 0, src, dst, n);
            } else {
                return cudaErrorInvalidValue;
            }
        });
    }
    return with_type(src.type, [&](auto s) {
        return launch(ctx, copy_kernel<decltype(s), f32>, blocks_for(n / decltype(s)::BLOCK), THREADS, 0, src, dst, n);
    });
}

bool op_concat_supported(int dim, const op_tensor & a, const op_tensor & b, const op_tensor & dst) {
    if (dim < 0 || dim > 3 || !has_unsigned(dst.type) || a.type != dst.type || b.type != dst.type ||
        dst.n_elements() > MAX_ELEMENTS) {
        return false;
    }
    for (int k = 0; k < 4; k++) {
        const bool fits = k == dim ? a.ne[k] + b.ne[k] == dst.ne[k] : a.ne[k] == dst.ne[k] && b.ne[k] == dst.ne[k];
        if (!fits) {
            return false;
        }
    }
    return true;
}

cudaError_t op_concat(const op_context & ctx, int dim, const op_tensor & a, const op_tensor & b,
                      const op_tensor & dst) {
    const int64_t n = dst.n_elements();
    return with_unsigned(dst.type, [&](auto u) {
        return launch(ctx, concat_kernel<decltype(u)>, blocks_for(n), THREADS, 0, dim, a, b, dst, n);
    });
}

bool op_repeat_supported(const op_tensor & src, const op_tensor & dst) {
    return has_unsigned(dst.type) && src.type == dst.type && can_repeat(src, dst) && dst.n_elements() <= MAX_ELEMENTS;
}

cudaError_t op_repeat(const op_context & ctx, const op_tensor & src, const op_tensor & dst) {
    const int64_t n = dst.n_elements();
    return with_unsigned(dst.type, [&](auto u) {
        return launch(ctx, repeat_kernel<decltype(u)>, blocks_for(n), THREADS, 0, src, dst, n);
    });
}

bool op_get_rows_supported(const op_tensor & src, const op_tensor & ids, const op_tensor & dst) {
    const bool ids_ok = ids.type == TYPE_I32 && ids.ne[3] == 1 && src.ne[2] == ids.ne[1] && src.ne[3] == ids.ne[2];
    const bool dst_ok = dst.ne[0] == src.ne[0] && dst.ne[1] == ids.ne[0] && dst.ne[2] == ids.ne[1] &&
                        dst.ne[3] == ids.ne[2] && is_contiguous_rows(dst) && fits_grid(dst.n_rows());
    const bool types_ok =
        src.type == TYPE_I32 ? dst.type == TYPE_I32 : dst.type == TYPE_F32 && type_is_weight(src.type);
    return ids_ok && dst_ok && types_ok && is_contiguous_rows(src);
}

cudaError_t op_get_rows(const op_context & ctx, const op_tensor & src, const op_tensor & ids, const op_tensor & dst) {
    const int  threads = row_threads(dst.ne[0], THREADS);
    const dim3 grid(static_cast<unsigned>(dst.n_rows()),
                    dst.n_rows() < 256 ? static_cast<unsigned>((dst.ne[0] + THREADS - 1) / THREADS) : 1u);
    if (src.type == TYPE_I32) {
        return launch(ctx, get_rows_i32_kernel, grid, threads, 0, src, ids, dst);
    }
    return with_type(
        src.type, [&](auto t) { return launch(ctx, get_rows_kernel<decltype(t)>, grid, threads, 0, src, ids, dst); });
}

bool op_set_rows_supported(const op_tensor & src, const op_tensor & ids, const op_tensor & dst) {
    const bool ids_ok  = (ids.type == TYPE_I64 || ids.type == TYPE_I32) && ids.ne[0] == src.ne[1] && ids.ne[3] == 1;
    const bool repeats = ids.ne[1] != 0 && ids.ne[2] != 0 && src.ne[2] % ids.ne[1] == 0 && src.ne[3] % ids.ne[2] == 0;
    const bool dst_ok  = src.ne[0] == dst.ne[0] && src.ne[2] == dst.ne[2] && src.ne[3] == dst.ne[3];
    if (!ids_ok || !repeats || !dst_ok || src.n_elements() > (int64_t(1) << 38)) {
        return false;
    }
    if (src.type == TYPE_F16 && dst.type == TYPE_F16) {
        return true;
    }
    return src.type == TYPE_F32 && type_can_store(dst.type) && src.ne[0] % type_block_size(dst.type) == 0;
}

cudaError_t op_set_rows(const op_context & ctx, const op_tensor & src, const op_tensor & ids, const op_tensor & dst) {
    const int64_t n = src.n_elements();
    return with_type(dst.type, [&](auto d) {
        using D = decltype(d);
        if constexpr (D::CAN_STORE) {
            const auto set = [&](auto from) {
                using S               = decltype(from);
                const unsigned blocks = blocks_for(n / chunk_size<S, D>());
                return ids.type == TYPE_I64
                           ? launch(ctx, set_rows_kernel<S, D, int64_t>, blocks, THREADS, 0, src, ids, dst, n)
                           : launch(ctx, set_rows_kernel<S, D, int32_t>, blocks, THREADS, 0, src, ids, dst, n);
            };
            if constexpr (D::IS_PLAIN) {
                if (src.type == TYPE_F16) {
                    return set(value_type<TYPE_F16>{});
                }
            }
            return set(value_type<TYPE_F32>{});
        } else {
            return cudaErrorInvalidValue;
        }
    });
}

} // namespace macko::cuda
