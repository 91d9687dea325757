// Converts ggml's tensors and op parameters to the plain types of cuda/ops/ops.h. Only this file depends on the order
// of integers in op_params and on ggml's enum values.
#pragma once

#include "cuda/ops/ops.h"

#include "ggml-impl.h"

#include <optional>

namespace macko::cuda {

op_tensor operand(const ggml_tensor * t);

// An operand that may be absent: get() is null for a null tensor.
class optional_operand {
public:
    explicit optional_operand(const ggml_tensor * t) {
        if (t) {
            tensor_ = operand(t);
        }
    }
    const op_tensor * get() const { return tensor_ ? &*tensor_ : nullptr; }

private:
    std::optional<op_tensor> tensor_;
};

// Empty for an op without a kernel.
std::optional<binary_op>    binary_op_of(const ggml_tensor * node);
std::optional<unary_params> unary_params_of(const ggml_tensor * node); // UNARY, and ops such as SQR with one source
std::optional<glu_params>   glu_params_of(const ggml_tensor * node);
std::optional<pool_params>  pool_params_of(const ggml_tensor * node);

// SET: a copy of src[0], or src[0] itself, in which src[1] replaces `part`.
struct set_params {
    op_tensor part;   // data: the start of the result
    int64_t   offset; // of the part, in bytes
    bool      in_place;
};
set_params set_params_of(const ggml_tensor * node);

rope_params rope_params_of(const ggml_tensor * node);

// Whether a MUL_MAT multiplies by a Hadamard matrix, as marked by llama.cpp, with operands that the kernel accepts.
bool is_hadamard_product(const ggml_tensor * node);

// Parameters that point to other operands also own these.
class attention_operands {
public:
    explicit attention_operands(const ggml_tensor * node);
    attention_operands(const attention_operands &)             = delete;
    attention_operands & operator=(const attention_operands &) = delete;

    const attention_params & params() const { return params_; }

private:
    optional_operand mask_, sinks_;
    attention_params params_ = {};
};

// dst = (x + add) / rms(x + add) * scale, with the sum stored to `sum`; add and scale may be null
class rms_norm_operands {
public:
    explicit rms_norm_operands(const ggml_tensor * norm) : rms_norm_operands(norm, norm, nullptr, nullptr) {}
    // mul: the node that multiplies by scale (dst is its result), or norm; add: the node before norm, or null
    rms_norm_operands(const ggml_tensor * norm, const ggml_tensor * mul, const ggml_tensor * scale,
                      const ggml_tensor * add);
    rms_norm_operands(const rms_norm_operands &)             = delete;
    rms_norm_operands & operator=(const rms_norm_operands &) = delete;

    const rms_norm_params & params() const { return params_; }

private:
    optional_operand scale_, add_, sum_;
    rms_norm_params  params_ = {};
};

} // namespace macko::cuda
