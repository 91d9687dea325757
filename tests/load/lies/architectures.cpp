// Lies in the keys and tensors of each architecture, with special rules and without.
#include "lies.h"

TEST(wrong_type_of_a_model_tensor_is_refused) {
    lie("F16 norm", S(BAD_TYPE), [](file & f) {
        tensor & t = f.at("output_norm.weight");
        t.type     = TYPE_F16;
        t.data.resize(32);
    });
    lie("F16 norm with two dims", S(BAD_TYPE), [](file & f) {
        tensor & t = f.at("output_norm.weight");
        t.type     = TYPE_F16;
        t.data.resize(32);
        t.ne = { 16, 1 };
    });
    lie("I32 norm", S(BAD_TYPE), [](file & f) { f.at("output_norm.weight").type = TYPE_I32; });
    lie("I32 embedding", S(BAD_TYPE), [](file & f) {
        tensor & t = f.at("token_embd.weight");
        t.type     = TYPE_I32;
        t.data.resize(2 * t.data.size());
    });
    lie("I8 attention", S(BAD_TYPE), [](file & f) {
        tensor & t = f.at("blk.0.attn_v.weight");
        t.type     = TYPE_I8;
        t.data.resize(t.data.size() / 2);
    });
    lie("Q8_1 attention", S(BAD_TYPE), [](file & f) {
        tensor & t = f.at("blk.0.attn_v.weight");
        t.type     = TYPE_Q8_1;
        t.ne       = { 32, 8 };
        t.data.resize(8 * 36);
    });
    lie("F16 bias", S(BAD_TYPE), [](file & f) {
        tensor & t = f.at("output_norm.weight");
        t.name     = "blk.0.attn_q.bias";
        t.type     = TYPE_F16;
        t.data.resize(32);
    });
    lie("scale of a tied output", S(MISSING_COMPONENT),
        [](file & f) { f.at("output_norm.weight").name = "output.scale"; });
    lie("sparse norm", S(BAD_TYPE), [](file & f) { // a tensor of one row does not count as a matrix
        patch<uint64_t>(&f.find("macko.tensor.ne")->value, 12, 256);
        patch<uint64_t>(&f.find("macko.tensor.ne")->value, 20, 1);
        f.at(std::string(Q) + ".row_ptr").ne = { 2 };
        f.at(std::string(Q) + ".row_ptr").data.resize(8);
    });
}

static void arch_lie(const arch_case & a, const char * name, int expected, const file_lie & change,
                     bool strict = false) {
    builder::file f = arch_file(a);
    change(f);
    layout             l;
    uint64_t           size = 0;
    const bytes        b    = serialize_header(f, &l, &size);
    macko::gguf_header header;
    int                status = macko::read_gguf_header(memory_source(b.data(), b.size()), &header);
    if (status == GGML_MACKO_STATUS_OK) {
        status = macko::check_model_keys(header, strict);
    }
    seen.insert(status);
    expect((std::string(a.name) + ": " + name).c_str(), expected, status);
}

static void check_experts_of_an_architecture(const arch_case & a) {
    const std::string arch       = a.name;
    const bool        dense_only = !a.experts && arch != "llama" && arch != "mistral3";
    arch_lie(a, "experts where there are none", dense_only ? S(BAD_KEY_VALUE) : S(OK), [&](builder::file & x) {
        x.set(scalar<uint32_t>(arch + ".expert_count", U32, 4));
        x.set(scalar<uint32_t>(arch + ".expert_used_count", U32, 2));
    });
    const bool must_have_experts = arch == "qwen3moe" || arch == "gpt-oss";
    if (a.experts) {
        arch_lie(a, "no experts", must_have_experts ? S(BAD_KEY_VALUE) : S(OK), [&](builder::file & x) {
            x.drop(arch + ".expert_count");
            x.drop(arch + ".expert_used_count");
        });
    }
}

