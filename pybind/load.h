// Loading into llama.cpp. Same order and names as ggml-macko.h, which says what each does.
struct ggml_macko_load;
int ggml_macko_load_begin(const char * path, struct ggml_macko_load ** out, FILE ** stream);
int ggml_macko_load_end(struct ggml_macko_load * load, bool model_loaded, bool with_weights);
int ggml_macko_check_ggml(const char * ggml_version);
