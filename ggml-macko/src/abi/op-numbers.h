// Translates ops of the running ggml to the numbers in our headers. The enumerators of ggml_op change between versions,
// so all code compares op_of(node), never node->op, with the enumerators that this library was compiled with.
#pragma once

#include "ggml.h"

#include <array>
#include <cstring>

namespace macko {

struct op_translation {
    std::array<ggml_op, 256>           ours;    // by the running ggml's number; GGML_OP_COUNT: an op that we do not use
    std::array<ggml_op, GGML_OP_COUNT> running; // by our number, for the ops that we use
};
extern op_translation op_numbers; // filled by resolve_ops()

// The running ggml's number of a node's op. In a graph from a network it can be any number.
inline size_t op_number(const ggml_tensor * node) {
    static_assert(sizeof(node->op) == sizeof(unsigned), "the enum of C");
    unsigned number;
    memcpy(&number, &node->op, sizeof(number));
    return number;
}

// A node's op in our numbers; GGML_OP_COUNT for an op that we do not use.
inline ggml_op op_of(const ggml_tensor * node) {
    const size_t number = op_number(node);
    return number < op_numbers.ours.size() ? op_numbers.ours[number] : GGML_OP_COUNT;
}

// The running ggml's number for one of our ops, for functions that compare it with node->op.
inline ggml_op running_op(ggml_op op) { return op_numbers.running[static_cast<size_t>(op)]; }

// Finds every op that the devices use by its name. Call it before the first graph. VERSION_MISMATCH if the running ggml
// lacks an op that every version in the range has. last: the running ggml's number of its last op.
[[nodiscard]] int resolve_ops(int last);

// Gets the running ggml's number of its last op, which is GLU in every version, from a node that ggml itself makes. Do
// not ask ggml for names of greater numbers. VERSION_MISMATCH if the node is not GLU.
[[nodiscard]] int find_last_op(int * last);

} // namespace macko
