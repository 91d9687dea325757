// Sizes of the tensor types, and tests of memory layouts for the *_supported predicates.
#include "cuda/ops/types.cuh"

namespace macko::cuda {

namespace {

template <typename T> cudaError_t size_of(T, int64_t * elements, int64_t * nbytes) {
    *elements = T::BLOCK;
    *nbytes   = sizeof(typename T::block);
    return cudaSuccess;
}

} // namespace

int64_t type_block_size(tensor_type type) {
    int64_t elements = 1, nbytes = 0;
    return with_type(type, [&](auto t) { return size_of(t, &elements, &nbytes); }) == cudaSuccess ? elements : 1;
}

int64_t type_block_nbytes(tensor_type type) {
    int64_t elements = 0, nbytes = 0;
    if (with_type(type, [&](auto t) { return size_of(t, &elements, &nbytes); }) == cudaSuccess) {
        return nbytes;
    }
    return type == TYPE_I64 ? 8 : type == TYPE_I32 ? 4 : 0;
}

bool type_is_weight(tensor_type type) {
    return with_type(type, [](auto) { return cudaSuccess; }) == cudaSuccess;
}

bool type_can_store(tensor_type type) {
    return with_type(type, [](auto t) { return decltype(t)::CAN_STORE ? cudaSuccess : cudaErrorInvalidValue; }) ==
           cudaSuccess;
}

bool is_contiguous(const op_tensor & t) {
    int64_t       expected = type_block_nbytes(t.type);
    const int64_t block    = type_block_size(t.type);
    for (int k = 0; k < 4; k++) {
        if (t.ne[k] != (k == 0 ? block : 1) && t.nb[k] != expected) { // a stride that is never used does not matter
            return false;
        }
        expected *= k == 0 ? t.ne[0] / block : t.ne[k];
    }
    return true;
}

} // namespace macko::cuda