static void check_sliding_window_of_an_architecture(const arch_case & a) {
    const std::string arch = a.name;
    arch_lie(a, "no layer with a window", S(BAD_KEY_VALUE), [&](builder::file & x) {
        x.set(array<uint8_t>(arch + ".attention.sliding_window_pattern", BOOL, std::vector<uint8_t>(6, 0)));
    });
    arch_lie(a, "pattern of 1", S(BAD_KEY_VALUE),
             [&](builder::file & x) { x.set(scalar<uint32_t>(arch + ".attention.sliding_window_pattern", U32, 1)); });
    arch_lie(a, "pattern of 5 layers", S(BAD_KEY_VALUE), [&](builder::file & x) {
        x.set(array<uint8_t>(arch + ".attention.sliding_window_pattern", BOOL, std::vector<uint8_t>(5, 1)));
    });
    arch_lie(a, "pattern of 2s", S(BAD_KEY_VALUE), [&](builder::file & x) {
        x.set(array<uint32_t>(arch + ".attention.sliding_window_pattern", U32, std::vector<uint32_t>(6, 2)));
    });
    arch_lie(a, "pattern of floats", S(BAD_KEY_TYPE), [&](builder::file & x) {
        x.set(array<float>(arch + ".attention.sliding_window_pattern", F32, std::vector<float>(6, 1)));
    });
    arch_lie(a, "alternating pattern", S(OK), [&](builder::file & x) {
        x.set(array<uint8_t>(arch + ".attention.sliding_window_pattern", BOOL, { 1, 0, 1, 0, 1, 0 }));
    });
}

static void check_heads_and_rope_of_an_architecture(const arch_case & a) {
    const std::string arch = a.name;
    arch_lie(a, "window of 2^32-1",
             arch == "gemma2" || arch == "gemma3" || arch == "phi3" || arch == "gpt-oss" ? S(BAD_KEY_VALUE) : S(OK),
             [&](builder::file & x) { x.set(scalar<uint32_t>(arch + ".attention.sliding_window", U32, UINT32_MAX)); });
    arch_lie(a, "heads wider than the embedding", arch == "qwen2" || arch == "phi3" ? S(BAD_KEY_VALUE) : S(OK),
             [&](builder::file & x) {
                 x.set(scalar<uint32_t>(arch + ".attention.key_length", U32, 16));
                 x.set(scalar<uint32_t>(arch + ".attention.value_length", U32, 16));
             });
    const bool partial_rope = arch == "gemma2" || arch == "gemma3" || arch == "phi3";
    arch_lie(a, "RoPE over half a head", partial_rope ? S(OK) : S(BAD_KEY_VALUE),
             [&](builder::file & x) { x.set(scalar<uint32_t>(arch + ".rope.dimension_count", U32, 4)); });
    arch_lie(a, "RoPE over two heads", S(BAD_KEY_VALUE),
             [&](builder::file & x) { x.set(scalar<uint32_t>(arch + ".rope.dimension_count", U32, 16)); });
    if (arch == "gemma2") {
        arch_lie(a, "attention softcap 0", S(BAD_KEY_VALUE),
                 [&](builder::file & x) { x.set(scalar<float>("gemma2.attn_logit_softcapping", F32, 0)); });
        arch_lie(a, "final softcap NaN", S(BAD_KEY_VALUE), [&](builder::file & x) {
            x.set(scalar<float>("gemma2.final_logit_softcapping", F32, std::numeric_limits<float>::quiet_NaN()));
        });
    }
}

TEST(architectures) {
    const arch_case cases[] = {
        { "llama", false, false }, { "llama", true, false },    { "mistral3", false, false }, { "qwen2", false, false },
        { "qwen3", false, false }, { "qwen3moe", true, false }, { "gemma2", false, true },    { "gemma3", false, true },
        { "phi3", false, false },  { "gpt-oss", true, true },
    };
    for (const arch_case & a : cases) {
        arch_lie(a, "as converted", S(OK), [](file &) {});
        check_experts_of_an_architecture(a);
        if (a.window) {
            check_sliding_window_of_an_architecture(a);
        }
        check_heads_and_rope_of_an_architecture(a);
    }
}

// ---- architectures without special rules ----

