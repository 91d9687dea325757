// ggml-macko: sparse weights for stock llama.cpp. This header is the whole C API. It uses no ggml types, so cffi can
// bind it.
//
// Conventions
//   - A function returns a ggml_macko_status unless its comment names another result. After an error,
//     ggml_macko_last_error() returns one line of text, valid until the next call of this library on the same thread.
//     No function throws, aborts or prints.
//   - Matrices are row-major, rows x cols, and cols is ggml's ne[0]. Types are ggml type ids (enum ggml_macko_type).
//   - n_threads <= 0 means all cores.
//   - A struct whose first member is struct_size will grow at its end. The caller sets struct_size to the sizeof of the
//     struct before each call. A function that fills the struct sets it to the number of bytes that the library knows.
//     BAD_ARGUMENT if struct_size is smaller than the library needs.
//   - FORMAT.md specifies the file format.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && defined(GGML_MACKO_BUILD) // the library itself, and programs that link it statically
#define GGML_MACKO_EXPORT __declspec(dllexport)
#elif defined(_WIN32)
#define GGML_MACKO_EXPORT __declspec(dllimport)
#else
#define GGML_MACKO_EXPORT __attribute__((visibility("default")))
#endif
#ifdef __cplusplus
#define GGML_MACKO_API extern "C" GGML_MACKO_EXPORT
#else
#define GGML_MACKO_API GGML_MACKO_EXPORT
#endif

// Version of this API, as RELEASE.md defines it. It rises when a program must be changed or compiled again. New
// functions, new constants and new members at the end of a struct with struct_size do not change it.
#define GGML_MACKO_API_VERSION 1

enum ggml_macko_status {
    GGML_MACKO_STATUS_OK = 0,
    // the call
    GGML_MACKO_STATUS_BAD_ARGUMENT     = 1, // null pointer, negative count, or a shape that does not fit
    GGML_MACKO_STATUS_OUT_OF_MEMORY    = 2,
    GGML_MACKO_STATUS_VERSION_MISMATCH = 3, // the plugin was built for other versions of llama.cpp than the running one
    GGML_MACKO_STATUS_CANCELLED        = 4, // a progress callback requested the stop
    GGML_MACKO_STATUS_LOAD_FAILED      = 5, // llama.cpp refused a model that passed our checks
    // the file system
    GGML_MACKO_STATUS_IO           = 10, // the message contains the text of errno
    GGML_MACKO_STATUS_NOT_A_FILE   = 11, // directory, FIFO, device
    GGML_MACKO_STATUS_TRUNCATED    = 12, // the file ends before what its header declares
    GGML_MACKO_STATUS_FILE_CHANGED = 13, // size, inode or mtime changed while it was read
    // GGUF structure
    GGML_MACKO_STATUS_BAD_MAGIC        = 20,
    GGML_MACKO_STATUS_BAD_GGUF_VERSION = 21, // neither 2 nor 3, 2 of a sparse file, or big-endian
    GGML_MACKO_STATUS_LIMIT            = 22, // exceeds a limit of FORMAT.md section 4 or SECURITY.md
    GGML_MACKO_STATUS_BAD_KEY          = 23, // malformed or reserved key
    GGML_MACKO_STATUS_DUPLICATE_KEY    = 24,
    GGML_MACKO_STATUS_BAD_KEY_TYPE     = 25, // wrong value type for a known key
    GGML_MACKO_STATUS_BAD_KEY_VALUE    = 26, // value outside the range that llama.cpp can handle
    GGML_MACKO_STATUS_MISSING_KEY      = 27,
    GGML_MACKO_STATUS_BAD_ALIGNMENT    = 28,
    GGML_MACKO_STATUS_BAD_NAME         = 29, // tensor name empty, too long or not printable
    GGML_MACKO_STATUS_DUPLICATE_TENSOR = 30, // the name occurs twice, or both dense X and sparse X.* exist
    GGML_MACKO_STATUS_BAD_TYPE         = 31, // unknown ggml type
    GGML_MACKO_STATUS_BAD_SHAPE        = 32,
    GGML_MACKO_STATUS_BAD_OFFSET       = 33, // hole, overlap or misalignment in the data section
    GGML_MACKO_STATUS_TRAILING_DATA    = 34,
    GGML_MACKO_STATUS_SPLIT_FILE       = 35,
    GGML_MACKO_STATUS_UNSUPPORTED_ARCH = 36,
    // sparse description
    GGML_MACKO_STATUS_NOT_SPARSE        = 40, // no macko.version key
    GGML_MACKO_STATUS_FORMAT_VERSION    = 41, // the file was written by a newer version
    GGML_MACKO_STATUS_BAD_FORMAT        = 42, // unknown format name, index_bits or value type
    GGML_MACKO_STATUS_MISSING_COMPONENT = 43,
    GGML_MACKO_STATUS_BAD_COMPONENT     = 44, // wrong type, rank, length or position; unknown suffix
    // payload
    GGML_MACKO_STATUS_BAD_ROW_PTR   = 50,
    GGML_MACKO_STATUS_BAD_COLUMN    = 51, // deltas lead past the last column
    GGML_MACKO_STATUS_NOT_CANONICAL = 52,
    GGML_MACKO_STATUS_NOT_FINITE    = 53,
    GGML_MACKO_STATUS_BAD_NNZ       = 54,
    GGML_MACKO_STATUS_BAD_BLOCK     = 55, // EC-CSR: invalid set, block pointer or row index
    GGML_MACKO_STATUS_OVERLAP       = 56, // EC-CSR: two blocks contain the same element
};

