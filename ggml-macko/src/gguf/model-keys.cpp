// Checks the metadata and the tensor types that llama.cpp uses without a check of its own. It refuses values on which
// llama.cpp fails an assertion, divides by zero, throws an exception through its C API, or computes NaN. The rules
// match the llama.cpp in the llama-cpp-python that pyproject.toml names. For the architectures in ARCHS they list the
// keys that this version reads; all other keys are accepted, because llama.cpp ignores them. For every other
// architecture they list the keys that llama.cpp reads before it looks at the architecture; the remaining keys are not
// checked, as in a dense model. Tensor shapes are not checked here, because llama.cpp refuses wrong shapes with an
// error.
#include "gguf/model-keys.h"
#include "gguf/names.h"
#include "gguf/vocab-limits.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <string_view>

namespace macko {

// ---- architectures ----

enum arch_bit : uint32_t {
    ARCH_LLAMA    = 1,
    ARCH_MISTRAL3 = 2,
    ARCH_QWEN2    = 4,
    ARCH_QWEN3    = 8,
    ARCH_QWEN3MOE = 16,
    ARCH_GEMMA2   = 32,
    ARCH_GEMMA3   = 64,
    ARCH_PHI3     = 128,
    ARCH_GPT_OSS  = 256,
    ARCH_RULED    = 511,
    ARCH_OTHER    = 512, // every architecture that has no row in ARCHS
    ARCH_ALL      = 1023,
};

enum experts_rule { EXPERTS_NONE, EXPERTS_OPTIONAL, EXPERTS_REQUIRED };
enum window_rule { WINDOW_UNUSED, WINDOW_OPTIONAL, WINDOW_ALWAYS };

struct arch_rules {
    const char * name;
    arch_bit     bit;
    experts_rule experts;
    // Sliding-window attention. With WINDOW_ALWAYS the KV cache asserts that at least one layer has a window.
    window_rule window;
    bool        rope_is_head;   // the graph asserts that RoPE covers whole heads
    bool        heads_are_embd; // the query matrix has embedding_length rows, whatever the head size is
};

static const arch_rules ARCHS[] = {
    { "llama", ARCH_LLAMA, EXPERTS_OPTIONAL, WINDOW_UNUSED, true, false },
    { "mistral3", ARCH_MISTRAL3, EXPERTS_OPTIONAL, WINDOW_UNUSED, true, false },
    { "qwen2", ARCH_QWEN2, EXPERTS_NONE, WINDOW_UNUSED, true, true },
    { "qwen3", ARCH_QWEN3, EXPERTS_NONE, WINDOW_UNUSED, true, false },
    { "qwen3moe", ARCH_QWEN3MOE, EXPERTS_REQUIRED, WINDOW_UNUSED, true, false },
    { "gemma2", ARCH_GEMMA2, EXPERTS_NONE, WINDOW_ALWAYS, false, false },
    { "gemma3", ARCH_GEMMA3, EXPERTS_NONE, WINDOW_OPTIONAL, false, false },
    { "phi3", ARCH_PHI3, EXPERTS_NONE, WINDOW_UNUSED, false, true },
    { "gpt-oss", ARCH_GPT_OSS, EXPERTS_REQUIRED, WINDOW_ALWAYS, true, false },
};

// ---- the table ----

constexpr uint32_t REQUIRED = 1u << 30; // flags in the same number as the bits of the architectures
// May also be an array of block_count elements, which are equal if the architecture has a row in ARCHS.
constexpr uint32_t PER_LAYER = 1u << 29;

constexpr double MAX_LAYERS  = 512; // the size of llama.cpp's arrays
constexpr double MAX_EXPERTS = 1024;
// Per token. Each needs two nodes of the graph, for which llama.cpp reserves 8 nodes per tensor.
constexpr double MAX_EXPERTS_USED = 16;
constexpr double MAX_U32          = 4294967295.0;
constexpr double MAX_WIDTH        = 1 << 20;
constexpr double MAX_HEAD         = 1 << 14;

struct bounds {
    double min, max; // both included; NaN is always refused
};
constexpr bounds NOT_READ = { 1, 0 };

struct key_rule {
    const char * name; // "%" stands for the name of the architecture
    gguf_type    type;
    bounds       number;
    uint32_t     flags;
    // Other bounds for the architectures without a row in ARCHS, which need not have the key. The value may be 0 where
    // an architecture lacks the feature; for example, a state-space model has no heads.
    bounds other = NOT_READ;
};

// clang-format off: the rules are aligned as a table
static const key_rule RULES[] = {
    { "general.name",                           GGUF_STRING, { 0, 0 }, ARCH_ALL },
    { "general.type",                           GGUF_STRING, { 0, 0 }, ARCH_ALL },
    { "general.file_type",                      GGUF_U32,    { 0, MAX_U32 }, ARCH_ALL },
    { "general.quantization_version",           GGUF_U32,    { 0, MAX_U32 }, ARCH_ALL },
    { "split.no",                               GGUF_U16,    { 0, 0 }, ARCH_ALL },
    { "split.count",                            GGUF_U16,    { 0, 65535 }, ARCH_ALL },
    { "split.tensors.count",                    GGUF_I32,    { 0, MAX_U32 }, ARCH_ALL },

    { "%.block_count",                          GGUF_U32,    { 1, MAX_LAYERS }, ARCH_ALL | REQUIRED },
    { "%.context_length",                       GGUF_U32,    { 1, 1 << 24 }, ARCH_ALL | REQUIRED },
    { "%.embedding_length",                     GGUF_U32,    { 1, MAX_WIDTH }, ARCH_ALL | REQUIRED },
    { "%.embedding_length_out",                 GGUF_U32,    { 0, 0 }, ARCH_RULED, { 0, MAX_WIDTH } },
    { "%.feed_forward_length",                  GGUF_U32,    { 1, 1 << 24 },
      (ARCH_RULED & ~(ARCH_QWEN3MOE | ARCH_GPT_OSS)) | REQUIRED | PER_LAYER, { 0, 1 << 24 } },
    { "%.feed_forward_length",                  GGUF_U32,    { 0, 1 << 24 }, ARCH_QWEN3MOE | ARCH_GPT_OSS | PER_LAYER },
    { "%.expert_feed_forward_length",           GGUF_U32,    { 1, 1 << 24 },
      ARCH_QWEN3MOE | PER_LAYER, { 0, 1 << 24 } },
    { "%.expert_feed_forward_length",           GGUF_U32,    { 1, 1 << 24 }, ARCH_GPT_OSS | REQUIRED | PER_LAYER },
    { "%.vocab_size",                           GGUF_U32,    { 1, 1 << 24 }, ARCH_ALL },
    { "%.nextn_predict_layers",                 GGUF_U32,    { 0, 0 }, ARCH_RULED, { 0, MAX_LAYERS } },
    { "%.expert_count",                         GGUF_U32,    { 0, MAX_EXPERTS }, ARCH_ALL },
    { "%.expert_used_count",                    GGUF_U32,    { 0, MAX_EXPERTS_USED }, ARCH_ALL | PER_LAYER },
    { "%.expert_group_count",                   GGUF_U32,    { 0, 0 }, ARCH_RULED, { 0, MAX_EXPERTS } },
    { "%.expert_group_used_count",              GGUF_U32,    { 0, 0 }, ARCH_RULED, { 0, MAX_EXPERTS } },
    // 0 none, 1 mean, 2 cls, 3 last; 4 rank is refused, because it needs a classifier
    { "%.pooling_type",                         GGUF_U32,    { 0, 3 }, ARCH_RULED, { 0, 4 } },
    { "%.classifier.pooling_type",              GGUF_U32,    { 0, 3 }, ARCH_RULED, { 0, 4 } },
    { "%.final_logit_softcapping",              GGUF_F32,    { 0, 1e6 }, ARCH_GEMMA2 | ARCH_GEMMA3 },
    { "%.attn_logit_softcapping",               GGUF_F32,    { 1e-3, 1e6 }, ARCH_GEMMA2 },

    { "%.attention.causal",                     GGUF_BOOL,   { 1, 1 }, ARCH_RULED, { 0, 1 } },
    { "%.attention.head_count",                 GGUF_U32,    { 1, 1 << 16 },
      ARCH_RULED | REQUIRED | PER_LAYER, { 0, 1 << 16 } },
    { "%.attention.head_count_kv",              GGUF_U32,    { 1, 1 << 16 }, ARCH_RULED | PER_LAYER, { 0, 1 << 16 } },
    { "%.attention.key_length",                 GGUF_U32,    { 2, MAX_HEAD }, ARCH_RULED, { 1, MAX_HEAD } },
    { "%.attention.value_length",               GGUF_U32,    { 2, MAX_HEAD }, ARCH_RULED, { 1, MAX_HEAD } },
    { "%.attention.key_length_swa",             GGUF_U32,    { 2, MAX_HEAD }, ARCH_RULED, { 1, MAX_HEAD } },
    { "%.attention.value_length_swa",           GGUF_U32,    { 2, MAX_HEAD }, ARCH_RULED, { 1, MAX_HEAD } },
    { "%.attention.layer_norm_epsilon",         GGUF_F32,    { 0, 1 }, ARCH_OTHER },
    { "%.attention.group_norm_epsilon",         GGUF_F32,    { 0, 1 }, ARCH_OTHER },
    { "%.attention.layer_norm_rms_epsilon",     GGUF_F32,    { 1e-30, 1 }, ARCH_RULED | REQUIRED, { 0, 1 } },
    { "%.attention.sliding_window",             GGUF_U32,    { 0, 1 << 24 }, ARCH_GEMMA3 | ARCH_PHI3 },
    { "%.attention.sliding_window",             GGUF_U32,    { 1, 1 << 24 }, ARCH_GEMMA2 },
    { "%.attention.sliding_window",             GGUF_U32,    { 1, 1 << 24 }, ARCH_GPT_OSS | REQUIRED },
    { "%.attention.temperature_scale",          GGUF_F32,    { -1e6, 1e6 }, ARCH_MISTRAL3 },

    { "%.rope.dimension_count",                 GGUF_U32,    { 2, MAX_HEAD }, ARCH_RULED, { 0, MAX_HEAD } },
    { "%.rope.dimension_count_swa",             GGUF_U32,    { 2, MAX_HEAD }, ARCH_RULED, { 0, MAX_HEAD } },
    { "%.rope.freq_base",                       GGUF_F32,    { 1, 1e18 }, ARCH_ALL },
    { "%.rope.freq_base_swa",                   GGUF_F32,    { 1, 1e18 },
      ARCH_GEMMA2 | ARCH_GEMMA3 | ARCH_GPT_OSS | ARCH_OTHER },
    { "%.rope.scale_linear",                    GGUF_F32,    { 1e-6, 1e6 }, ARCH_RULED, { 0, 1e6 } },
    { "%.rope.scaling.type",                    GGUF_STRING, { 0, 0 }, ARCH_ALL },
    { "%.rope.scaling.factor",                  GGUF_F32,    { 1e-6, 1e6 }, ARCH_RULED, { 0, 1e6 } },
    { "%.rope.scaling.alpha",                   GGUF_F32,    { -1e6, 1e6 }, ARCH_ALL },
    // The keys of the attention are multiplied by this factor and stored as F16, which must not overflow.
    { "%.rope.scaling.attn_factor",             GGUF_F32,    { 1e-2, 1e2 }, ARCH_ALL },
    { "%.rope.scaling.original_context_length", GGUF_U32,    { 1, 1 << 24 }, ARCH_ALL },
    { "%.rope.scaling.finetuned",               GGUF_BOOL,   { 0, 1 }, ARCH_ALL },
    { "%.rope.scaling.yarn_log_multiplier",     GGUF_F32,    { -1e6, 1e6 }, ARCH_MISTRAL3 },
    { "%.rope.scaling.yarn_beta_fast",          GGUF_F32,    { 1e-3, 1e6 }, ARCH_MISTRAL3 },
    { "%.rope.scaling.yarn_beta_slow",          GGUF_F32,    { 1e-3, 1e6 }, ARCH_MISTRAL3 },

    { "tokenizer.ggml.model",                   GGUF_STRING, { 0, 0 }, ARCH_ALL | REQUIRED },
    { "tokenizer.ggml.pre",                     GGUF_STRING, { 0, 0 }, ARCH_ALL },
    { "tokenizer.ggml.token_type_count",        GGUF_U32,    { 0, MAX_U32 }, ARCH_ALL },
    { "tokenizer.ggml.add_bos_token",           GGUF_BOOL,   { 0, 1 }, ARCH_ALL },
    { "tokenizer.ggml.add_eos_token",           GGUF_BOOL,   { 0, 1 }, ARCH_ALL },
    { "tokenizer.ggml.add_sep_token",           GGUF_BOOL,   { 0, 1 }, ARCH_ALL },
    { "tokenizer.ggml.add_space_prefix",        GGUF_BOOL,   { 0, 1 }, ARCH_ALL },
    { "tokenizer.ggml.remove_extra_whitespaces", GGUF_BOOL,   { 0, 1 }, ARCH_ALL },
    { "tokenizer.ggml.normalizer.lowercase",    GGUF_BOOL,   { 0, 1 }, ARCH_ALL },
    { "tokenizer.ggml.normalizer.strip_accents", GGUF_BOOL,   { 0, 1 }, ARCH_ALL },
    { "tokenizer.chat_template",                GGUF_STRING, { 0, 0 }, ARCH_ALL },
};
// clang-format on

static std::string with_arch(const char * name, const arch_rules & arch) {
    return name[0] == '%' ? std::string(arch.name) + (name + 1) : std::string(name);
}

static int wrong_type(const std::string & name) {
    return fail(GGML_MACKO_STATUS_BAD_KEY_TYPE, "key %s has a type that llama.cpp does not read", name.c_str());
}

static int missing(const std::string & name) {
    return fail(GGML_MACKO_STATUS_MISSING_KEY, "key %s is missing", name.c_str());
}

static int check_number(const gguf_header & header, const gguf_key & key, uint64_t i, const bounds & limit,
                        double * out) {
    int64_t integer = 0;
    if (header.get_int(key, i, &integer)) {
        *out = static_cast<double>(integer);
    } else if (!header.get_float(key, i, out)) {
        return wrong_type(key.name);
    }
    if (!(*out >= limit.min && *out <= limit.max)) { // written so that NaN is refused
        return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key %s is out of range (%g vs %g...%g)", key.name.c_str(), *out,
                    limit.min, limit.max);
    }
    return GGML_MACKO_STATUS_OK;
}

