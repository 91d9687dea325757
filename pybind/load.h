// Loading into llama.cpp. Same order and names as ggml-macko.h, which documents them.
enum ggml_macko_load_flags {
    GGML_MACKO_LOAD_COMPRESS            = 1,
    GGML_MACKO_LOAD_KEEP_NEGATIVE_ZEROS = 2,
    GGML_MACKO_LOAD_SPARSE_ONLY         = 4,
    GGML_MACKO_LOAD_STRICT              = 8,
    GGML_MACKO_LOAD_CACHE               = 16,
    GGML_MACKO_LOAD_ACT_THRESHOLDS      = 32,
};

struct ggml_macko_params_layout {
    int32_t nbytes;
    int32_t progress_callback;
    int32_t progress_callback_user_data;
    int32_t vocab_only;
    int32_t check_tensors;
    int32_t no_alloc;
    int32_t load_mode;
    int32_t use_mmap;
    int32_t use_direct_io;
    int32_t use_mlock;
};

struct llama_model;
struct llama_model_params;
struct ggml_macko_llama {
    int64_t struct_size;
    void (*load_from_file)(void);
    void (*load_from_file_ptr)(void);
    void (*model_free)(void);
    struct ggml_macko_params_layout params;
};
int ggml_macko_load_model(const char * path, const struct llama_model_params * params, int32_t flags,
                          const struct ggml_macko_llama * llama, struct llama_model ** model);
int ggml_macko_find_params_layout(void (*default_params)(void), int32_t has_load_mode,
                                  struct ggml_macko_params_layout * layout);
int ggml_macko_check_ggml(const char * ggml_version);
int ggml_macko_check_running_ggml(void);
