// How a GPU is to keep a sparse matrix: what the header decides, what a survey of the values has to find out, and the
// reasons. Printable. Plain C++.
#pragma once

#include "gpu-layout/layouts.h"

#include <array>
#include <string>
#include <vector>

namespace macko::cuda {

struct layout_candidate {
    layout_shape shape;
    int64_t      nbytes; // of the memory that it is made in: those of the plan, or more
    size_t       survey; // its place in layout_survey
    std::string  reason; // why it stands where it stands
};

// The decisions that need only the header of a matrix. The first candidate that settle() (choose.h) accepts becomes
// the layout.
struct gpu_plan {
    gpu_matrix                    matrix;
    gpu_device                    device;
    int64_t                       nbytes; // of a GPU's memory to reserve
    bool                          forced; // the candidate was asked for: it need not be smaller than others
    std::vector<layout_candidate> candidates;
    std::vector<std::string>      left_out; // layouts that are no candidates, with reasons
};

// Whether the matrix is to come as a whole, in its own format, and not as MACKO rows.
inline bool arrives_whole(const gpu_plan & plan) {
    return plan.matrix.in_blocks ||
           (!plan.candidates.empty() && std::holds_alternative<quantized_shape>(plan.candidates[0].shape));
}

// What a survey of the values finds out about one candidate, in this order: row-split layouts need EXPONENT, then
// GROUPS, then OVERSHOOT; QUANTIZED needs OUTLIERS; ROW_BLOCKS need NBYTES.
enum class survey_step { NOTHING, EXPONENT, GROUPS, OVERSHOOT, OUTLIERS, NBYTES };

struct shape_survey {
    survey_step done            = survey_step::NOTHING;
    int32_t     exponent        = 0;     // EXPONENT: with which groups hold the most values
    int64_t     n_held          = 0;     //           those values
    int64_t     n_groups        = 0;     // GROUPS: all, with those of outliers
    int64_t     n_unused_groups = 0;     //         of those, the ones between the end of a row and the next line
    bool        impossible      = false; //     an outlier would lose bits, or a row has too many of them
    int32_t     overshoot       = 0;     // OVERSHOOT: words behind x that a run reaches; INT32_MAX: further than x
    int64_t     n_outliers      = 0;     // OUTLIERS
    int64_t     nbytes          = 0;     // NBYTES: of blocks
};
struct layout_survey {
    std::array<shape_survey, 5> of; // by layout_candidate::survey
};

// What settle() makes of a plan and what is known so far.
struct layout_verdict {
    survey_step  needs;     // of the candidate; NOTHING: the matrix gets it
    size_t       candidate; // in gpu_plan::candidates
    layout_shape shape;     // of the candidate, with what the survey found
    int64_t      nbytes;    // of memory; more than plan.nbytes: memory of its own beside what is reserved
    std::string  reason;    // why, and why the candidates in front of it were passed over
};

// the numbers that layouts have; 0: this one has none
struct shape_numbers {
    int32_t delta_bits = 0, lanes = 0;
    bool    banked = false;
};
shape_numbers numbers_of(const layout_shape & shape);
// such as "INLINE_DELTA: deltas of 3 bits, 16 lanes, in the order of banks"
std::string text_of(const layout_shape & shape);
// a line for each candidate and each layout that was left out
std::string text_of(const gpu_plan & plan);

} // namespace macko::cuda