// Number of layers; 0 if the key is missing or has another type, which the rule of that key reports.
static uint64_t block_count(const gguf_header & header, const arch_rules & arch) {
    const gguf_key * key = header.find(with_arch("%.block_count", arch).c_str());
    int64_t          n   = 0;
    return key && key->type == GGUF_U32 && header.get_int(*key, 0, &n) ? static_cast<uint64_t>(n) : 0;
}

static int check_per_layer(const gguf_header & header, const gguf_key & key, const bounds & limit,
                           const arch_rules & arch) {
    if (key.element_type != GGUF_U32 && key.element_type != GGUF_I32) {
        return wrong_type(key.name);
    }
    const uint64_t n = block_count(header, arch);
    if (key.n != n || n == 0) {
        return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key %s has one element per layer (%" PRIu64 " vs %" PRIu64 ")",
                    key.name.c_str(), key.n, n);
    }
    double first = 0;
    for (uint64_t i = 0; i < n; i++) {
        double value = 0;
        TRY(check_number(header, key, i, limit, &value));
        if (i == 0) {
            first = value;
        }
        if (value != first && arch.bit != ARCH_OTHER) {
            // llama.cpp plans for the first layer and asserts that the others are equal
            return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key %s differs between layers (%g vs %g)", key.name.c_str(),
                        value, first);
        }
    }
    return GGML_MACKO_STATUS_OK;
}

