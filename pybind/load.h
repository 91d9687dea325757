// Loading into llama.cpp. Same order and names as ggml-macko.h, which says what each does.
enum ggml_macko_load_flags {
    GGML_MACKO_LOAD_COMPRESS            = 1,
    GGML_MACKO_LOAD_KEEP_NEGATIVE_ZEROS = 2,
    GGML_MACKO_LOAD_SPARSE_ONLY         = 4,
};

struct llama_model;
struct llama_model_params;
struct ggml_macko_llama {
    void (*load_from_file)(void);
    void (*load_from_file_ptr)(void);
    void (*model_free)(void);
};
int ggml_macko_load_model(const char * path, const struct llama_model_params * params, int32_t flags,
                          const struct ggml_macko_llama * llama, struct llama_model ** model);
int ggml_macko_check_ggml(const char * ggml_version);
