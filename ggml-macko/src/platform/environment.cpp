#include "platform/environment.h"
#include "platform/platform.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace macko::environment {

namespace {

constexpr char PREFIX[] = "GGML_MACKO_";

// The words of LOAD are in the order of enum ggml_macko_load_flags.
constexpr setting TABLE[] = {
    { LOAD, "compress", "encode the weights of dense F16, BF16 and F32 models that are full of zeros" },
    { LOAD, "keep-negative-zeros", "with `compress`: keep -0.0 like any other value instead of counting it as zero" },
    { LOAD, "sparse-only", "fail if a sparse weight is placed on a device of another backend, where it becomes dense" },
    { LOAD, "strict", "refuse sparse files of architectures whose metadata are checked in general only" },
    { LOAD, "cache", "keep weights on the CPU in a file as they are in memory, and map it the next time" },
    { LOAD, "act-thresholds", "one token at a time, the CPU counts activations below the file's thresholds as zero" },
    { DISABLE, "graphs", "GPU: launch each kernel by itself, without CUDA graphs" },
    { DISABLE, "fusion", "GPU: run each operation by itself" },
    { DISABLE, "overlap", "GPU: start a kernel only after the previous one has ended" },
    { DISABLE, "cublas", "GPU: multiply dense matrices without cuBLAS" },
    { DISABLE, "exp-coded", "GPU: keep no weights in the layout EXP_CODED, 10 bits for a value" },
    { DISABLE, "offload", "GPU: leave prompts to the CPU where weights are in host memory" },
    { DISABLE, "relu-skip", "compute what the zeros of a ReLU make unnecessary" },
    { DISABLE, "csc", "keep no copy of weights by columns, which `relu-skip` and `act-thresholds` read" },
    { ENABLE, "strict-versions", "refuse versions of ggml and llama-cpp-python that this version was not tested with" },
    { ENABLE, "rpc-server", "offer devices for llama.cpp's RPC server; `macko run` sets it" },
    { CPU_KERNELS, "portable", "kernels for any CPU" },
    { CPU_KERNELS, "avx2", "kernels for x86 with AVX2" },
    { CPU_KERNELS, "avx2-vnni", "kernels for x86 with AVX2 and AVX-VNNI" },
    { CPU_KERNELS, "avx512", "kernels for x86 with AVX-512" },
    { CPU_KERNELS, "avx512-vbmi2", "kernels for x86 with AVX-512 VBMI2" },
    { CPU_KERNELS, "neon", "kernels for arm64" },
    { CPU_KERNELS, "neon-dotprod", "kernels for arm64 with sdot" },
    { CPU_KERNELS, "neon-fhm", "kernels for arm64 with sdot and fmlal" },
    { "GGML_MACKO_PLUGIN", nullptr, "the plugin that the preloaded library opens; `macko run` sets it" },
    { "GGML_MACKO_CONVERT_HF", nullptr, "llama.cpp's convert_hf_to_gguf.py, for `macko convert`" },
};

bool is_same(const char * a, std::string_view b) { return b == a; }

bool is_known(std::string_view variable) {
    for (const setting & s : TABLE) {
        if (is_same(s.variable, variable)) {
            return true;
        }
    }
    return false;
}

// "a, b, c": the words of a variable, or the names of all variables.
std::string names(const char * variable) {
    std::string  text;
    const char * before = "";
    for (const setting & s : TABLE) {
        if (variable ? !strcmp(s.variable, variable) : strcmp(s.variable, before) != 0) {
            text += std::string(text.empty() ? "" : ", ") + (variable ? s.word : s.variable);
        }
        before = s.variable;
    }
    return text;
}

// Calls each(word) for the words of a value.
template <typename F> void for_each_word(const char * variable, F && each) {
    const std::string_view value = value_of(variable);
    for (size_t at = 0, end; at <= value.size() && !value.empty(); at = end + 1) {
        end = std::min(value.find(',', at), value.size());
        each(value.substr(at, end - at));
    }
}

// Index of a word in its variable's list, or -1.
int index_of(const char * variable, std::string_view word) {
    int i = 0;
    for (const setting & s : TABLE) {
        if (!strcmp(s.variable, variable)) {
            if (!s.word || is_same(s.word, word)) {
                return i;
            }
            i++;
        }
    }
    return -1;
}

} // namespace

const setting * setting_at(size_t i) { return i < sizeof(TABLE) / sizeof(TABLE[0]) ? &TABLE[i] : nullptr; }

std::string find_error(const char * variable) {
    std::string error;
    int         n = 0;
    for_each_word(variable, [&](std::string_view word) {
        n++;
        if (error.empty() && index_of(variable, word) < 0) {
            error = std::string(variable) + "=" + value_of(variable) + ": unknown word '" + std::string(word) +
                    "'; allowed: " + names(variable);
        }
    });
    if (error.empty() && n > 1 && !strcmp(variable, CPU_KERNELS)) {
        error = std::string(variable) + "=" + value_of(variable) + ": only one word; allowed: " + names(variable);
    }
    return error;
}

std::string find_error() {
    for (char ** entry = platform::environment_entries(); entry && *entry; entry++) {
        const std::string_view variable = std::string_view(*entry).substr(0, strcspn(*entry, "="));
        if (variable.substr(0, sizeof(PREFIX) - 1) == PREFIX && !is_known(variable)) {
            return std::string(variable) + ": unknown environment variable; ggml-macko reads " + names(nullptr);
        }
    }
    for (const setting & s : TABLE) {
        const std::string error = s.word ? find_error(s.variable) : "";
        if (!error.empty()) {
            return error;
        }
    }
    return "";
}

const char * value_of(const char * variable) {
    const char * value = getenv(variable);
    return value ? value : "";
}

uint32_t words_of(const char * variable) {
    uint32_t bits = 0;
    for_each_word(variable, [&](std::string_view word) {
        const int i = index_of(variable, word);
        bits |= i < 0 ? 0 : uint32_t(1) << i;
    });
    return bits;
}

bool has(const char * variable, const char * word) {
    return words_of(variable) >> static_cast<uint32_t>(index_of(variable, word)) & 1;
}

} // namespace macko::environment