static int check_rule(const gguf_header & header, const key_rule & rule, const arch_rules & arch) {
    const bool        is_other = !(rule.flags & arch.bit);
    const bounds &    limit    = is_other ? rule.other : rule.number;
    const std::string name     = with_arch(rule.name, arch);
    const gguf_key *  key      = header.find(name.c_str());
    if (key == nullptr) {
        return rule.flags & REQUIRED && !is_other ? missing(name) : GGML_MACKO_STATUS_OK;
    }
    if (key->type == GGUF_ARRAY && rule.flags & PER_LAYER) {
        return check_per_layer(header, *key, limit, arch);
    }
    if (key->type != rule.type) {
        return wrong_type(name);
    }
    double value = 0;
    return rule.type == GGUF_STRING ? GGML_MACKO_STATUS_OK : check_number(header, *key, 0, limit, &value);
}

// ---- relations between keys ----

namespace {

struct hparams {
    const gguf_header & header;
    const arch_rules &  arch;

    bool has(const char * name) const { return header.find(with_arch(name, arch).c_str()) != nullptr; }
    // The first element of a key, whose type the table has checked, or the default if the key is missing.
    int64_t get(const char * name, int64_t otherwise) const {
        const gguf_key * key   = header.find(with_arch(name, arch).c_str());
        int64_t          value = otherwise;
        return key && header.get_int(*key, 0, &value) ? value : otherwise;
    }
    // the greatest element of a key, or 0 if the key is missing
    int64_t max(const char * name) const {
        const gguf_key * key = header.find(with_arch(name, arch).c_str());
        int64_t          out = 0;
        for (uint64_t i = 0; key && i < key->n; i++) {
            int64_t value = 0;
            header.get_int(*key, i, &value);
            out = std::max(out, value);
        }
        return out;
    }
    int bad(const char * name, int64_t value, const char * rule, int64_t limit) const {
        return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key %s %s (%" PRId64 " vs %" PRId64 ")",
                    with_arch(name, arch).c_str(), rule, value, limit);
    }
};

} // namespace

