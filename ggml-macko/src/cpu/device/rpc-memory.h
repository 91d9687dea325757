// The memory of a buffer of the CPU device on a server of llama.cpp's RPC backend (rpc/buffer.h): addresses of the
// system, which gives memory to pages that are written. Weights have mappings of their own.
#pragma once

#include "cpu/device/weight.h"
#include "rpc/buffer.h"

namespace macko::cpu {

// nullptr, with the reason in the log, if the addresses cannot be reserved
std::unique_ptr<rpc_memory> rpc_memory_reserve(size_t nbytes);

// what rpc_memory_reserve()'s memory has made of a matrix
const weight & rpc_weight_of(const rpc_weight & weight);

} // namespace macko::cpu
