// Lies in the metadata of a model that llama.cpp would not check.
#include "lies.h"

constexpr float nan_f32 = std::numeric_limits<float>::quiet_NaN();
constexpr float inf_f32 = std::numeric_limits<float>::infinity();

// llama-cpp-python 0.3.36 aborts at seven of these changes of one key, and computes NaN with the other two.
TEST(key_that_breaks_llama_cpp_is_refused) {
    lie("block_count 0", S(BAD_KEY_VALUE), set_u32("llama.block_count", 0));
    lie("block_count 513", S(BAD_KEY_VALUE), set_u32("llama.block_count", 513));
    lie("expert_count 2^31", S(BAD_KEY_VALUE), set_u32("llama.expert_count", 1u << 31));
    lie("nextn_predict_layers 3", S(BAD_KEY_VALUE), set_u32("llama.nextn_predict_layers", 3));
    lie("rope.scaling.type unknown", S(BAD_KEY_VALUE), set_text("llama.rope.scaling.type", "bogus"));
    lie("split.no is u32", S(BAD_KEY_TYPE), set_u32("split.no", 1));
    lie("rms epsilon NaN", S(BAD_KEY_VALUE), set_f32("llama.attention.layer_norm_rms_epsilon", nan_f32));
    lie("rope.freq_base 0", S(BAD_KEY_VALUE), set_f32("llama.rope.freq_base", 0));
    lie("rope.freq_base NaN", S(BAD_KEY_VALUE), set_f32("llama.rope.freq_base", nan_f32));
}

TEST(malformed_general_key_is_refused) {
    lie("general.architecture missing", S(MISSING_KEY), [](file & f) { f.drop("general.architecture"); });
    lie("general.architecture is u32", S(BAD_KEY_TYPE), set_u32("general.architecture", 1));
    for (const char * arch : { "falcon", "mamba", "clip", "llama4", "LLAMA", "", "llama\n", "(unknown)" }) {
        lie("architecture whose own keys are missing", S(MISSING_KEY), set_text("general.architecture", arch));
    }
    lie("general.type adapter", S(BAD_KEY_VALUE), set_text("general.type", "adapter"));
    lie("general.type is u32", S(BAD_KEY_TYPE), set_u32("general.type", 0));
    lie("general.name is u32", S(BAD_KEY_TYPE), set_u32("general.name", 0));
    lie("general.file_type is a string", S(BAD_KEY_TYPE), set_text("general.file_type", "F16"));
    lie("split.count 2", S(SPLIT_FILE), [](file & f) { f.set(scalar<uint16_t>("split.count", U16, 2)); });
    lie("split.count 1", S(OK), [](file & f) { f.set(scalar<uint16_t>("split.count", U16, 1)); });
    lie("split.count is u32", S(BAD_KEY_TYPE), set_u32("split.count", 2));
}

TEST(wrong_dimension_of_the_model_is_refused) {
    for (const char * key : { "block_count", "context_length", "embedding_length", "feed_forward_length",
                              "attention.head_count", "attention.layer_norm_rms_epsilon" }) {
        const std::string name = std::string("llama.") + key;
        lie(name.c_str(), S(MISSING_KEY), [=](file & f) { f.drop(name); });
        lie(name.c_str(), S(BAD_KEY_TYPE), set_text(name.c_str(), "x"));
        lie(name.c_str(), S(BAD_KEY_TYPE), [=](file & f) { f.set(scalar<uint64_t>(name, U64, 16)); });
    }
    lie("context_length 0", S(BAD_KEY_VALUE), set_u32("llama.context_length", 0));
    lie("context_length 2^32-1", S(BAD_KEY_VALUE), set_u32("llama.context_length", UINT32_MAX));
    lie("embedding_length 0", S(BAD_KEY_VALUE), set_u32("llama.embedding_length", 0));
    lie("embedding_length 2^31", S(BAD_KEY_VALUE), set_u32("llama.embedding_length", 1u << 31));
    lie("embedding_length_out 8", S(BAD_KEY_VALUE), set_u32("llama.embedding_length_out", 8));
    lie("feed_forward_length 0", S(BAD_KEY_VALUE), set_u32("llama.feed_forward_length", 0));
}

TEST(wrong_head_count_is_refused) {
    lie("head_count 0", S(BAD_KEY_VALUE), set_u32("llama.attention.head_count", 0));
    lie("head_count 3", S(BAD_KEY_VALUE), set_u32("llama.attention.head_count", 3));
    lie("head_count > embedding", S(BAD_KEY_VALUE), set_u32("llama.attention.head_count", 32));
    lie("head_count_kv 0", S(BAD_KEY_VALUE), set_u32("llama.attention.head_count_kv", 0));
    lie("head_count_kv 3", S(BAD_KEY_VALUE), set_u32("llama.attention.head_count_kv", 3));
    lie("head_count_kv 8", S(BAD_KEY_VALUE), set_u32("llama.attention.head_count_kv", 8));
    lie("head counts per layer", S(OK),
        [](file & f) { f.set(array<uint32_t>("llama.attention.head_count_kv", U32, { 2, 2 })); });
    lie("head counts that differ", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<uint32_t>("llama.attention.head_count_kv", U32, { 2, 1 })); });
    lie("head counts of 3 layers", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<uint32_t>("llama.attention.head_count_kv", U32, { 2, 2, 2 })); });
    lie("head counts of 0 layers", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<uint32_t>("llama.attention.head_count_kv", U32, {})); });
    lie("head counts negative", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<int32_t>("llama.attention.head_count_kv", I32, { -2, -2 })); });
    lie("head counts are floats", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<float>("llama.attention.head_count_kv", F32, { 2, 2 })); });
    lie("context_length is an array", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<uint32_t>("llama.context_length", U32, { 2, 2 })); });
}

