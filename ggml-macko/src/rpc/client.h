// Client side of sparse weights on a server of llama.cpp's RPC backend that runs this plugin (docs/design/rpc.md). When
// llama.cpp allocates a buffer of the RPC backend during a load of ours, this code replaces the buffer's init_tensor
// and set_tensor, and leaves its other functions in place.
#pragma once

namespace macko {

// Intercepts the buffers that RPC devices allocate during loads. Called at the start of each load; handles each device
// that the process has registered by then once.
void rpc_watch_devices();

} // namespace macko
