// ggml-macko: sparse weights for stock llama.cpp. The whole C API; no ggml type appears here, so cffi can bind it.
//
// Conventions
//   - Functions return ggml_macko_status unless said otherwise. On an error ggml_macko_last_error() has one line of
//     text, valid until the next call of this library on the same thread. Nothing throws, aborts or prints.
//   - Matrices are row-major, rows x cols, cols = ggml's ne[0]. Types are ggml type ids (enum ggml_macko_type).
//   - n_threads <= 0 means all cores.
//   - The file format is FORMAT.md.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
#define GGML_MACKO_API extern "C" __attribute__((visibility("default")))
#else
#define GGML_MACKO_API __attribute__((visibility("default")))
#endif

enum ggml_macko_status {
    GGML_MACKO_STATUS_OK = 0,
    // the call
    GGML_MACKO_STATUS_BAD_ARGUMENT     = 1, // a null pointer, a negative count, a shape that does not fit
    GGML_MACKO_STATUS_OUT_OF_MEMORY    = 2,
    GGML_MACKO_STATUS_VERSION_MISMATCH = 3, // the running llama.cpp is not the one the plugin was built for
    GGML_MACKO_STATUS_CANCELLED        = 4, // a progress callback asked to stop
    GGML_MACKO_STATUS_LOAD_FAILED      = 5, // llama.cpp refused a model that passed our checks
    // the file system
    GGML_MACKO_STATUS_IO           = 10, // errno text is in the message
    GGML_MACKO_STATUS_NOT_A_FILE   = 11, // directory, FIFO, device
    GGML_MACKO_STATUS_TRUNCATED    = 12, // the file ends before what its header declares
    GGML_MACKO_STATUS_FILE_CHANGED = 13, // size, inode or mtime changed while it was read
    // GGUF structure
    GGML_MACKO_STATUS_BAD_MAGIC        = 20,
    GGML_MACKO_STATUS_BAD_GGUF_VERSION = 21, // other than 3, or big-endian
    GGML_MACKO_STATUS_LIMIT            = 22, // beyond a limit of FORMAT.md section 4
    GGML_MACKO_STATUS_BAD_KEY          = 23, // malformed or reserved key
    GGML_MACKO_STATUS_DUPLICATE_KEY    = 24,
    GGML_MACKO_STATUS_BAD_KEY_TYPE     = 25, // wrong value type for a known key
    GGML_MACKO_STATUS_BAD_KEY_VALUE    = 26, // value out of the range that llama.cpp survives
    GGML_MACKO_STATUS_MISSING_KEY      = 27,
    GGML_MACKO_STATUS_BAD_ALIGNMENT    = 28,
    GGML_MACKO_STATUS_BAD_NAME         = 29, // tensor name empty, too long or not printable
    GGML_MACKO_STATUS_DUPLICATE_TENSOR = 30, // the same name twice, or both dense X and sparse X.*
    GGML_MACKO_STATUS_BAD_TYPE         = 31, // unknown ggml type
    GGML_MACKO_STATUS_BAD_SHAPE        = 32,
    GGML_MACKO_STATUS_BAD_OFFSET       = 33, // hole, overlap or misalignment in the data section
    GGML_MACKO_STATUS_TRAILING_DATA    = 34,
    GGML_MACKO_STATUS_SPLIT_FILE       = 35,
    GGML_MACKO_STATUS_UNSUPPORTED_ARCH = 36,
    // sparse description
    GGML_MACKO_STATUS_NOT_SPARSE        = 40, // no macko.version key
    GGML_MACKO_STATUS_FORMAT_VERSION    = 41, // written by a newer version
    GGML_MACKO_STATUS_BAD_FORMAT        = 42, // unknown format name, delta_bits or value type
    GGML_MACKO_STATUS_MISSING_COMPONENT = 43,
    GGML_MACKO_STATUS_BAD_COMPONENT     = 44, // wrong type, rank, length or place; unknown suffix
    // payload
    GGML_MACKO_STATUS_BAD_ROW_PTR   = 50,
    GGML_MACKO_STATUS_BAD_COLUMN    = 51, // deltas walk past the last column
    GGML_MACKO_STATUS_NOT_CANONICAL = 52,
    GGML_MACKO_STATUS_NOT_FINITE    = 53,
    GGML_MACKO_STATUS_BAD_NNZ       = 54,
    GGML_MACKO_STATUS_BAD_BLOCK     = 55, // EC-CSR: a set, block pointer or row index
    GGML_MACKO_STATUS_OVERLAP       = 56, // EC-CSR: two blocks hold one element
};

