// The plan for the layout of a sparse matrix on a GPU: decisions from the header, results of a survey of the values,
// and reasons. Printable. Plain C++.
#pragma once

#include "gpu-layout/layouts.h"

#include <array>
#include <string>
#include <vector>

namespace macko::cuda {

struct layout_candidate {
    layout_shape shape;
    int64_t      nbytes; // of its memory: nbytes of the plan, or more
    size_t       survey; // index in layout_survey
    std::string  reason; // the reason for its position in the list
};

// The decisions that need only the header of a matrix. The first candidate that settle() (choose.h) accepts becomes
// the layout.
struct gpu_plan {
    gpu_matrix                    matrix;
    gpu_device                    device;
    int64_t                       nbytes; // GPU memory to reserve
    bool                          forced; // the caller chose the layout: it may be larger than others
    std::vector<layout_candidate> candidates;
    std::vector<std::string>      left_out; // layouts that are not candidates, with reasons
};

// Whether the matrix is uploaded as a whole, in its own format, and not as MACKO rows.
inline bool arrives_whole(const gpu_plan & plan) {
    return plan.matrix.in_blocks ||
           (!plan.candidates.empty() && std::holds_alternative<fragments_shape>(plan.candidates[0].shape));
}

// Steps of a survey of the values for one candidate, in this order: row-split layouts need EXPONENT, then GROUPS, then
// OVERSHOOT; ROW_BLOCKS and FRAGMENTS need NBYTES.
enum class survey_step { NOTHING, EXPONENT, GROUPS, OVERSHOOT, NBYTES };

struct shape_survey {
    survey_step done            = survey_step::NOTHING;
    int32_t     exponent        = 0;     // EXPONENT: the exponent with which groups hold the most values
    int64_t     n_held          = 0;     //           the number of these values
    int64_t     n_groups        = 0;     // GROUPS: all groups, with those of outliers
    int64_t     n_unused_groups = 0;     //         groups between the end of a row and the next line
    bool        impossible      = false; //     an outlier would lose bits, or a row has too many of them
    int32_t     overshoot       = 0;     // OVERSHOOT: words after x that a run reaches; INT32_MAX: more than x
    int64_t     nbytes          = 0;     // NBYTES: of ROW_BLOCKS' blocks, or of FRAGMENTS
    int32_t     most_words      = 0;     //         of a stream of FRAGMENTS
};
struct layout_survey {
    std::array<shape_survey, 5> of; // by layout_candidate::survey
};

// The result of settle() for a plan and the survey so far.
struct layout_verdict {
    survey_step  needs;     // next step for the candidate; NOTHING: it is the layout
    size_t       candidate; // in gpu_plan::candidates
    layout_shape shape;     // of the candidate, completed by the survey
    int64_t      nbytes;    // of memory; more than plan.nbytes: separate memory
    std::string  reason;    // for this candidate, and against those before it
};

// The numbers of a layout; 0: the layout has no such number.
struct shape_numbers {
    int32_t delta_bits = 0, lanes = 0;
    bool    banked = false;
};
shape_numbers numbers_of(const layout_shape & shape);
// For example "INLINE_DELTA: deltas of 3 bits, 16 lanes, in the order of banks"
std::string text_of(const layout_shape & shape);
// One line for each candidate and each layout that was left out.
std::string text_of(const gpu_plan & plan);

} // namespace macko::cuda