// for an architecture with rules
static int check_heads(const hparams & hp) {
    const int64_t n_embd    = hp.get("%.embedding_length", 1);
    const int64_t n_head    = hp.get("%.attention.head_count", 1);
    const int64_t n_head_kv = hp.get("%.attention.head_count_kv", n_head);
    if (n_head % n_head_kv != 0) {
        return hp.bad("%.attention.head_count_kv", n_head_kv, "does not divide the number of heads", n_head);
    }
    if (n_embd % n_head != 0 && !(hp.has("%.attention.key_length") && hp.has("%.attention.value_length"))) {
        return hp.bad("%.attention.head_count", n_head, "does not divide embedding_length", n_embd);
    }
    const int64_t key   = hp.get("%.attention.key_length", n_embd / n_head);
    const int64_t value = hp.get("%.attention.value_length", n_embd / n_head);
    const int64_t rope  = hp.get("%.rope.dimension_count", key);
    if (key != value) {
        return hp.bad("%.attention.value_length", value, "differs from key_length", key);
    }
    if (hp.arch.heads_are_embd && key * n_head != n_embd) {
        return hp.bad("%.attention.key_length", key * n_head, "times head_count is not embedding_length", n_embd);
    }
    if (rope % 2 != 0 || rope < 2 || (hp.arch.rope_is_head ? rope != key : rope > key)) {
        return hp.bad("%.rope.dimension_count", rope, "is odd or does not fit the head size", key);
    }
    for (const char * name : { "%.attention.key_length_swa", "%.attention.value_length_swa" }) {
        if (hp.get(name, key) != key) {
            return hp.bad(name, hp.get(name, key), "differs from key_length", key);
        }
    }
    if (hp.get("%.rope.dimension_count_swa", rope) != rope) {
        return hp.bad("%.rope.dimension_count_swa", hp.get("%.rope.dimension_count_swa", rope),
                      "differs from dimension_count", rope);
    }
    return GGML_MACKO_STATUS_OK;
}