// Type ids of matrices and their components, ggml's but for those from 1000 up (FORMAT.md sections 7 and 8). Dense
// matrices are F32, F16 or BF16; quantized and coded values occur in packed matrices only.
enum ggml_macko_type {
    GGML_MACKO_TYPE_F32   = 0,
    GGML_MACKO_TYPE_F16   = 1,
    GGML_MACKO_TYPE_Q4_0  = 2,
    GGML_MACKO_TYPE_Q5_0  = 6,
    GGML_MACKO_TYPE_Q8_0  = 8,
    GGML_MACKO_TYPE_I8    = 24, // I8, I16 and I32: components that are not values
    GGML_MACKO_TYPE_I16   = 25,
    GGML_MACKO_TYPE_I32   = 26,
    GGML_MACKO_TYPE_BF16  = 30,
    GGML_MACKO_TYPE_Q4_NL = 1004, // this library's own; in a file its blocks are bytes (I8)
    GGML_MACKO_TYPE_CODED = 1005, // without loss in 10 to 14 bits; in a file words (I32)
};

// ---- library ----

// text of the last error on this thread; never NULL
GGML_MACKO_API const char * ggml_macko_last_error(void);
// "GGML_MACKO_STATUS_..." of a code; "unknown" for others
GGML_MACKO_API const char * ggml_macko_status_name(int status);
// version of this package, for example "0.1.0"
GGML_MACKO_API const char * ggml_macko_version(void);
// the range of versions that the plugin is for; it was built with the headers of the newest
GGML_MACKO_API const char * ggml_macko_oldest_llama_cpp_python(void);
GGML_MACKO_API const char * ggml_macko_newest_llama_cpp_python(void);
GGML_MACKO_API const char * ggml_macko_oldest_ggml(void);
GGML_MACKO_API const char * ggml_macko_newest_ggml(void);
// that of the libggml-base of this process
GGML_MACKO_API const char * ggml_macko_running_ggml(void);
// the GPUs that are used, or why there are none, and what this build has kernels for; asks the driver
GGML_MACKO_API const char * ggml_macko_gpus(void);

// ---- codecs (FORMAT.md sections 3, 6 and 7) ----

#define GGML_MACKO_MAX_ARRAYS  8
#define GGML_MACKO_MAX_OPTIONS 8

struct ggml_macko_array {
    const void * data;
    int64_t      nbytes;
    int32_t      type; // ggml type of the component tensor on file
};

// a matrix of any format: what a file's header says of it, and its components
struct ggml_macko_matrix {
    const char *            format; // a name of ggml_macko_codec_at()
    int64_t                 rows;
    int64_t                 cols;
    int32_t                 type;       // of the dense matrix: F32, F16 or BF16
    int32_t                 value_type; // of the stored values: the same, or in some formats a quantized type
    int32_t                 bits;       // macko.tensor.delta_bits
    int64_t                 nnz;
    int32_t                 n_arrays;                      // as many as the format has components
    struct ggml_macko_array arrays[GGML_MACKO_MAX_ARRAYS]; // in the order of the tensor table
};

struct ggml_macko_option { // of an encoder
    const char * name;
    int64_t      value;
};

struct ggml_macko_codec_info {
    const char *             name;                            // in macko.tensor.format
    int32_t                  n_arrays;                        // components
    const char *             suffixes[GGML_MACKO_MAX_ARRAYS]; // of their names, with the dot
    int32_t                  n_options;
    struct ggml_macko_option options[GGML_MACKO_MAX_OPTIONS]; // of the encoder, with their defaults
};
GGML_MACKO_API int32_t ggml_macko_codec_count(void);
// codec i of ggml_macko_codec_count(); the strings live as long as the process
GGML_MACKO_API int ggml_macko_codec_at(int32_t i, struct ggml_macko_codec_info * info);

