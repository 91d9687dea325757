// Compares the structs of ggml in our headers with those of the running library.
#pragma once

namespace macko {

// The first struct member whose offset differs from our headers, such as "ggml_tensor.data"; null if there is none.
// Calls only functions of libggml-base that every version has, on objects whose words are all callable functions.
const char * first_different_member();

} // namespace macko
