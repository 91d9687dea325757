#include "gpu-layout/plan.h"

namespace macko::cuda {

namespace {

struct describer {
    std::string operator()(const macko_shape &) const { return "the arrays of the file"; }
    std::string operator()(const row_split_shape & s) const {
        return "deltas of " + std::to_string(s.delta_bits) + " bits, " + std::to_string(s.lanes) + " lanes, " +
               (s.banked ? "in the order of banks" : "columns ascend");
    }
    std::string operator()(const fragments_shape & s) const {
        return "codes of " + std::to_string(s.code_bits) + " bits, windows of " + std::to_string(s.window) +
               " columns, tiles of " + std::to_string(s.tile_chunks * FRAGMENT_CHUNK);
    }
    std::string operator()(const row_blocks_shape &) const { return "the blocks of the file"; }
};

} // namespace

shape_numbers numbers_of(const layout_shape & shape) {
    return std::visit(
        [](const auto & s) -> shape_numbers {
            if constexpr (std::is_base_of_v<row_split_shape, std::decay_t<decltype(s)>>) {
                return { s.delta_bits, s.lanes, s.banked };
            }
            return {};
        },
        shape);
}

std::string text_of(const layout_shape & shape) {
    return std::string(layout_name(shape)) + ": " + std::visit(describer(), shape);
}

std::string text_of(const gpu_plan & plan) {
    std::string text = std::to_string(plan.nbytes) + " bytes\n";
    for (const layout_candidate & c : plan.candidates) {
        text += text_of(c.shape) + " (" + c.reason + ")\n";
    }
    for (const std::string & reason : plan.left_out) {
        text += "not " + reason + "\n";
    }
    return text;
}

} // namespace macko::cuda