// an encoded matrix; owns its memory
struct ggml_macko_encoded;
// Encodes rows x cols dense elements. Options are those of ggml_macko_codec_at(); what is not given has its default:
//   macko   delta_bits       1, 2, 4 or 8; 0: what takes the fewest bytes
//   packed  value_type       the dense type, CODED, Q8_0, Q5_0, Q4_0 or Q4_NL; -1: the dense type. Quantizing rounds as
//                            ggml's reference quantizer does; Q4_NL as ggml_macko_quantize_q4_nl does without weights
//           index_bits       0: a bitmap; 2, 4, 8: gap codes; -1: what takes the fewest bytes
//           mantissa_bits    of coded values, 7 or 10 (BF16: 7); -1: what takes the fewest bytes
//           exponent_bits    of coded values, 2 or 3; -1: what takes the fewest bytes
//   ec-csr  delta_bits       4 or 8
//           max_granularity  rows of a block: 1 (no extraction), 2, 4 ... 64
//           min_columns      of an extracted block, a multiple of 128; 0: where it pays for its bases (8-bit deltas
//                            128, 4-bit 256), and no extraction at all if that is smaller
//           clip             0 or 1: cut blocks with more than twice the elements of an average row
//           seed             of the order in which rows look for partners; the result depends on nothing else
// BAD_ARGUMENT for an unknown format or option; NOT_FINITE if a value is Inf or NaN, or too large for a scale in F16;
// LIMIT if there are too many entries. Same bytes for any n_threads. EC-CSR compares all rows with each other: seconds.
GGML_MACKO_API int ggml_macko_encode(const char * format, const void * dense, int32_t type, int64_t rows, int64_t cols,
                                     const struct ggml_macko_option * options, int32_t n_options, int n_threads,
                                     struct ggml_macko_encoded ** out);
// its description and arrays, valid until it is freed
GGML_MACKO_API int  ggml_macko_encoded_matrix(const struct ggml_macko_encoded * e, struct ggml_macko_matrix * m);
GGML_MACKO_API void ggml_macko_encoded_free(struct ggml_macko_encoded * e);
// full check of an untrusted matrix
GGML_MACKO_API int ggml_macko_validate(const struct ggml_macko_matrix * m, int n_threads);
// checks like ggml_macko_validate, and writes rows x cols dense elements of m->type; on an error some may be written
GGML_MACKO_API int ggml_macko_decode(const struct ggml_macko_matrix * m, void * dense, int n_threads);

// what makes an encoded matrix none that the dense one can become
enum ggml_macko_fault {
    GGML_MACKO_FAULT_NONE      = 0,
    GGML_MACKO_FAULT_NNZ       = 1, // the dense matrix has another number of non-zeros
    GGML_MACKO_FAULT_NOT_ZERO  = 2, // a zero did not stay one
    GGML_MACKO_FAULT_TOO_LARGE = 3, // an error is larger than the type of the values allows
};

// what encoding did to a matrix
struct ggml_macko_error {
    bool    is_equal;         // all elements are the same, bit for bit
    int32_t fault;            // an enum ggml_macko_fault
    int64_t row;              // of the first element that is at fault (NOT_ZERO, TOO_LARGE)
    int64_t col;              //
    int64_t n_nonzero;        // of the dense matrix; -0.0 counts if that makes as many as the encoded one has
    double  max_error;        // of any element
    double  rms_relative;     // RMS of a row's errors over RMS of the row: mean of the rows that are not zero
    double  rms_relative_max; // ... and the worst row
    double  weighted_error;   // sum of weight * error^2
    double  weighted_power;   // sum of weight * value^2
};
// Compares a matrix with the dense one, rows x cols elements of m->type, that it was made from. weights: n_weights rows
// of cols numbers; the matrix is n_weights matrices of equal size, one below the other, and an error in column c of
// matrix i counts weights[i][c]. NULL: 1. Checks like ggml_macko_validate. Same result for any n_threads.
GGML_MACKO_API int ggml_macko_measure_error(const struct ggml_macko_matrix * m, const void * dense,
                                            const float * weights, int64_t n_weights, int n_threads,
                                            struct ggml_macko_error * out);