// Type ids of matrices and their components. Ids below 1000 are ggml's, ids from 1000 up are our own (FORMAT.md
// sections 7 to 9). Dense matrices are F32, F16 or BF16. The other types of values occur only in the formats `packed`
// and `quantized`.
enum ggml_macko_type {
    GGML_MACKO_TYPE_F32   = 0,
    GGML_MACKO_TYPE_F16   = 1,
    GGML_MACKO_TYPE_I8    = 24, // I8, I16 and I32 are the types of components without values
    GGML_MACKO_TYPE_I16   = 25,
    GGML_MACKO_TYPE_I32   = 26,
    GGML_MACKO_TYPE_BF16  = 30,
    GGML_MACKO_TYPE_CODED = 1005, // lossless, 10 to 14 bits per value; a file stores it as words (I32)
    GGML_MACKO_TYPE_Q3    = 1013, // values of format `quantized`: 1010 + the bits of a code
    GGML_MACKO_TYPE_Q4    = 1014,
    GGML_MACKO_TYPE_Q5    = 1015,
    GGML_MACKO_TYPE_Q8    = 1018,
};

// ---- library ----

// Text of the last error on this thread; never NULL.
GGML_MACKO_API const char * ggml_macko_last_error(void);
// Name of a status, "GGML_MACKO_STATUS_..."; "unknown" if there is no such status.
GGML_MACKO_API const char * ggml_macko_status_name(int status);
// GGML_MACKO_API_VERSION of the library. A program that was compiled with another version must not call the library.
GGML_MACKO_API int32_t ggml_macko_api_version(void);
// Version of this package, for example "0.1.0".
GGML_MACKO_API const char * ggml_macko_version(void);
// The versions that the plugin was tested with. It was built with the headers of the newest llama-cpp-python.
GGML_MACKO_API const char * ggml_macko_oldest_llama_cpp_python(void);
GGML_MACKO_API const char * ggml_macko_newest_llama_cpp_python(void);
GGML_MACKO_API const char * ggml_macko_oldest_ggml(void);
GGML_MACKO_API const char * ggml_macko_newest_ggml(void);
// A line that says that the running ggml is another version; "" if it is not.
GGML_MACKO_API const char * ggml_macko_untested_ggml(void);
// Version of the libggml-base that this process has loaded.
GGML_MACKO_API const char * ggml_macko_running_ggml(void);
// The GPUs in use, or the reason why there are none, and the GPU architectures of this build. Queries the driver.
GGML_MACKO_API const char * ggml_macko_gpus(void);

