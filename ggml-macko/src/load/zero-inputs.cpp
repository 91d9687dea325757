#include "load/zero-inputs.h"
#include "gguf/names.h"

#include <algorithm>

namespace macko {

// architectures whose graphs in llama.cpp use LLM_FFN_RELU or LLM_FFN_RELU_SQR
static constexpr std::string_view ARCHITECTURES[] = { "arcee",          "jais2", "nemotron",    "nemotron_h",
                                                      "nemotron_h_moe", "plm",   "smallthinker" };
static constexpr std::string_view WEIGHTS[] = { ".ffn_down.weight", ".ffn_down_exps.weight", ".ffn_down_shexp.weight" };

bool has_zero_inputs(std::string_view arch, std::string_view tensor_name) {
    return std::find(std::begin(ARCHITECTURES), std::end(ARCHITECTURES), arch) != std::end(ARCHITECTURES) &&
           std::any_of(std::begin(WEIGHTS), std::end(WEIGHTS),
                       [&](std::string_view end) { return ends_with(tensor_name, end); });
}

} // namespace macko
