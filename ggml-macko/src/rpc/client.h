// Sparse weights on a server of llama.cpp's RPC backend that runs this plugin (docs/design/rpc.md). A buffer of that
// backend that llama.cpp allocates during a load of ours gets another init_tensor and set_tensor; the rest stays its
// own.
#pragma once

namespace macko {

// Lets this plugin see the buffers that RPC devices allocate during loads. Called when a load has begun; once for each
// device that the process has by then.
void rpc_watch_devices();

} // namespace macko