// ---- environment ----

// An allowed word of an environment variable that holds words with commas between them, or a variable that holds a
// path.
struct ggml_macko_setting {
    const char * variable;
    const char * word; // NULL: a path
    const char * help; // a Markdown fragment
};
// Row i of the table of settings, or false after the last one. The strings live as long as the process.
GGML_MACKO_API bool ggml_macko_setting_at(int32_t i, struct ggml_macko_setting * setting);
// BAD_ARGUMENT, naming the variable, the word and the allowed ones, if the environment has a variable that begins with
// GGML_MACKO_ and is not in the table, or an unknown word in one that is.
GGML_MACKO_API int ggml_macko_check_environment(void);

// ---- codecs (FORMAT.md sections 3, 6, 7 and 9) ----

#define GGML_MACKO_MAX_ARRAYS  8
#define GGML_MACKO_MAX_OPTIONS 8

struct ggml_macko_array {
    const void * data;
    int64_t      nbytes;
    int32_t      type; // ggml type of the component tensor in the file
};

// A matrix in any format: its description from the file's header, and its components.
struct ggml_macko_matrix {
    int64_t                 struct_size;
    const char *            format; // a format name from ggml_macko_codec_at()
    int64_t                 rows;
    int64_t                 cols;
    int32_t                 type;       // type of the dense matrix: F32, F16 or BF16
    int32_t                 value_type; // of the stored values: `type`, or another type that the format allows
    int32_t                 index_bits; // macko.tensor.index_bits
    int64_t                 nnz;
    int32_t                 n_arrays;                      // number of components of the format
    struct ggml_macko_array arrays[GGML_MACKO_MAX_ARRAYS]; // in the order of the tensor table
};

struct ggml_macko_option { // an option of an encoder
    const char * name;
    int64_t      value;
};

struct ggml_macko_codec_info {
    int64_t                  struct_size;
    const char *             name;                            // value of macko.tensor.format
    int32_t                  n_arrays;                        // number of components
    const char *             suffixes[GGML_MACKO_MAX_ARRAYS]; // suffixes of the component names, with the dot
    int32_t                  n_options;
    struct ggml_macko_option options[GGML_MACKO_MAX_OPTIONS]; // options of the encoder, with their defaults
};
GGML_MACKO_API int32_t ggml_macko_codec_count(void);
// Describes codec i of ggml_macko_codec_count(). The strings live as long as the process.
GGML_MACKO_API int ggml_macko_codec_at(int32_t i, struct ggml_macko_codec_info * info);

// An encoded matrix; owns its memory.
struct ggml_macko_encoded;
// Encodes rows x cols dense elements. ggml_macko_codec_at() lists the options; a missing option has its default value:
//   macko   index_bits       1, 2, 4 or 8; 0: the width with the fewest bytes
//   packed  value_type       the dense type or CODED; -1: the dense type
//           index_bits       0: a bitmap; 2, 4, 8: gap codes; -1: the index with the fewest bytes
//           mantissa_bits    for CODED: 7 or 10 (BF16: 7); -1: the width with the fewest bytes
//           exponent_bits    for CODED: 2 or 3; -1: the width with the fewest bytes
//   quantized  value_type    Q3, Q4, Q5 or Q8, as in ggml_macko_encode_quantized() without weights
//   ec-csr  index_bits       4 or 8
//           max_granularity  maximum rows of a block: 1 (no extraction), 2, 4 ... 64
//           min_columns      minimum columns of an extracted block, a multiple of 128; 0: the number from which a block
//                            saves more than its bases cost (8-bit deltas 128, 4-bit 256), and no extraction at all if
//                            the result is smaller without it
//           clip             0 or 1: split blocks with more than twice the elements of an average row
//           seed             seed of the order in which rows look for partners; nothing else is random
// BAD_ARGUMENT for an unknown format or option. NOT_FINITE if a value is Inf or NaN, or too large for a scale.
// LIMIT if there are too many entries. The bytes do not depend on n_threads. EC-CSR compares all rows with each other,
// which takes seconds.
GGML_MACKO_API int ggml_macko_encode(const char * format, const void * dense, int32_t type, int64_t rows, int64_t cols,
                                     const struct ggml_macko_option * options, int32_t n_options, int n_threads,
                                     struct ggml_macko_encoded ** out);