static int check_experts(const hparams & hp) {
    const int64_t n      = hp.get("%.expert_count", 0);
    const int64_t n_used = hp.max("%.expert_used_count");
    if (hp.arch.experts == EXPERTS_NONE && n != 0) {
        return hp.bad("%.expert_count", n, "in a model without experts", 0);
    }
    if (hp.arch.experts == EXPERTS_REQUIRED && n == 0) {
        return hp.bad("%.expert_count", n, "is too small", 1);
    }
    if (n_used > n || (n > 0 && n_used == 0)) {
        return hp.bad("%.expert_used_count", n_used, "does not fit expert_count", n);
    }
    const int64_t n_groups = hp.get("%.expert_group_count", 0);
    if (n_groups > 0 && n_groups >= n) {
        return hp.bad("%.expert_group_count", n_groups, "does not fit expert_count", n);
    }
    const int64_t n_groups_used = hp.get("%.expert_group_used_count", 0);
    if (n_groups > 1 && (n % n_groups != 0 || n_groups_used < 1 || n_groups_used >= n_groups)) {
        return hp.bad("%.expert_group_used_count", n_groups_used, "does not fit expert_group_count", n_groups);
    }
    return GGML_MACKO_STATUS_OK;
}

// for an architecture without rules
static int check_layers(const hparams & hp) {
    const int64_t n       = hp.get("%.block_count", 0);
    const int64_t n_nextn = hp.get("%.nextn_predict_layers", 0);
    return n_nextn <= n ? GGML_MACKO_STATUS_OK
                        : hp.bad("%.nextn_predict_layers", n_nextn, "does not fit block_count", n);
}

// For an architecture without rules: refuses a model with any NaN or infinite number, whether llama.cpp uses it or not.
static int check_all_numbers(const hparams & hp) {
    for (const gguf_key & key : hp.header.keys) {
        if (key.name.compare(0, 10, "tokenizer.") == 0 ||
            (key.element_type != GGUF_F32 && key.element_type != GGUF_F64)) {
            continue; // scores of tokens have a check of their own
        }
        for (uint64_t i = 0; i < key.n; i++) {
            double value = 0;
            if (hp.header.get_float(key, i, &value) && !std::isfinite(value)) {
                return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key %s is not finite", key.name.c_str());
            }
        }
    }
    return GGML_MACKO_STATUS_OK;
}

// Checks that at least one layer has a window according to %.attention.sliding_window_pattern. In its scalar form p,
// every p-th layer has none.
static int check_window(const hparams & hp) {
    const bool window = hp.arch.window == WINDOW_ALWAYS ||
                        (hp.arch.window == WINDOW_OPTIONAL && hp.get("%.attention.sliding_window", 0) > 0);
    const std::string name = with_arch("%.attention.sliding_window_pattern", hp.arch);
    const gguf_key *  key  = hp.header.find(name.c_str());
    if (!window) {
        return GGML_MACKO_STATUS_OK;
    }
    const int64_t n_layer  = hp.get("%.block_count", 0);
    int64_t       n_window = n_layer;
    if (key != nullptr && key->type == GGUF_ARRAY) {
        if (key->element_type != GGUF_BOOL && key->element_type != GGUF_U32 && key->element_type != GGUF_I32) {
            return wrong_type(name);
        }
        if (key->n != static_cast<uint64_t>(n_layer)) {
            return hp.bad("%.attention.sliding_window_pattern", static_cast<int64_t>(key->n),
                          "has one element per layer", n_layer);
        }
        n_window = 0;
        for (uint64_t i = 0; i < key->n; i++) {
            int64_t value = 0;
            if (!hp.header.get_int(*key, i, &value) || value < 0 || value > 1) {
                return hp.bad("%.attention.sliding_window_pattern", value, "has an element that is not", 1);
            }
            n_window += value;
        }
    } else if (key != nullptr) {
        int64_t pattern = 0;
        if (key->type != GGUF_U32 || !hp.header.get_int(*key, 0, &pattern)) {
            return wrong_type(name);
        }
        n_window = pattern == 1 ? 0 : n_layer;
    }
    return n_window > 0 ? GGML_MACKO_STATUS_OK
                        : hp.bad("%.attention.sliding_window_pattern", n_window, "leaves no layer with a window", 1);
}

static int check_rope_scaling(const hparams & hp) {
    const gguf_key * key = hp.header.find(with_arch("%.rope.scaling.type", hp.arch).c_str());
    std::string      type;
    if (key == nullptr || !hp.header.get_string(*key, 0, &type)) {
        return GGML_MACKO_STATUS_OK;
    }
    for (const char * known : { "none", "linear", "yarn", "longrope" }) {
        if (type == known) {
            return GGML_MACKO_STATUS_OK;
        }
    }
    return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key %s is unknown ('%s')", key->name.c_str(),
                printable(type.c_str(), type.size()).text);
}

static int check_labels(const hparams & hp) {
    const std::string name = with_arch("%.classifier.output_labels", hp.arch);
    const gguf_key *  key  = hp.header.find(name.c_str());
    return key && (key->type != GGUF_ARRAY || key->element_type != GGUF_STRING) ? wrong_type(name)
                                                                                : GGML_MACKO_STATUS_OK;
}

// ---- the vocabulary ----