static file_lie set_other(const std::string & key, uint32_t value) {
    return [=](file & f) { f.set(scalar<uint32_t>("falcon." + key, U32, value)); };
}

static file_lie set_other(const std::string & key, float value) {
    return [=](file & f) { f.set(scalar<float>("falcon." + key, F32, value)); };
}

TEST(general_keys_without_rules_are_checked) {
    const arch_case falcon   = { "falcon", false, false };
    const auto      with_two = [](uint32_t n, uint32_t used) {
        return [=](file & f) {
            set_other("expert_count", n)(f);
            set_other("expert_used_count", used)(f);
        };
    };
    const auto per_layer = [](const char * key, uint32_t n, uint32_t last) {
        return [=](file & f) {
            std::vector<uint32_t> values(n, 2);
            values.back() = last;
            f.set(array<uint32_t>(std::string("falcon.") + key, U32, values));
        };
    };
    arch_lie(falcon, "as converted", S(OK), [](file &) {});
    arch_lie(falcon, "as converted, strict", S(UNSUPPORTED_ARCH), [](file &) {}, true);
    arch_lie({ "llama", false, false }, "with rules, strict", S(OK), [](file &) {}, true);
    arch_lie({ "llama", false, false }, "rules hold up to a NUL, as llama.cpp reads the name", S(MISSING_KEY),
             [](file & f) {
                 f.set(text("general.architecture", std::string("llama\0x", 7)));
                 f.drop("llama.attention.layer_norm_rms_epsilon");
             });
    arch_lie(falcon, "no block_count", S(MISSING_KEY), [](file & f) { f.drop("falcon.block_count"); });
    arch_lie(falcon, "block_count 0", S(BAD_KEY_VALUE), set_other("block_count", 0u));
    arch_lie(falcon, "block_count 513", S(BAD_KEY_VALUE), set_other("block_count", 513u));
    arch_lie(falcon, "more layers that predict than layers", S(BAD_KEY_VALUE), set_other("nextn_predict_layers", 7u));
    arch_lie(falcon, "no heads", S(OK), set_other("attention.head_count", 0u));
    arch_lie(falcon, "heads of each layer", S(OK), per_layer("attention.head_count", 6, 0));
    arch_lie(falcon, "heads of five layers", S(BAD_KEY_VALUE), per_layer("attention.head_count", 5, 2));
    arch_lie(falcon, "a million heads", S(BAD_KEY_VALUE), set_other("attention.head_count", 1000000u));
    arch_lie(falcon, "experts", S(OK), with_two(4, 2));
    arch_lie(falcon, "no expert used", S(BAD_KEY_VALUE), with_two(4, 0));
    arch_lie(falcon, "more experts used than there are", S(BAD_KEY_VALUE), with_two(2, 4));
    arch_lie(falcon, "more experts used in one layer than there are", S(BAD_KEY_VALUE), [&](file & f) {
        set_other("expert_count", 4u)(f);
        per_layer("expert_used_count", 6, 5)(f);
    });
    arch_lie(falcon, "groups that do not divide the experts", S(BAD_KEY_VALUE), [&](file & f) {
        with_two(8, 2)(f);
        set_other("expert_group_count", 3u)(f);
        set_other("expert_group_used_count", 1u)(f);
    });
    arch_lie(falcon, "groups of experts", S(OK), [&](file & f) {
        with_two(8, 2)(f);
        set_other("expert_group_count", 4u)(f);
        set_other("expert_group_used_count", 2u)(f);
    });
    arch_lie(falcon, "unknown scaling", S(BAD_KEY_VALUE),
             [](file & f) { f.set(text("falcon.rope.scaling.type", "bogus")); });
    arch_lie(falcon, "a key of its own that is NaN", S(BAD_KEY_VALUE),
             set_other("residual_scale", std::numeric_limits<float>::quiet_NaN()));
    arch_lie(falcon, "an array of its own with an infinity", S(BAD_KEY_VALUE), [](file & f) {
        f.set(array<float>("falcon.swiglu_clamp_exp", F32, { 0.0f, std::numeric_limits<float>::infinity() }));
    });
    arch_lie(falcon, "a key of its own", S(OK), set_other("residual_scale", 2.0f));
}