// How a device keeps a matrix in memory.
struct ggml_macko_layout {
    int64_t      nbytes;     // of the device's memory that are reserved, which the header of the matrix decides
    int64_t      own_nbytes; // of memory beside it, which a GPU takes for a matrix of unusual structure; 0: none
    const char * name;       // of the layout; of a matrix without data the one that comes first
    bool         is_settled; // no other layout is possible
    int32_t      delta_bits; // 0: the layout has none
    int32_t      lanes;      // runs per row; 0: the layout has none
    bool         bank_order; // entries are in the order of the banks of shared memory
    char         reason[1024];
};
// The layout that an NVIDIA GPU gives a matrix, and why. The header decides the bytes; data of the arrays may be NULL:
// their types and sizes are what the file has, or will have. With data the matrix is checked like in
// ggml_macko_validate, and a survey of its values settles the layout. stacked: several matrices (experts) follow each
// other in the rows. shared_nbytes: shared memory that a block may use on the GPU (sharedMemPerBlockOptin of
// cudaDeviceProp). Needs no GPU.
GGML_MACKO_API int ggml_macko_gpu_layout(const struct ggml_macko_matrix * m, bool stacked, int64_t shared_nbytes,
                                         int n_threads, struct ggml_macko_layout * layout);
// The layout that the CPU kernels in use give a matrix, which its header decides. A matrix in BUNDLES that takes more
// than nbytes becomes a BITMAP when it is loaded.
GGML_MACKO_API int ggml_macko_cpu_layout(const struct ggml_macko_matrix * m, struct ggml_macko_layout * layout);

// elements of MACKO's values, and bytes of its deltas, for n_stored entries (non-zeros and fillers)
GGML_MACKO_API int64_t ggml_macko_n_padded(int64_t n_stored);
GGML_MACKO_API int64_t ggml_macko_deltas_nbytes(int64_t n_stored, int32_t delta_bits);

// what a dense matrix needs as MACKO, for all four widths in one pass
struct ggml_macko_count {
    int64_t nnz;
    int64_t n_stored[4]; // for delta_bits 1, 2, 4, 8
    int64_t n_nonfinite; // Inf and NaN: such a tensor stays dense
};
GGML_MACKO_API int ggml_macko_count_dense(const void * dense, int32_t type, int64_t rows, int64_t cols, int n_threads,
                                          struct ggml_macko_count * count);

// Sets each -0.0 of n values (F32, F16 or BF16) to +0.0, in place; *count is how many there were. To the codecs a -0.0
// is a non-zero (FORMAT.md section 2): writers call this first, unless every bit is to be kept.
GGML_MACKO_API int ggml_macko_drop_negative_zeros(void * values, int32_t type, int64_t n, int n_threads,
                                                  int64_t * count);

// Quantizes n values of value_type (F32, F16 or BF16) to Q4_NL: for each block of 32 the scale, of those tried, with
// the least sum of weights[i] * error^2. blocks has 18 bytes for each 32 values begun, and at least 18. weights are not
// negative; NULL weighs all alike. NOT_FINITE if a value is too large for a scale in F16. Same bytes for any n_threads.
GGML_MACKO_API int ggml_macko_quantize_q4_nl(const void * values, int32_t value_type, const float * weights, int64_t n,
                                             int n_threads, void * blocks);

// Replaces each number of n / 32 blocks of a type, Q8_0, Q5_0 or Q4_0, by the one nearest to its value of
// value_type, and leaves their scales. n is a multiple of 32. NOT_FINITE if a scale is Inf or NaN. Same bytes for any
// n_threads.
GGML_MACKO_API int ggml_macko_round_to_scales(const void * values, int32_t value_type, int64_t n, int32_t type,
                                              int n_threads, void * blocks);

// ---- CPU kernels on plain arrays ----