// Encodes a matrix in format `quantized` with values of value_type Q3, Q4, Q5 or Q8. weights has n_weights rows of cols
// numbers, not negative; the matrix is a stack of n_weights matrices of equal size, and an error in column c of matrix
// i has weight weights[i][c]. NULL: all weights are 1. lattice: NULL, or a matrix of the format with the same shape and
// value type, whose levels, scales and factors are used instead of a search; its other arrays are not read. If the data
// of its scales and factors are NULL, scales are searched for its levels.
GGML_MACKO_API int ggml_macko_encode_quantized(const void * dense, int32_t type, int64_t rows, int64_t cols,
                                               int32_t value_type, const float * weights, int64_t n_weights,
                                               const struct ggml_macko_matrix * lattice, int n_threads,
                                               struct ggml_macko_encoded ** out);
// The standard levels of value_type, one of two tables (table 0 or 1), which a tool may choose for values that another
// program will encode: ggml_macko_encode_quantized() without a lattice finds the scales of such values, if each value
// is exactly scale * factor * level rounded to the dense type. levels has 2^bits elements.
GGML_MACKO_API int ggml_macko_standard_levels(int32_t value_type, int32_t table, int8_t * levels);
// The description and arrays of an encoded matrix, valid until the matrix is freed.
GGML_MACKO_API int  ggml_macko_encoded_matrix(const struct ggml_macko_encoded * e, struct ggml_macko_matrix * m);
GGML_MACKO_API void ggml_macko_encoded_free(struct ggml_macko_encoded * e);
// Checks an untrusted matrix completely.
GGML_MACKO_API int ggml_macko_validate(const struct ggml_macko_matrix * m, int n_threads);
// Checks like ggml_macko_validate and writes rows x cols dense elements of m->type. After an error some may be written.
GGML_MACKO_API int ggml_macko_decode(const struct ggml_macko_matrix * m, void * dense, int n_threads);

// Why an encoded matrix is not a valid encoding of the dense one.
enum ggml_macko_fault {
    GGML_MACKO_FAULT_NONE      = 0,
    GGML_MACKO_FAULT_NNZ       = 1, // the dense matrix has a different number of non-zeros
    GGML_MACKO_FAULT_NOT_ZERO  = 2, // a zero became a non-zero
    GGML_MACKO_FAULT_TOO_LARGE = 3, // an error exceeds the largest that the value type can cause
};

// How an encoded matrix differs from the dense one.
struct ggml_macko_error {
    int64_t struct_size;
    bool    is_equal;         // all elements are equal, bit for bit
    int32_t fault;            // an enum ggml_macko_fault
    int64_t row;              // NOT_ZERO, TOO_LARGE: position of the first faulty element; NONE: the worst row
    int64_t col;              //
    int64_t n_nonzero;        // non-zeros of the dense matrix, with -0.0 if that matches the encoded matrix
    double  max_error;        // largest error of an element
    double  rms_relative;     // RMS of a row's errors / RMS of the row; the mean over non-zero rows
    double  rms_relative_max; // the same in the worst row with 64 non-zeros and 2^-24 of the largest row's RMS
    double  rms_total;        // RMS of all errors / RMS of all elements
    double  weighted_error;   // sum of weight * error^2
    double  weighted_power;   // sum of weight * value^2
};
// Compares an encoded matrix with its dense original, rows x cols elements of m->type. weights has n_weights rows of
// cols numbers; the matrix is a stack of n_weights matrices of equal size, and an error in column c of matrix i has
// weight weights[i][c]. NULL: all weights are 1. Checks like ggml_macko_validate. The result does not depend on
// n_threads.
GGML_MACKO_API int ggml_macko_measure_error(const struct ggml_macko_matrix * m, const void * dense,
                                            const float * weights, int64_t n_weights, int n_threads,
                                            struct ggml_macko_error * out);

