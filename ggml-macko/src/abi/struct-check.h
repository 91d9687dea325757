// Compares the structs of ggml in our headers with those of the running library.
#pragma once

namespace macko {

// The first struct member that is not where our headers have it, such as "ggml_tensor.data"; null: all are. Calls only
// functions of libggml-base that every version has, on objects whose words are all functions that may be called.
const char * first_different_member();

} // namespace macko