// a matrix in the layout that is fastest on this CPU; owns its memory
struct ggml_macko_cpu_matrix;
// checks like ggml_macko_validate; a format that the kernels have no layout for is recoded to MACKO rows
GGML_MACKO_API int     ggml_macko_cpu_matrix_init(const struct ggml_macko_matrix * m, int n_threads,
                                                  struct ggml_macko_cpu_matrix ** out);
GGML_MACKO_API void    ggml_macko_cpu_matrix_free(struct ggml_macko_cpu_matrix * m);
GGML_MACKO_API int64_t ggml_macko_cpu_matrix_nbytes(const struct ggml_macko_cpu_matrix * m);
// y[n][rows] = x[n][cols] * W^T, float32, contiguous; y must not overlap x
GGML_MACKO_API int ggml_macko_cpu_mul_mat(const struct ggml_macko_cpu_matrix * m, const float * x, float * y, int64_t n,
                                          int n_threads);
// name of the kernel set in use ("avx512-vbmi2", "avx512", "avx2", "portable"). Chosen once from the CPU, or by the
// environment variable GGML_MACKO_FORCE; an unknown or unsupported name there makes the plugin refuse to load any
// sparse model.
GGML_MACKO_API const char * ggml_macko_cpu_kernels(void);

// ---- files ----

struct ggml_macko_file; // a GGUF file, dense or sparse, whose header passed all checks

// require_model: also vet the model metadata that llama.cpp reads (FORMAT.md section 5), and refuse split files
GGML_MACKO_API int     ggml_macko_file_open(const char * path, bool require_model, struct ggml_macko_file ** out);
GGML_MACKO_API void    ggml_macko_file_close(struct ggml_macko_file * file);
GGML_MACKO_API bool    ggml_macko_file_is_sparse(const struct ggml_macko_file * file);
GGML_MACKO_API int64_t ggml_macko_file_size(const struct ggml_macko_file * file);
GGML_MACKO_API int64_t ggml_macko_file_alignment(const struct ggml_macko_file * file);

struct ggml_macko_tensor_info { // a tensor of the file's own tensor table (components are tensors here)
    const char * name;          // owned by the file
    int32_t      type;          // ggml type id
    int32_t      n_dims;
    int64_t      ne[4];  // unused dimensions 1
    int64_t      offset; // of the data, from the start of the file
    int64_t      nbytes;
    int64_t      sparse_index; // index of the sparse matrix it is a component of, or -1
};
GGML_MACKO_API int64_t ggml_macko_file_n_tensors(const struct ggml_macko_file * file);
GGML_MACKO_API int     ggml_macko_file_tensor(const struct ggml_macko_file * file, int64_t i,
                                              struct ggml_macko_tensor_info * info);

struct ggml_macko_sparse_info { // a sparse matrix of the file
    const char * name;          // dense name X
    const char * format;        // a name of ggml_macko_codec_at()
    int32_t      type;          // dense ggml type
    int32_t      value_type;    // of the stored values: the same, or in some formats a quantized type
    int32_t      bits;          // macko.tensor.delta_bits
    int32_t      n_dims;        // of the dense tensor
    int64_t      ne[4];         // dense shape
    int64_t      nnz;
    int64_t      nbytes; // of all components
    int64_t      nbytes_dense;
    int64_t      first_tensor; // of its components in the tensor table; FORMAT.md sections 3, 6 and 7 have their order
    int64_t      n_components;
};
GGML_MACKO_API int64_t ggml_macko_file_n_sparse(const struct ggml_macko_file * file);
GGML_MACKO_API int     ggml_macko_file_sparse(const struct ggml_macko_file * file, int64_t i,
                                              struct ggml_macko_sparse_info * info);
// validates the payload of matrix i on a private copy, in blocks of rows or as a whole
GGML_MACKO_API int ggml_macko_file_check_payload(const struct ggml_macko_file * file, int64_t i, int n_threads);

