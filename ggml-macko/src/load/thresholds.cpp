#include "load/thresholds.h"
#include "codec/quantized/quantized.h"
#include "load/activation-keys.h"

#include <unordered_map>

namespace macko {

int set_thresholds(model_file * file, const char ** none) {
    const gguf_header & header = file->header; // passed check_activation_keys(), so no read below can fail
    if (!has_activation_keys(header)) {
        *none = header.find("macko.act.version") ? "its thresholds have a later version: upgrade"
                                                 : "the file has no thresholds";
        return GGML_MACKO_STATUS_OK;
    }
    std::string score;
    header.get_string(*header.find("macko.act.kind"), 0, &score);
    if (score == "cats") {
        *none = "its thresholds are for the gate (score cats), for which there is no kernel";
        return GGML_MACKO_STATUS_OK;
    }
    std::unordered_map<std::string, sparse_tensor_info *> matrices; // nullptr: dense
    for (const gguf_tensor & t : dense_tensors(*file)) {
        if (t.n_dims == 2) {
            matrices.emplace(t.name, nullptr);
        }
    }
    for (sparse_tensor_info & m : file->sparse) {
        if (m.n_dims == 2) {
            matrices[m.name] = &m;
        }
    }
    std::vector<std::string> names;
    header.get_strings(*header.find("macko.act.part.down"), &names);
    *none = "no weight with a threshold is sparse with values that are not quantized";
    for (size_t i = 0; i < names.size(); i++) {
        const auto it = matrices.find(names[i]);
        if (it == matrices.end()) {
            return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE,
                        "key macko.act.part.down: element %zu is '%s' (a matrix of the model)", i,
                        printable(names[i].c_str(), names[i].size()).text);
        }
        double threshold = 0;
        header.get_float(*header.find("macko.act.part.threshold"), i, &threshold);
        if (it->second && code_bits(it->second->value_type) == 0) { // quantized values have no columns
            it->second->threshold         = static_cast<float>(threshold);
            it->second->threshold_of_norm = score == "wina";
            *none                         = nullptr;
        }
    }
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