// How a device keeps a matrix in memory.
struct ggml_macko_layout {
    int64_t      struct_size;
    int64_t      nbytes;     // bytes of device memory that are reserved; the header of the matrix decides them
    int64_t      own_nbytes; // bytes that a GPU allocates in addition for an unusual structure; 0: none
    const char * name;       // name of the layout; without data, the first choice
    bool         is_settled; // no other layout is possible
    int32_t      delta_bits; // 0: the layout has none
    int32_t      lanes;      // runs per row; 0: the layout has none
    bool         bank_order; // entries are ordered by the banks of shared memory
    char         reason[1024];
};
// The layout of a matrix on an NVIDIA GPU, and the reasons for it. The header decides the number of bytes. The data
// pointers of the arrays may be NULL, but the arrays must have their final types and sizes. With data, the matrix is
// checked like in ggml_macko_validate, and a survey of its values settles the layout. stacked: the rows are those of
// several matrices (experts), one after the other. shared_nbytes: shared memory that a block can use on the GPU
// (sharedMemPerBlockOptin of cudaDeviceProp). Needs no GPU.
GGML_MACKO_API int ggml_macko_gpu_layout(const struct ggml_macko_matrix * m, bool stacked, int64_t shared_nbytes,
                                         int n_threads, struct ggml_macko_layout * layout);
// The layout of a matrix for the CPU kernels in use. The header of the matrix decides it. A matrix in layout BUNDLES
// becomes a BITMAP during loading if it needs more than nbytes.
GGML_MACKO_API int ggml_macko_cpu_layout(const struct ggml_macko_matrix * m, struct ggml_macko_layout * layout);

// The number of elements in MACKO's values, and of bytes in its deltas, for n_stored entries (non-zeros and fillers).
GGML_MACKO_API int64_t ggml_macko_n_padded(int64_t n_stored);
GGML_MACKO_API int64_t ggml_macko_deltas_nbytes(int64_t n_stored, int32_t delta_bits);

// The size of a dense matrix as MACKO, for all four delta widths in one pass.
struct ggml_macko_count {
    int64_t nnz;
    int64_t n_stored[4]; // for delta_bits 1, 2, 4, 8
    int64_t n_nonfinite; // Inf and NaN; a tensor that contains them stays dense
};
GGML_MACKO_API int ggml_macko_count_dense(const void * dense, int32_t type, int64_t rows, int64_t cols, int n_threads,
                                          struct ggml_macko_count * count);

// Replaces each -0.0 among n values (F32, F16 or BF16) by +0.0, in place; *count is the number of replaced values. The
// codecs store a -0.0 as a non-zero (FORMAT.md section 2), so writers call this function first, unless every bit must
// be kept.
GGML_MACKO_API int ggml_macko_drop_negative_zeros(void * values, int32_t type, int64_t n, int n_threads,
                                                  int64_t * count);

// ---- CPU kernels on plain arrays ----

// A matrix in the layout that is fastest on this CPU; owns its memory.
struct ggml_macko_cpu_matrix;
// Checks like ggml_macko_validate. A format without a CPU layout is converted to MACKO rows.
GGML_MACKO_API int     ggml_macko_cpu_matrix_init(const struct ggml_macko_matrix * m, int n_threads,
                                                  struct ggml_macko_cpu_matrix ** out);
GGML_MACKO_API void    ggml_macko_cpu_matrix_free(struct ggml_macko_cpu_matrix * m);
GGML_MACKO_API int64_t ggml_macko_cpu_matrix_nbytes(const struct ggml_macko_cpu_matrix * m);
// y[n][rows] = x[n][cols] * W^T, float32, contiguous; y must not overlap x
GGML_MACKO_API int ggml_macko_cpu_mul_mat(const struct ggml_macko_cpu_matrix * m, const float * x, float * y, int64_t n,
                                          int n_threads);