enum { TOKEN_TYPE_UNKNOWN = 2, TOKEN_TYPE_USER_DEFINED = 4, TOKEN_TYPE_BYTE = 6, TOKEN_TYPE_MAX = 6 };

// Finds an array key; *out is null if the key is missing and not required. n_tokens: its length, or 0 for any.
static int find_array(const gguf_header & header, const char * name, bool required,
                      std::initializer_list<gguf_type> types, const gguf_key ** out, uint64_t n_tokens = 0) {
    *out = header.find(name);
    if (*out == nullptr) {
        return required ? missing(name) : GGML_MACKO_STATUS_OK;
    }
    if ((*out)->type != GGUF_ARRAY || std::find(types.begin(), types.end(), (*out)->element_type) == types.end()) {
        return wrong_type(name);
    }
    return n_tokens == 0 || (*out)->n == n_tokens
               ? static_cast<int>(GGML_MACKO_STATUS_OK)
               : fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key %s has one element per token (%" PRIu64 " vs %" PRIu64 ")",
                      name, (*out)->n, n_tokens);
}

static int bad_token(uint64_t i, const std::string & token, const char * what) {
    return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key tokenizer.ggml.tokens: token %" PRIu64 " '%s' %s", i,
                printable(token.c_str(), token.size()).text, what);
}

// llama.cpp cuts a token at its first NUL and gives an empty token a name of its own; then it asserts that no two
// tokens are equal.
static int check_tokens_differ(std::vector<std::string> tokens) {
    std::vector<size_t> order(tokens.size());
    for (size_t i = 0; i < tokens.size(); i++) {
        tokens[i].resize(strlen(tokens[i].c_str()));
        if (tokens[i].empty()) {
            tokens[i] = "[EMPTY_" + std::to_string(i) + "]";
        }
        order[i] = i;
    }
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return tokens[a] < tokens[b]; });
    for (size_t i = 1; i < order.size(); i++) {
        if (tokens[order[i]] == tokens[order[i - 1]]) {
            return bad_token(order[i], tokens[order[i]], "occurs twice");
        }
    }
    return GGML_MACKO_STATUS_OK;
}

static bool is_byte_token(const std::string & token) {
    return token.size() == 6 && token.compare(0, 3, "<0x") == 0 && isxdigit(static_cast<unsigned char>(token[3])) &&
           isxdigit(static_cast<unsigned char>(token[4])) && token[5] == '>';
}

static int check_token_types(const gguf_header & header, const std::vector<std::string> & tokens) {
    const gguf_key * key = nullptr;
    TRY(find_array(header, "tokenizer.ggml.token_type", false, { GGUF_I32 }, &key, tokens.size()));
    int64_t n_special = 0; // llama.cpp searches every text for each of them
    for (uint64_t i = 0; key && i < key->n; i++) {
        int64_t type = 0;
        if (!header.get_int(*key, i, &type) || type < 0 || type > TOKEN_TYPE_MAX) {
            return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE,
                        "key %s: type of token %" PRIu64 " is unknown (%" PRId64 " vs 0...%d)", key->name.c_str(), i,
                        type, TOKEN_TYPE_MAX);
        }
        if (type == TOKEN_TYPE_BYTE && !is_byte_token(tokens[i])) {
            return bad_token(i, tokens[i], "is a byte token, but not of the form <0xHH>");
        }
        n_special += type >= TOKEN_TYPE_UNKNOWN && type <= TOKEN_TYPE_USER_DEFINED;
    }
    if (n_special > MAX_SPECIAL_TOKENS) {
        return fail(GGML_MACKO_STATUS_LIMIT, "key %s: too many special tokens (%" PRId64 " vs %" PRId64 ")",
                    key->name.c_str(), n_special, MAX_SPECIAL_TOKENS);
    }
    return GGML_MACKO_STATUS_OK;
}

static int check_scores(const gguf_header & header, uint64_t n_tokens) {
    const gguf_key * key = nullptr;
    TRY(find_array(header, "tokenizer.ggml.scores", false, { GGUF_F32, GGUF_I32 }, &key, n_tokens));
    for (uint64_t i = 0; key && i < key->n; i++) {
        double score = 0; // the tokenizer keeps a heap ordered by score, and NaN has no order
        if (header.get_float(*key, i, &score) && !std::isfinite(score)) {
            return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key %s: score of token %" PRIu64 " is not finite",
                        key->name.c_str(), i);
        }
    }
    return GGML_MACKO_STATUS_OK;
}

// The SentencePiece tokenizer looks up each byte as <0xHH> or as one character with std::unordered_map::at: if both are
// missing, an exception passes through llama_tokenize.
static int check_byte_fallback(std::vector<std::string> tokens) {
    std::sort(tokens.begin(), tokens.end());
    for (int byte = 0; byte < 256; byte++) {
        char fallback[8];
        snprintf(fallback, sizeof(fallback), "<0x%02X>", static_cast<unsigned>(byte));
        const std::string single(1, static_cast<char>(byte));
        if (!std::binary_search(tokens.begin(), tokens.end(), fallback) &&
            (byte == 0 || !std::binary_search(tokens.begin(), tokens.end(), single))) {
            return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key tokenizer.ggml.tokens has no token for byte %d", byte);
        }
    }
    return GGML_MACKO_STATUS_OK;
}