TEST(wrong_head_dimension_or_rope_is_refused) {
    lie("key_length 0", S(BAD_KEY_VALUE), set_u32("llama.attention.key_length", 0));
    lie("key_length 8", S(BAD_KEY_VALUE), set_u32("llama.attention.key_length", 8));
    lie("value_length 8", S(BAD_KEY_VALUE), set_u32("llama.attention.value_length", 8));
    lie("key_length_swa 8", S(BAD_KEY_VALUE), set_u32("llama.attention.key_length_swa", 8));
    lie("value_length_swa 8", S(BAD_KEY_VALUE), set_u32("llama.attention.value_length_swa", 8));
    lie("rope dimensions 3", S(BAD_KEY_VALUE), set_u32("llama.rope.dimension_count", 3));
    lie("rope dimensions 2", S(BAD_KEY_VALUE), set_u32("llama.rope.dimension_count", 2));
    lie("rope dimensions 0", S(BAD_KEY_VALUE), set_u32("llama.rope.dimension_count", 0));
    lie("rope dimensions swa 2", S(BAD_KEY_VALUE), set_u32("llama.rope.dimension_count_swa", 2));
    lie("rope.freq_base -1", S(BAD_KEY_VALUE), set_f32("llama.rope.freq_base", -1));
    lie("rope.freq_base inf", S(BAD_KEY_VALUE), set_f32("llama.rope.freq_base", inf_f32));
    lie("rope.scaling.factor 0", S(BAD_KEY_VALUE), set_f32("llama.rope.scaling.factor", 0));
    lie("rope.scaling.factor NaN", S(BAD_KEY_VALUE), set_f32("llama.rope.scaling.factor", nan_f32));
    lie("rope.scale_linear -1", S(BAD_KEY_VALUE), set_f32("llama.rope.scale_linear", -1));
    lie("rope.scaling.attn_factor inf", S(BAD_KEY_VALUE), set_f32("llama.rope.scaling.attn_factor", inf_f32));
    lie("rope original context 0", S(BAD_KEY_VALUE), set_u32("llama.rope.scaling.original_context_length", 0));
    lie("rope.scaling.finetuned u32", S(BAD_KEY_TYPE), set_u32("llama.rope.scaling.finetuned", 1));
}

TEST(malformed_attention_or_pooling_is_refused) {
    lie("rms epsilon 0", S(BAD_KEY_VALUE), set_f32("llama.attention.layer_norm_rms_epsilon", 0));
    lie("rms epsilon -1e-5", S(BAD_KEY_VALUE), set_f32("llama.attention.layer_norm_rms_epsilon", -1e-5f));
    lie("rms epsilon inf", S(BAD_KEY_VALUE), set_f32("llama.attention.layer_norm_rms_epsilon", inf_f32));
    lie("rms epsilon is a double", S(BAD_KEY_TYPE),
        [](file & f) { f.set(scalar<double>("llama.attention.layer_norm_rms_epsilon", F64, 1e-5)); });
    lie("attention.causal false", S(BAD_KEY_VALUE),
        [](file & f) { f.set(scalar<uint8_t>("llama.attention.causal", BOOL, 0)); });
    lie("pooling_type 4", S(BAD_KEY_VALUE), set_u32("llama.pooling_type", 4));
    lie("pooling_type 2^32-1", S(BAD_KEY_VALUE), set_u32("llama.pooling_type", UINT32_MAX));
}

TEST(wrong_expert_count_is_refused) {
    lie("expert_used_count without experts", S(BAD_KEY_VALUE), set_u32("llama.expert_used_count", 2));
    lie("experts, none used", S(BAD_KEY_VALUE), set_u32("llama.expert_count", 4));
    lie("expert groups", S(BAD_KEY_VALUE), set_u32("llama.expert_group_count", 2));
    lie("more used than there are", S(BAD_KEY_VALUE), [](file & f) {
        f.set(scalar<uint32_t>("llama.expert_count", U32, 4));
        f.set(scalar<uint32_t>("llama.expert_used_count", U32, 5));
    });
    lie("17 experts used", S(BAD_KEY_VALUE), [](file & f) {
        f.set(scalar<uint32_t>("llama.expert_count", U32, 64));
        f.set(scalar<uint32_t>("llama.expert_used_count", U32, 17));
    });
}

TEST(only_keys_that_llama_cpp_reads_are_checked) {
    lie("vocab_size 0", S(BAD_KEY_VALUE), set_u32("llama.vocab_size", 0));
    lie("labels are u32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<uint32_t>("llama.classifier.output_labels", U32, { 1 })); });
    lie("unread keys pass", S(OK), set_text("llama.future.key", "x"));
    lie("other architecture's keys pass", S(OK), set_u32("qwen3.block_count", 0));
}
