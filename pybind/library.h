// The library: status codes, value types, last error, versions. Same order and names as ggml-macko.h, which documents
// them.
enum ggml_macko_status {
    GGML_MACKO_STATUS_OK = 0,

    GGML_MACKO_STATUS_BAD_ARGUMENT     = 1,
    GGML_MACKO_STATUS_OUT_OF_MEMORY    = 2,
    GGML_MACKO_STATUS_VERSION_MISMATCH = 3,
    GGML_MACKO_STATUS_CANCELLED        = 4,
    GGML_MACKO_STATUS_LOAD_FAILED      = 5,

    GGML_MACKO_STATUS_IO           = 10,
    GGML_MACKO_STATUS_NOT_A_FILE   = 11,
    GGML_MACKO_STATUS_TRUNCATED    = 12,
    GGML_MACKO_STATUS_FILE_CHANGED = 13,

    GGML_MACKO_STATUS_BAD_MAGIC        = 20,
    GGML_MACKO_STATUS_BAD_GGUF_VERSION = 21,
    GGML_MACKO_STATUS_LIMIT            = 22,
    GGML_MACKO_STATUS_BAD_KEY          = 23,
    GGML_MACKO_STATUS_DUPLICATE_KEY    = 24,
    GGML_MACKO_STATUS_BAD_KEY_TYPE     = 25,
    GGML_MACKO_STATUS_BAD_KEY_VALUE    = 26,
    GGML_MACKO_STATUS_MISSING_KEY      = 27,
    GGML_MACKO_STATUS_BAD_ALIGNMENT    = 28,
    GGML_MACKO_STATUS_BAD_NAME         = 29,
    GGML_MACKO_STATUS_DUPLICATE_TENSOR = 30,
    GGML_MACKO_STATUS_BAD_TYPE         = 31,
    GGML_MACKO_STATUS_BAD_SHAPE        = 32,
    GGML_MACKO_STATUS_BAD_OFFSET       = 33,
    GGML_MACKO_STATUS_TRAILING_DATA    = 34,
    GGML_MACKO_STATUS_SPLIT_FILE       = 35,
    GGML_MACKO_STATUS_UNSUPPORTED_ARCH = 36,

    GGML_MACKO_STATUS_NOT_SPARSE        = 40,
    GGML_MACKO_STATUS_FORMAT_VERSION    = 41,
    GGML_MACKO_STATUS_BAD_FORMAT        = 42,
    GGML_MACKO_STATUS_MISSING_COMPONENT = 43,
    GGML_MACKO_STATUS_BAD_COMPONENT     = 44,

    GGML_MACKO_STATUS_BAD_ROW_PTR   = 50,
    GGML_MACKO_STATUS_BAD_COLUMN    = 51,
    GGML_MACKO_STATUS_NOT_CANONICAL = 52,
    GGML_MACKO_STATUS_NOT_FINITE    = 53,
    GGML_MACKO_STATUS_BAD_NNZ       = 54,
    GGML_MACKO_STATUS_BAD_BLOCK     = 55,
    GGML_MACKO_STATUS_OVERLAP       = 56,
};

enum ggml_macko_type {
    GGML_MACKO_TYPE_F32   = 0,
    GGML_MACKO_TYPE_F16   = 1,
    GGML_MACKO_TYPE_Q4_0  = 2,
    GGML_MACKO_TYPE_Q5_0  = 6,
    GGML_MACKO_TYPE_Q8_0  = 8,
    GGML_MACKO_TYPE_I8    = 24,
    GGML_MACKO_TYPE_I16   = 25,
    GGML_MACKO_TYPE_I32   = 26,
    GGML_MACKO_TYPE_BF16  = 30,
    GGML_MACKO_TYPE_Q4_NL = 1004,
    GGML_MACKO_TYPE_CODED = 1005,
};

const char * ggml_macko_last_error(void);
const char * ggml_macko_status_name(int status);
int32_t      ggml_macko_api_version(void);
const char * ggml_macko_version(void);
const char * ggml_macko_oldest_llama_cpp_python(void);
const char * ggml_macko_newest_llama_cpp_python(void);
const char * ggml_macko_oldest_ggml(void);
const char * ggml_macko_newest_ggml(void);
const char * ggml_macko_running_ggml(void);
const char * ggml_macko_gpus(void);

struct ggml_macko_setting {
    const char * variable;
    const char * word;
    const char * help;
};
bool ggml_macko_setting_at(int32_t i, struct ggml_macko_setting * setting);
int  ggml_macko_check_environment(void);