namespace {

struct default_token {
    const char * name; // of tokenizer.ggml.NAME_token_id
    int64_t      id;   // -1: none
};

// A tokenizer of llama.cpp. The default tokens for missing keys must exist, because llama.cpp does not check them.
struct tokenizer_rules {
    const char *  model; // tokenizer.ggml.model
    bool          needs_merges;
    bool          needs_bytes; // the vocabulary needs a token for each byte
    default_token defaults[5];
};

} // namespace

// The first two rows are for the architectures with rules.
static const tokenizer_rules TOKENIZERS[] = {
    { "llama", false, true, { { "bos", 1 }, { "eos", 2 } } },
    { "gpt2", true, false, { { "bos", 11 }, { "eos", 11 } } },
    { "hybriddna", true, false, { { "bos", 11 }, { "eos", 11 } } },
    { "whitespace", true, false, { { "bos", 11 }, { "eos", 11 } } },
    { "gemma4", true, false, {} },
    { "bert",
      false,
      false,
      { { "bos", 101 }, { "unknown", 100 }, { "seperator", 102 }, { "padding", 0 }, { "mask", 103 } } },
    { "t5", false, false, { { "eos", 1 }, { "unknown", 2 }, { "padding", 0 } } },
    { "plamo2", false, true, { { "bos", 1 }, { "eos", 2 }, { "unknown", 0 }, { "padding", 3 } } },
    { "rwkv", false, false, {} },
    { "test", false, false, {} },
};
constexpr size_t N_RULED_TOKENIZERS = 2;

// Checks tokenizer.ggml.*_token_id and the defaults of missing keys.
static int check_token_ids(const gguf_header & header, const tokenizer_rules & rules, uint64_t n_tokens) {
    static const char * const names[] = { "bos",     "eos",     "eot",     "eom",     "unknown", "seperator",
                                          "padding", "cls",     "mask",    "fim_pre", "fim_suf", "fim_mid",
                                          "fim_pad", "fim_rep", "fim_sep", "prefix",  "suffix",  "middle" };
    for (const char * name : names) {
        const std::string key_name = "tokenizer.ggml." + std::string(name) + "_token_id";
        const gguf_key *  key      = header.find(key_name.c_str());
        int64_t           id       = -1;
        if (key == nullptr) {
            const auto * known = std::find_if(std::begin(rules.defaults), std::end(rules.defaults),
                                              [&](const default_token & d) { return d.name && !strcmp(d.name, name); });
            if (known != std::end(rules.defaults) && static_cast<uint64_t>(known->id) >= n_tokens) {
                return missing(key_name);
            }
            continue;
        }
        if (key->type != GGUF_U32 || !header.get_int(*key, 0, &id)) {
            return wrong_type(key_name);
        }
        if (static_cast<uint64_t>(id) >= n_tokens) {
            return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE,
                        "key %s is not in the vocabulary (%" PRId64 " vs %" PRIu64 " tokens)", key_name.c_str(), id,
                        n_tokens);
        }
    }
    return GGML_MACKO_STATUS_OK;
}

// *out is null for a model without a vocabulary, which only an architecture without rules may have.
static int find_tokenizer(const gguf_header & header, bool has_rules, const tokenizer_rules ** out) {
    std::string model;
    header.get_string(*header.find("tokenizer.ggml.model"), 0, &model); // the table requires this key
    *out = nullptr;
    if (!has_rules && (model == "none" || model == "no_vocab")) {
        return GGML_MACKO_STATUS_OK;
    }
    const auto * end = has_rules ? TOKENIZERS + N_RULED_TOKENIZERS : std::end(TOKENIZERS);
    const auto * it =
        std::find_if(std::begin(TOKENIZERS), end, [&](const tokenizer_rules & t) { return model == t.model; });
    if (it == end) {
        return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE,
                    has_rules ? "key tokenizer.ggml.model is not llama or gpt2 ('%s')"
                              : "key tokenizer.ggml.model is unknown ('%s')",
                    printable(model.c_str(), model.size()).text);
    }
    *out = it;
    return GGML_MACKO_STATUS_OK;
}

static int check_vocab(const gguf_header & header, bool has_rules) {
    const tokenizer_rules * rules = nullptr;
    TRY(find_tokenizer(header, has_rules, &rules));
    const gguf_key * key = nullptr;
    TRY(find_array(header, "tokenizer.ggml.tokens", rules != nullptr, { GGUF_STRING }, &key));
    if (key == nullptr) {
        return GGML_MACKO_STATUS_OK;
    }
    if (key->n == 0) {
        return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key tokenizer.ggml.tokens is empty");
    }
    std::vector<std::string> tokens;
    header.get_strings(*key, &tokens);
    TRY(check_token_limits(tokens));
    TRY(check_tokens_differ(tokens));
    TRY(check_token_types(header, tokens));
    TRY(check_scores(header, tokens.size()));
    if (rules == nullptr) {
        return GGML_MACKO_STATUS_OK;
    }
    TRY(check_token_ids(header, *rules, tokens.size()));
    TRY(find_array(header, "tokenizer.ggml.merges", rules->needs_merges, { GGUF_STRING }, &key));
    std::vector<std::string> merges;
    if (key != nullptr && header.get_strings(*key, &merges)) {
        TRY(check_merge_limits(merges));
    }
    TRY(find_array(header, "tokenizer.ggml.precompiled_charsmap", false, { GGUF_U8, GGUF_I8 }, &key));
    TRY(find_array(header, "tokenizer.ggml.suppress_tokens", false, { GGUF_I32 }, &key));
    return rules->needs_bytes ? check_byte_fallback(std::move(tokens)) : GGML_MACKO_STATUS_OK;
}

