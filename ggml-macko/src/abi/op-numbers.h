// Operations of the running ggml in our own numbers. The enumerators of ggml_op move from version to version; all code
// compares op_of(node) with those of the headers that this was compiled with, and never node->op.
#pragma once

#include "ggml.h"

#include <array>
#include <cstring>

namespace macko {

struct op_translation {
    std::array<ggml_op, 256>           ours;    // by the running ggml's number; GGML_OP_COUNT: an op that we do not use
    std::array<ggml_op, GGML_OP_COUNT> running; // by our number, of the ops that we use
};
extern op_translation op_numbers; // filled by resolve_ops()

// the running ggml's number of a node's op; any, in a graph that came over a network
inline size_t op_number(const ggml_tensor * node) {
    static_assert(sizeof(node->op) == sizeof(unsigned), "the enum of C");
    unsigned number;
    memcpy(&number, &node->op, sizeof(number));
    return number;
}

// the op of a node in our numbers; GGML_OP_COUNT: one that we do not use
inline ggml_op op_of(const ggml_tensor * node) {
    const size_t number = op_number(node);
    return number < op_numbers.ours.size() ? op_numbers.ours[number] : GGML_OP_COUNT;
}

// one of our numbers as the running ggml's, for functions that compare with node->op
inline ggml_op running_op(ggml_op op) { return op_numbers.running[static_cast<size_t>(op)]; }

// Finds by name every op that the devices use. Called before any graph; VERSION_MISMATCH if the running ggml has no op
// of that name. last: the running ggml's number of its last op.
[[nodiscard]] int resolve_ops(int last);

// The running ggml's number of its last op, which is GLU in every version: that of a node made by ggml itself. Names of
// greater numbers must not be asked for. VERSION_MISMATCH if it is not GLU.
[[nodiscard]] int find_last_op(int * last);

} // namespace macko
