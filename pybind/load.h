// Loading into llama.cpp. Same order and names as ggml-macko.h, which says what each does.
enum ggml_macko_load_flags {
    GGML_MACKO_LOAD_COMPRESS            = 1,
    GGML_MACKO_LOAD_NO_ALLOC            = 2,
    GGML_MACKO_LOAD_KEEP_NEGATIVE_ZEROS = 4,
};
struct ggml_macko_load;
int ggml_macko_load_begin(const char * path, int32_t flags, struct ggml_macko_load ** out, FILE ** stream);
int ggml_macko_load_end(struct ggml_macko_load * load, bool model_loaded, bool with_weights);
int ggml_macko_check_ggml(const char * ggml_version);