// ---- all checks ----

static int read_arch(const gguf_header & header, std::string * name) {
    const gguf_key * key = header.find("general.architecture");
    if (key == nullptr) {
        return missing("general.architecture");
    }
    if (key->type != GGUF_STRING || !header.get_string(*key, 0, name)) {
        return wrong_type(key->name);
    }
    name->resize(strlen(name->c_str())); // llama.cpp reads as far as the first NUL
    return GGML_MACKO_STATUS_OK;
}

static const arch_rules * find_arch(const std::string & name) {
    const auto * it =
        std::find_if(std::begin(ARCHS), std::end(ARCHS), [&](const arch_rules & arch) { return name == arch.name; });
    return it == std::end(ARCHS) ? nullptr : it;
}

bool has_model_rules(const gguf_header & header, std::string * arch) {
    std::string name;
    if (read_arch(header, &name)) {
        return false;
    }
    *arch = name;
    return find_arch(name) != nullptr;
}

static int check_relations(const hparams & hp, bool has_rules) {
    TRY(has_rules ? check_heads(hp) : check_layers(hp));
    TRY(check_experts(hp));
    TRY(has_rules ? check_window(hp) : check_all_numbers(hp));
    TRY(check_rope_scaling(hp));
    return check_labels(hp);
}

int check_model_keys(const gguf_header & header, bool strict) {
    std::string name;
    TRY(read_arch(header, &name));
    const arch_rules * known = find_arch(name);
    if (known == nullptr && strict) {
        return fail(GGML_MACKO_STATUS_UNSUPPORTED_ARCH,
                    "there are no rules for the metadata of architecture '%s', and strict loading refuses it",
                    printable(name.c_str(), name.size()).text);
    }
    const arch_rules other = { name.c_str(), ARCH_OTHER, EXPERTS_OPTIONAL, WINDOW_UNUSED, false, false };
    const arch_rules arch  = known ? *known : other;
    for (const key_rule & rule : RULES) {
        if (rule.flags & arch.bit || (!known && rule.other.min <= rule.other.max)) {
            TRY(check_rule(header, rule, arch));
        }
    }
    const gguf_key * type = header.find("general.type");
    std::string      type_name;
    if (type && header.get_string(*type, 0, &type_name) && type_name != "model") {
        return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key general.type is not model ('%s')",
                    printable(type_name.c_str(), type_name.size()).text);
    }
    TRY(check_name_limits(header));
    TRY(check_relations({ header, arch }, known != nullptr));
    return check_vocab(header, known != nullptr);
}

constexpr int32_t TYPE_I64 = 27; // of ggml

// The types of matrices that ggml-cpu can multiply: floating-point types, and quantized types with a dot product.
static bool is_matrix_type(int32_t type) {
    constexpr int32_t no_dot_product[] = { 9, 15, 24, 25, 26, TYPE_I64, 28 }; // Q8_1, Q8_K, I8, I16, I32, I64, F64
    return std::find(std::begin(no_dot_product), std::end(no_dot_product), type) == std::end(no_dot_product);
}

int check_model_tensors(const std::vector<gguf_tensor> & tensors, bool has_rules) {
    bool has_output       = false;
    bool has_output_scale = false;
    for (const gguf_tensor & t : tensors) {
        has_output |= t.name == "output.weight";
        has_output_scale |= t.name == "output.scale" || t.name == "output.input_scale";
        // ggml-cpu aborts unless norms, biases, scales and RoPE factors are F32. Only a tensor of several rows whose
        // name ends in .weight is a matrix.
        const bool is_matrix = t.ne[1] * t.ne[2] * t.ne[3] > 1 && ends_with(t.name, ".weight");
        if (!has_rules && (t.type == GGML_MACKO_TYPE_I32 || t.type == TYPE_I64)) {
            continue; // a table of token or expert numbers
        }
        if (is_matrix ? !is_matrix_type(t.type) : t.type != GGML_MACKO_TYPE_F32) {
            return fail(GGML_MACKO_STATUS_BAD_TYPE, "%s: llama.cpp cannot compute with this tensor's type (%d)",
                        t.name.c_str(), t.type);
        }
    }
    if (has_output_scale && !has_output) { // llama.cpp asserts if output.weight is the embedding and NVFP4
        return fail(GGML_MACKO_STATUS_MISSING_COMPONENT, "output.weight is missing, but its scale is present");
    }
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