TEST(tokenizers_without_rules_are_checked) {
    const arch_case falcon    = { "falcon", false, false };
    const auto      tokenizer = [](const char * model) {
        return [=](file & f) { f.set(text("tokenizer.ggml.model", model)); };
    };
    const auto cut = [&](const char * model, size_t n) {
        return [=](file & f) {
            tokenizer(model)(f);
            std::vector<std::string> tokens;
            for (size_t i = 0; i < n; i++) {
                tokens.push_back("t" + std::to_string(i));
            }
            f.set(texts("tokenizer.ggml.tokens", tokens));
            f.drop("tokenizer.ggml.scores");
            f.drop("tokenizer.ggml.token_type");
        };
    };
    arch_lie(falcon, "unknown tokenizer", S(BAD_KEY_VALUE), tokenizer("bogus"));
    arch_lie(falcon, "no vocabulary", S(OK), [&](file & f) {
        tokenizer("none")(f);
        f.drop("tokenizer.ggml.tokens");
    });
    arch_lie({ "llama", false, false }, "no vocabulary, with rules", S(BAD_KEY_VALUE), tokenizer("none"));
    arch_lie({ "llama", false, false }, "a tokenizer of others, with rules", S(BAD_KEY_VALUE), cut("rwkv", 300));
    arch_lie(falcon, "rwkv", S(OK), cut("rwkv", 16));
    arch_lie(falcon, "bert", S(OK), cut("bert", 104));
    arch_lie(falcon, "bert without its mask", S(MISSING_KEY), cut("bert", 103));
    arch_lie(falcon, "t5", S(OK), cut("t5", 3));
    arch_lie(falcon, "t5 without an unknown token", S(MISSING_KEY), [&](file & f) {
        cut("t5", 2)(f);
        f.drop("tokenizer.ggml.eos_token_id");
    });
    arch_lie(falcon, "gpt2 without merges", S(MISSING_KEY), cut("gpt2", 300));
    arch_lie(falcon, "plamo2 without bytes", S(BAD_KEY_VALUE), cut("plamo2", 300));
}

TEST(use_of_a_weight_follows_from_its_name) {
    const struct {
        const char * name;
        int          n_dims, use;
    } cases[] = {
        { "output.weight", 2, GGML_MACKO_WEIGHT_HEAD },
        { "token_embd.weight", 2, GGML_MACKO_WEIGHT_HEAD },
        { "token_embd.weight", 3, GGML_MACKO_WEIGHT_OTHER },
        { "position_embd.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.attn_qkv.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.10.attn_kv_a_mqa.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.10.attn_q_b.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.attn_k_b.weight", 3, GGML_MACKO_WEIGHT_OTHER }, // a matrix for each head
        { "blk.0.ffn_up_shexp.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.ffn_up_exps.weight", 3, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.ffn_up_chexps.weight", 3, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.ffn_gate_inp.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.ffn_gate_inp_shexp.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.ffn_gate_tid2eid.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.attn_norm.weight", 1, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.attn_q.bias", 1, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.ssm_in.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.ssm_out.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.ssm_x.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.ssm_conv1d.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.ssm_a", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.time_mix_key.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.time_mix_w1.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.channel_mix_value.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "blk.0.shortconv.in_proj.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "enc.blk.0.attn_q.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "dec.blk.0.cross_attn_q.weight", 2, GGML_MACKO_WEIGHT_BLOCK },
        { "dec.blk.0.cross_attn_rel_b.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "enc.enc.blk.0.attn_q.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk..attn_q.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.attn_.weight", 2, GGML_MACKO_WEIGHT_OTHER },
        { "blk.0.weight", 2, GGML_MACKO_WEIGHT_OTHER },
    };
    for (const auto & c : cases) {
        const int use = ggml_macko_weight_use_of(c.name, c.n_dims);
        CHECK(use == c.use, "%s: %d vs %d", c.name, use, c.use);
    }
}