// What llama.cpp does with a weight of this name. Only weights of matrix products may be stored sparse, because devices
// hold nothing else sparse.
enum ggml_macko_weight_use {
    GGML_MACKO_WEIGHT_OTHER = 0, // looked up, added, or too small to matter
    GGML_MACKO_WEIGHT_BLOCK = 1, // multiplied, in a block; 3-D: the weights of its experts
    GGML_MACKO_WEIGHT_HEAD  = 2, // multiplied: the output matrix
};
// an enum ggml_macko_weight_use
GGML_MACKO_API int ggml_macko_weight_use_of(const char * name, int32_t n_dims);

// ---- loading into llama.cpp ----

enum ggml_macko_load_flags {
    GGML_MACKO_LOAD_COMPRESS = 1, // of a dense model, encode the weights that shrink while they are read
    // with LOAD_COMPRESS: -0.0 stays a value, bit for bit and at the price of an entry; else it counts as zero
    GGML_MACKO_LOAD_KEEP_NEGATIVE_ZEROS = 2,
    // a sparse tensor that llama.cpp places on a device of another backend is an error; else it becomes dense there
    GGML_MACKO_LOAD_SPARSE_ONLY = 4,
    // a sparse file of an architecture for whose metadata there are no rules is an error; else the log warns of it
    GGML_MACKO_LOAD_STRICT = 8,
    // weights on the CPU are kept in a file as they are in memory, and mapped by the next load of the unchanged model,
    // which does not read and check it again; the log says where, and why not if there can be no such file
    GGML_MACKO_LOAD_CACHE = 16,
};

// Where the running llama.cpp has the members of its llama_model_params, in bytes from the beginning; -1: it does not
// have that member. The struct changes from version to version, so this library knows it only by this.
struct ggml_macko_params_layout {
    int32_t nbytes; // of the struct; at most 256
    int32_t progress_callback;
    int32_t progress_callback_user_data;
    int32_t vocab_only;
    int32_t check_tensors;
    int32_t no_alloc;
    int32_t load_mode; // an enum; before it, the next three
    int32_t use_mmap;
    int32_t use_direct_io;
    int32_t use_mlock;
};

struct llama_model;
struct llama_model_params;
// functions of the process's libllama, which this library is not linked to, cast to a type that cffi can bind
struct ggml_macko_llama {
    void (*load_from_file)(void);     // llama_model_load_from_file
    void (*load_from_file_ptr)(void); // llama_model_load_from_file_ptr
    void (*model_free)(void);         // llama_model_free
    struct ggml_macko_params_layout params;
};

// llama_model_load_from_file for files dense and sparse. A sparse file (of a split model the first; the others lie
// beside it) is vetted and given to load_from_file_ptr as the dense GGUF that it stands for, never memory-mapped;
// check_tensors has no effect on it. Any other regular file is load_from_file's to judge. flags: of enum
// ggml_macko_load_flags. A progress callback may load other models.
// *model is what llama.cpp returned: with OK it is null if llama.cpp refused a file that is not sparse. On an error it
// is null, and the message is the first error of a device, or names a matrix that was not placed on a device of this
// plugin; LOAD_FAILED if llama.cpp refused the model; NOT_A_FILE for a directory, FIFO, socket or device.
GGML_MACKO_API int ggml_macko_load_model(const char * path, const struct llama_model_params * params, int32_t flags,
                                         const struct ggml_macko_llama * llama, struct llama_model ** model);
// The layout in the versions of llama.cpp that the plugin is for, for programs that cannot tell it: default_params is
// their llama_model_default_params, which is called; has_load_mode: they have llama_load_mode_name. VERSION_MISMATCH if
// the struct has none of the known sizes.
GGML_MACKO_API int ggml_macko_find_params_layout(void (*default_params)(void), int32_t has_load_mode,
                                                 struct ggml_macko_params_layout * layout);
// VERSION_MISMATCH, naming the range, if ggml_version is not in the range that the plugin is for, and the environment
// does not have GGML_MACKO_ANY_VERSION=1
GGML_MACKO_API int ggml_macko_check_ggml(const char * ggml_version);
// ggml_macko_check_ggml of the libggml-base of this process, and that it has its structs and operations as the plugin
// expects them; checked once. ggml_backend_load refuses the plugin if this is not OK.
GGML_MACKO_API int ggml_macko_check_running_ggml(void);
