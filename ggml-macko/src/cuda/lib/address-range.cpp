#include "cuda/lib/address-range.h"

#include <algorithm>
#include <cudaTypedefs.h>

namespace macko::cuda {

namespace {

struct functions {
    bool complete = true;

    PFN_cuDeviceGet_v2000                    device_get           = find("cuDeviceGet", 2000);
    PFN_cuDeviceGetAttribute_v2000           device_get_attribute = find("cuDeviceGetAttribute", 2000);
    PFN_cuMemGetAllocationGranularity_v10020 get_granularity      = find("cuMemGetAllocationGranularity");
    PFN_cuMemAddressReserve_v10020           reserve              = find("cuMemAddressReserve");
    PFN_cuMemAddressFree_v10020              free                 = find("cuMemAddressFree");
    PFN_cuMemCreate_v10020                   create               = find("cuMemCreate");
    PFN_cuMemRelease_v10020                  release              = find("cuMemRelease");
    PFN_cuMemMap_v10020                      map                  = find("cuMemMap");
    PFN_cuMemUnmap_v10020                    unmap                = find("cuMemUnmap");
    PFN_cuMemSetAccess_v10020                set_access           = find("cuMemSetAccess");

private:
    struct any_function {
        void * f;
        template <typename F> operator F() const { return reinterpret_cast<F>(f); }
    };
    any_function find(const char * name, unsigned version = 10020) {
        void *                          f = nullptr;
        cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
        const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &f, version, cudaEnableDefault, &result);
#else // the runtime's own version of each function: these have had one only
        static_cast<void>(version);
        const cudaError_t error = cudaGetDriverEntryPoint(name, &f, cudaEnableDefault, &result);
#endif
        if (error != cudaSuccess) {
            cudaGetLastError();
        }
        complete = complete && error == cudaSuccess && result == cudaDriverEntryPointSuccess && f;
        return { f };
    }
};

const functions & driver() {
    static const functions f;
    return f;
}

// since version 10.1, the runtime's error numbers equal the driver's
cudaError_t error_of(CUresult result) { return static_cast<cudaError_t>(result); }

CUdeviceptr pointer_of(const char * at) { return reinterpret_cast<CUdeviceptr>(at); }

CUmemAllocationProp properties_of(int device) {
    CUmemAllocationProp p = {};
    p.type                = CU_MEM_ALLOCATION_TYPE_PINNED;
    p.location.type       = CU_MEM_LOCATION_TYPE_DEVICE;
    p.location.id         = device;
    return p;
}

} // namespace

bool address_range::is_supported(int device) {
    CUdevice handle    = 0;
    int      supported = 0;
    return driver().complete && driver().device_get(&handle, device) == CUDA_SUCCESS &&
           driver().device_get_attribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, handle) ==
               CUDA_SUCCESS &&
           supported;
}

cudaError_t address_range::reserve(int device, size_t nbytes, std::unique_ptr<address_range> * out) {
    constexpr size_t               MAX_NBYTES = size_t(1) << 47; // GPU addresses have 47 bits
    const CUmemAllocationProp      properties = properties_of(device);
    std::unique_ptr<address_range> made(new address_range);
    CUdeviceptr                    base = 0;
    if (const CUresult error =
            driver().get_granularity(&made->granule_, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM)) {
        return error_of(error);
    }
    if (nbytes == 0 || nbytes > MAX_NBYTES) {
        return cudaErrorMemoryAllocation;
    }
    const size_t n = (nbytes + made->granule_ - 1) / made->granule_;
    if (const CUresult error = driver().reserve(&base, n * made->granule_, 0, 0, 0)) {
        return error_of(error);
    }
    made->device_ = device;
    made->base_   = reinterpret_cast<char *>(base);
    made->nbytes_ = n * made->granule_;
    made->has_.resize(n);
    *out = std::move(made);
    return cudaSuccess;
}

address_range::~address_range() {
    for (const segment & p : mapped_) {
        driver().unmap(pointer_of(p.at), p.nbytes); // an error concerns the GPU; the next use of the GPU reports it
    }
    if (base_) {
        driver().free(pointer_of(base_), nbytes_);
    }
}

// Maps memory to granules [first, end), which have none.
cudaError_t address_range::map(size_t first, size_t end) {
    const CUmemAllocationProp    properties = properties_of(device_);
    const size_t                 nbytes     = (end - first) * granule_;
    const CUdeviceptr            at         = pointer_of(base_ + first * granule_);
    CUmemGenericAllocationHandle handle;
    mapped_.reserve(mapped_.size() + 1);
    if (const CUresult error = driver().create(&handle, nbytes, &properties, 0)) {
        return error_of(error);
    }
    CUresult       error    = driver().map(at, nbytes, 0, handle, 0);
    const CUresult released = driver().release(handle); // the mapping keeps the memory
    if (error != CUDA_SUCCESS) {
        return error_of(error);
    }
    CUmemAccessDesc access = {};
    access.location        = properties.location;
    access.flags           = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    error                  = released != CUDA_SUCCESS ? released : driver().set_access(at, nbytes, &access, 1);
    if (error != CUDA_SUCCESS) {
        driver().unmap(at, nbytes);
        return error_of(error);
    }
    std::fill(has_.begin() + static_cast<std::ptrdiff_t>(first), has_.begin() + static_cast<std::ptrdiff_t>(end), true);
    mapped_.push_back({ base_ + first * granule_, nbytes });
    return cudaSuccess;
}

cudaError_t address_range::commit(size_t offset, size_t n, std::vector<segment> * fresh) {
    const size_t end = (offset + n + granule_ - 1) / granule_;
    for (size_t first = offset / granule_; first < end; first++) {
        if (has_[first]) {
            continue;
        }
        size_t last = first + 1;
        while (last < end && !has_[last]) {
            last++;
        }
        if (const cudaError_t error = map(first, last)) {
            return error;
        }
        fresh->push_back(mapped_.back());
        first = last - 1;
    }
    return cudaSuccess;
}

size_t address_range::end_of_run(size_t offset, size_t end, bool * has) const {
    size_t i = offset / granule_;
    *has     = has_[i];
    do {
        i++;
    } while (i * granule_ < end && has_[i] == *has);
    return std::min(end, i * granule_);
}

} // namespace macko::cuda