// Name of the kernel set in use ("avx512-vbmi2", "avx2-vnni", "avx2", "portable" ...). It is chosen once, from the CPU
// or from the environment variable GGML_MACKO_CPU_KERNELS. With an unknown or unsupported name in that variable, the
// plugin refuses to load any sparse model.
GGML_MACKO_API const char * ggml_macko_cpu_kernels(void);

// ---- files ----

struct ggml_macko_file; // a dense or sparse GGUF file whose header passed all checks

// require_model: also check the model metadata that llama.cpp reads (SECURITY.md), and refuse split files.
GGML_MACKO_API int     ggml_macko_file_open(const char * path, bool require_model, struct ggml_macko_file ** out);
GGML_MACKO_API void    ggml_macko_file_close(struct ggml_macko_file * file);
GGML_MACKO_API bool    ggml_macko_file_is_sparse(const struct ggml_macko_file * file);
GGML_MACKO_API int64_t ggml_macko_file_size(const struct ggml_macko_file * file);
GGML_MACKO_API int64_t ggml_macko_file_alignment(const struct ggml_macko_file * file);

struct ggml_macko_tensor_info { // a tensor in the file's own tensor table, where components are tensors
    int64_t      struct_size;
    const char * name; // owned by the file
    int32_t      type; // ggml type id
    int32_t      n_dims;
    int64_t      ne[4];  // unused dimensions 1
    int64_t      offset; // offset of the data, from the start of the file
    int64_t      nbytes;
    int64_t      sparse_index; // the sparse matrix that this tensor is a component of, or -1
};
GGML_MACKO_API int64_t ggml_macko_file_n_tensors(const struct ggml_macko_file * file);
GGML_MACKO_API int     ggml_macko_file_tensor(const struct ggml_macko_file * file, int64_t i,
                                              struct ggml_macko_tensor_info * info);

struct ggml_macko_sparse_info { // a sparse matrix in a file
    int64_t      struct_size;
    const char * name;       // dense name X
    const char * format;     // a format name from ggml_macko_codec_at()
    int32_t      type;       // dense ggml type
    int32_t      value_type; // of the stored values: `type`, or another type that the format allows
    int32_t      index_bits; // macko.tensor.index_bits
    int32_t      n_dims;     // dimensions of the dense tensor
    int64_t      ne[4];      // dense shape
    int64_t      nnz;
    int64_t      nbytes; // bytes of all components
    int64_t      nbytes_dense;
    int64_t      first_tensor; // its first component in the tensor table; FORMAT.md has the order
    int64_t      n_components;
};
GGML_MACKO_API int64_t ggml_macko_file_n_sparse(const struct ggml_macko_file * file);
GGML_MACKO_API int     ggml_macko_file_sparse(const struct ggml_macko_file * file, int64_t i,
                                              struct ggml_macko_sparse_info * info);
// Checks the payload of matrix i on a private copy, in blocks of rows or as a whole.
GGML_MACKO_API int ggml_macko_file_check_payload(const struct ggml_macko_file * file, int64_t i, int n_threads);

// How llama.cpp uses a weight with a given name. Only weights of matrix products and the embeddings of tokens can be
// stored sparse, because the devices support no other operations on sparse weights.
enum ggml_macko_weight_use {
    GGML_MACKO_WEIGHT_OTHER = 0, // used by another lookup or an addition, or too small to matter
    GGML_MACKO_WEIGHT_BLOCK = 1, // multiplied inside a block; 3-D: the weights of the block's experts
    GGML_MACKO_WEIGHT_HEAD  = 2, // the output matrix, or the embeddings of tokens, which may also be the output matrix
};
// Returns an enum ggml_macko_weight_use.
GGML_MACKO_API int ggml_macko_weight_use_of(const char * name, int32_t n_dims);

// ---- loading into llama.cpp ----

