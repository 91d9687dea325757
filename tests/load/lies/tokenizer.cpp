// Lies in the vocabulary of a model.
#include "lies.h"

static file_lie tokens_with(size_t i, const std::string & token) {
    std::vector<std::string> t = builder::spm_tokens();
    t[i]                       = token;
    return [t](file & f) { f.set(texts("tokenizer.ggml.tokens", t)); };
}

TEST(malformed_tokenizer_model_is_refused) {
    lie("tokenizer model missing", S(MISSING_KEY), [](file & f) { f.drop("tokenizer.ggml.model"); });
    for (const char * model :
         { "no_vocab", "none", "bert", "t5", "rwkv", "plamo2", "test", "hybriddna", "gemma4", "" }) {
        lie("tokenizer model", S(BAD_KEY_VALUE), set_text("tokenizer.ggml.model", model));
    }
    lie("tokenizer model is u32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(scalar<uint32_t>("tokenizer.ggml.model", U32, 1)); });
}

TEST(malformed_tokens_are_refused) {
    const std::vector<std::string> good = builder::spm_tokens();
    lie("tokens missing", S(MISSING_KEY), [](file & f) { f.drop("tokenizer.ggml.tokens"); });
    lie("tokens are u32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<uint32_t>("tokenizer.ggml.tokens", U32, { 1, 2 })); });
    lie("tokens are one string", S(BAD_KEY_TYPE), set_text("tokenizer.ggml.tokens", "abc"));
    lie("tokens empty", S(BAD_KEY_VALUE), [](file & f) { f.set(texts("tokenizer.ggml.tokens", {})); });
    lie("token twice", S(BAD_KEY_VALUE), tokens_with(263, "a"));
    lie("tokens equal up to a NUL", S(BAD_KEY_VALUE), tokens_with(263, std::string("a\0b", 3)));
    lie("empty token named like one", S(BAD_KEY_VALUE), [&](file & f) {
        std::vector<std::string> t = good;
        t[262]                     = "";
        t[263]                     = "[EMPTY_262]";
        f.set(texts("tokenizer.ggml.tokens", t));
    });
    lie("one empty token", S(OK), tokens_with(263, ""));
    for (const char * token : { "<0x-1>", "<0x0>", "<0xZZ>", "0x0A", "<0x0A", "" }) {
        lie("byte token malformed", S(BAD_KEY_VALUE), tokens_with(3 + 10, token));
    }
    lie("byte token missing", S(BAD_KEY_VALUE), [&](file & f) {
        std::vector<int32_t> types(good.size(), 1);
        f.set(array<int32_t>("tokenizer.ggml.token_type", I32, types));
        std::vector<std::string> t = good;
        t[3 + 200]                 = "no byte";
        f.set(texts("tokenizer.ggml.tokens", t));
    });
}

TEST(malformed_token_types_or_scores_are_refused) {
    const std::vector<std::string> good = builder::spm_tokens();
    lie("token types too few", S(BAD_KEY_VALUE), [&](file & f) {
        f.set(array<int32_t>("tokenizer.ggml.token_type", I32, std::vector<int32_t>(good.size() - 1, 1)));
    });
    lie("token types too many", S(BAD_KEY_VALUE), [&](file & f) {
        f.set(array<int32_t>("tokenizer.ggml.token_type", I32, std::vector<int32_t>(good.size() + 1, 1)));
    });
    lie("token type 7", S(BAD_KEY_VALUE), [&](file & f) {
        f.set(array<int32_t>("tokenizer.ggml.token_type", I32, std::vector<int32_t>(good.size(), 7)));
    });
    lie("token type -1", S(BAD_KEY_VALUE), [&](file & f) {
        f.set(array<int32_t>("tokenizer.ggml.token_type", I32, std::vector<int32_t>(good.size(), -1)));
    });
    lie("token types are i8", S(BAD_KEY_TYPE),
        [&](file & f) { f.set(array<int8_t>("tokenizer.ggml.token_type", I8, std::vector<int8_t>(good.size(), 1))); });
    lie("scores too few", S(BAD_KEY_VALUE),
        [](file & f) { f.set(array<float>("tokenizer.ggml.scores", F32, { 1, 2 })); });
    lie("scores are u8", S(BAD_KEY_TYPE),
        [&](file & f) { f.set(array<uint8_t>("tokenizer.ggml.scores", U8, std::vector<uint8_t>(good.size(), 1))); });
    lie("a score is NaN", S(BAD_KEY_VALUE),
        [](file & f) { patch<uint32_t>(&f.find("tokenizer.ggml.scores")->value, 12 + 4 * 7, 0x7fc00000); });
    lie("a score is infinite", S(BAD_KEY_VALUE),
        [](file & f) { patch<uint32_t>(&f.find("tokenizer.ggml.scores")->value, 12 + 4 * 7, 0xff800000); });
}

TEST(malformed_special_token_is_refused) {
    const std::vector<std::string> good = builder::spm_tokens();
    for (const char * name :
         { "bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "fim_pre", "fim_rep", "prefix" }) {
        const std::string key = std::string("tokenizer.ggml.") + name + "_token_id";
        lie(key.c_str(), S(BAD_KEY_VALUE),
            [=, &good](file & f) { f.set(scalar<uint32_t>(key, U32, static_cast<uint32_t>(good.size()))); });
        lie(key.c_str(), S(BAD_KEY_VALUE), [=](file & f) { f.set(scalar<uint32_t>(key, U32, UINT32_MAX)); });
        lie(key.c_str(), S(BAD_KEY_TYPE), [=](file & f) { f.set(scalar<int32_t>(key, I32, 1)); });
        lie(key.c_str(), S(OK),
            [=, &good](file & f) { f.set(scalar<uint32_t>(key, U32, static_cast<uint32_t>(good.size()) - 1)); });
    }
}

TEST(wrong_type_of_a_tokenizer_key_is_refused) {
    lie("add_bos_token is u32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(scalar<uint32_t>("tokenizer.ggml.add_bos_token", U32, 1)); });
    lie("chat template is u32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(scalar<uint32_t>("tokenizer.chat_template", U32, 1)); });
    lie("chat template is an array", S(BAD_KEY_TYPE),
        [](file & f) { f.set(texts("tokenizer.chat_template", { "x" })); });
    lie("charsmap is f32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<float>("tokenizer.ggml.precompiled_charsmap", F32, { 1 })); });
    lie("suppress_tokens is u8", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<uint8_t>("tokenizer.ggml.suppress_tokens", U8, { 1 })); });
}

TEST(bpe_needs_merges_and_its_default_tokens) {
    lie("BPE without merges", S(MISSING_KEY), set_text("tokenizer.ggml.model", "gpt2"));
    lie("BPE with merges", S(OK), [](file & f) {
        f.set(text("tokenizer.ggml.model", "gpt2"));
        f.set(texts("tokenizer.ggml.merges", { "a b" }));
    });
    lie("merges are u32", S(BAD_KEY_TYPE),
        [](file & f) { f.set(array<uint32_t>("tokenizer.ggml.merges", U32, { 1 })); });
    lie("BPE, default bos not there", S(MISSING_KEY), [](file & f) {
        f.set(text("tokenizer.ggml.model", "gpt2"));
        f.set(texts("tokenizer.ggml.merges", { "a b" }));
        f.set(texts("tokenizer.ggml.tokens", { "a", "b", "ab" }));
        f.drop("tokenizer.ggml.token_type");
        f.drop("tokenizer.ggml.scores");
        f.drop("tokenizer.ggml.bos_token_id");
    });
}
