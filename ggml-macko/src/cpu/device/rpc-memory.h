// The memory of a buffer of the CPU device on a server of llama.cpp's RPC backend (rpc/buffer.h): reserved addresses,
// where the system allocates a page at its first write. Each weight has a mapping of its own.
#pragma once

#include "cpu/device/weight.h"
#include "rpc/buffer.h"

namespace macko::cpu {

// Returns nullptr and logs the reason if the addresses cannot be reserved.
std::unique_ptr<rpc_memory> rpc_memory_reserve(size_t nbytes);

// The CPU weight behind a weight made by rpc_memory_reserve()'s memory.
const weight & rpc_weight_of(const rpc_weight & weight);

} // namespace macko::cpu