enum ggml_macko_load_flags {
    GGML_MACKO_LOAD_COMPRESS = 1, // encode the weights of a dense model that shrink, while the model loads
    // with LOAD_COMPRESS: keep -0.0 bit for bit, at the cost of an entry; without this flag -0.0 counts as zero
    GGML_MACKO_LOAD_KEEP_NEGATIVE_ZEROS = 2,
    // fail if llama.cpp places a sparse tensor on a device of another backend; without this flag the tensor becomes
    // dense
    GGML_MACKO_LOAD_SPARSE_ONLY = 4,
    // fail if there are no metadata rules for the architecture of a sparse file; without this flag the log has a
    // warning
    GGML_MACKO_LOAD_STRICT = 8,
    // keep the CPU's weights in a cache file, in their memory layout. The next load of the unchanged model maps that
    // file instead of reading and checking the model again. The log names the file, or the reason why there is none.
    GGML_MACKO_LOAD_CACHE = 16,
    // one token at a time, the CPU counts activations below the file's thresholds as zero
    GGML_MACKO_LOAD_ACT_THRESHOLDS = 32,
};

// Byte offsets of the members of llama_model_params in the running llama.cpp; -1: the member does not exist. The struct
// differs between versions, so this library accesses it only through these offsets.
struct ggml_macko_params_layout {
    int32_t nbytes; // size of the struct; at most 256
    int32_t progress_callback;
    int32_t progress_callback_user_data;
    int32_t vocab_only;
    int32_t check_tensors;
    int32_t no_alloc;
    int32_t split_mode; // an enum
    int32_t load_mode;  // an enum; it replaced the next three members
    int32_t use_mmap;
    int32_t use_direct_io;
    int32_t use_mlock;
};

struct llama_model;
struct llama_model_params;
// Functions of the process's libllama, to which this library is not linked, cast to a type that cffi can bind.
struct ggml_macko_llama {
    int64_t struct_size;
    void (*load_from_file)(void);     // llama_model_load_from_file
    void (*load_from_file_ptr)(void); // llama_model_load_from_file_ptr
    void (*model_free)(void);         // llama_model_free
    struct ggml_macko_params_layout params;
};

// Replaces llama_model_load_from_file for dense and sparse files. A sparse file is checked and then passed to
// load_from_file_ptr as the dense GGUF that it represents. It is never memory-mapped, and check_tensors has no effect.
// For a split model, path is the first file, and the other files lie beside it. Every other regular file is passed to
// load_from_file. flags: a combination of enum ggml_macko_load_flags, to which GGML_MACKO_LOAD in the environment adds.
// BAD_ARGUMENT for every file if that variable has an unknown word, and for a sparse file if
// ggml_macko_check_environment() fails. A progress callback may load other models.
// On OK, *model is the result of llama.cpp: it is null if llama.cpp refused a file that is not sparse. On an error
// *model is null, and the message is the first error of a device, or names a matrix that was not placed on a device of
// this plugin. LOAD_FAILED if llama.cpp refused the model, and for a sparse file with LLAMA_SPLIT_MODE_TENSOR;
// NOT_A_FILE for a directory, FIFO, socket or device; VERSION_MISMATCH for a sparse file if
// ggml_macko_check_running_ggml() fails.
GGML_MACKO_API int ggml_macko_load_model(const char * path, const struct llama_model_params * params, int32_t flags,
                                         const struct ggml_macko_llama * llama, struct llama_model ** model);
// Finds the layout of llama_model_params for a caller without llama.cpp's headers. default_params is the
// llama_model_default_params of its libllama; the function is called. has_load_mode: its libllama has
// llama_load_mode_name. VERSION_MISMATCH if the struct has none of the known sizes.
GGML_MACKO_API int ggml_macko_find_params_layout(void (*default_params)(void), int32_t has_load_mode,
                                                 struct ggml_macko_params_layout * layout);
// Checks that the structs and operations of this process's libggml-base are those that the plugin needs. The check runs
// once. ggml_backend_load refuses the plugin if the result is not OK, which is VERSION_MISMATCH with the first
// difference. The version decides only if GGML_MACKO_ENABLE has strict-versions: an untested one is then refused.
GGML_MACKO_API int ggml_macko_check_running_ggml(void);
