// Compares the numbers of unary and GLU operations, and the places of parameters in nodes, with those of the running
// library.
#pragma once

namespace macko {

// The first difference, such as "the parameters of ROPE"; null if there is none. Makes nodes with the running ggml, so
// call it after first_different_member().
const char * first_different_parameter();

} // namespace macko
