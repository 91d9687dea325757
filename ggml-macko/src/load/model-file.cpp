// Opens a GGUF model, checks what it says of sparse tensors (FORMAT.md sections 1-4), and reads payload block by block.
// Payload is always validated on a private copy, never on the file itself: the file may change under us.
#include "codec/macko/encode.h"
#include "load/compress.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <omp.h>
#include <string_view>

namespace macko {

constexpr int32_t TYPE_I8        = 24; // ggml type ids of components
constexpr int32_t TYPE_I16       = 25;
constexpr int32_t TYPE_I32       = 26;
constexpr int64_t FORMAT_VERSION = 5;
constexpr int32_t RECODED_BITS   = 4; // delta_bits of a packed matrix for a consumer that wants MACKO
// a key behind that many bytes is not looked for: real headers have 20 MB at most
constexpr int64_t CLAIM_SEARCH_NBYTES = 64 << 20;
// of payload: half of an L2 cache, and a few hundred microseconds of work
constexpr int64_t BLOCK_NBYTES = 512 << 10;
constexpr size_t  MAX_SUFFIX   = 8;

static const char * const MACKO_COMPONENTS[]  = { ".values", ".deltas", ".row_ptr" };
static const char * const EC_CSR_COMPONENTS[] = { ".values", ".deltas", ".bases", ".blk_ptr", ".rows", ".sets" };
static const char * const PACKED_COMPONENTS[] = { ".values", ".index", ".row_ptr" };
const sparse_format       FORMAT_MACKO        = { "macko", 1, std::size(MACKO_COMPONENTS), MACKO_COMPONENTS };
const sparse_format       FORMAT_EC_CSR       = { "ec-csr", 2, std::size(EC_CSR_COMPONENTS), EC_CSR_COMPONENTS };
const sparse_format       FORMAT_PACKED       = { "packed", 3, std::size(PACKED_COMPONENTS), PACKED_COMPONENTS };
static const char * const DENSE_COMPONENTS[]  = { "" };
const sparse_format       FORMAT_DENSE        = { "dense", 0, std::size(DENSE_COMPONENTS), DENSE_COMPONENTS };
static const sparse_format * const FORMATS[]  = { &FORMAT_MACKO, &FORMAT_EC_CSR, &FORMAT_PACKED };

// ---- opening ----

static int check_not_split(const gguf_header & header) {
    int64_t count = 0;
    if (const int status = split_count(header, &count)) {
        return status;
    }
    return count == 1
               ? GGML_MACKO_STATUS_OK
               : fail(GGML_MACKO_STATUS_SPLIT_FILE,
                      "one of %" PRId64 " files of a split model: merge them first (llama-gguf-split --merge)", count);
}

static int check_model(const model_file & file) {
    if (const int status = check_model_keys(file.header)) {
        return status;
    }
    return check_model_tensors(dense_tensors(file));
}

int model_file_open(const char * path, bool require_model, std::unique_ptr<model_file> * out) {
    auto file   = std::make_unique<model_file>();
    int  status = file->open(path);
    if (status == GGML_MACKO_STATUS_OK) {
        status = read_gguf_header(*file, &file->header);
    }
    // a part of a sparse model says little
    if (status == GGML_MACKO_STATUS_OK && (require_model || file->header.find("macko.version") != nullptr)) {
        status = check_not_split(file->header);
    }
    if (status == GGML_MACKO_STATUS_OK) {
        status = check_sparse_tensors(file.get());
    }
    if (status == GGML_MACKO_STATUS_OK && require_model) {
        status = check_model(*file);
    }
    if (status != GGML_MACKO_STATUS_OK) {
        prefix_error(path);
        return status;
    }
    *out = std::move(file);
    return GGML_MACKO_STATUS_OK;
}

// looks for the keys' bytes: the header of this file could not be parsed
static bool claims_to_be_sparse(const model_file & file) {
    static constexpr std::string_view keys[]  = { "macko.version", "macko.tensor." };
    constexpr int64_t                 chunk   = 1 << 20;
    constexpr int64_t                 overlap = 16; // no key is cut at the end of a chunk
    std::vector<char>                 buffer(chunk + overlap);
    const int64_t                     end = std::min(file.size(), CLAIM_SEARCH_NBYTES);
    for (int64_t at = 0; at < end; at += chunk) {
        const int64_t n = std::min(end - at, chunk + overlap);
        if (file.read(at, buffer.data(), n) != GGML_MACKO_STATUS_OK) {
            return false;
        }
        const std::string_view bytes(buffer.data(), static_cast<size_t>(n));
        if (std::any_of(std::begin(keys), std::end(keys),
                        [&](std::string_view key) { return bytes.find(key) != std::string_view::npos; })) {
            return true;
        }
    }
    return false;
}

// header and sparse description of a model that may be split
static int open_for_load(const char * path, bool compress, model_file * file) {
    if (const int status = read_gguf_header(*file, &file->header)) {
        return status;
    }
    if (compress || file->header.find("macko.version") != nullptr) { // other split models are llama.cpp's affair
        if (const int status = file->append_parts()) {
            return status;
        }
    }
    if (const int status = check_sparse_tensors(file)) {
        return status;
    }
    return file->is_sparse || compress
               ? GGML_MACKO_STATUS_OK
               : fail(GGML_MACKO_STATUS_NOT_SPARSE, "%s: not a sparse GGUF (no key macko.version)", path);
}

int model_file_open_sparse(const char * path, bool compress, std::unique_ptr<model_file> * out) {
    auto file   = std::make_unique<model_file>();
    int  status = file->open(path);
    if (status != GGML_MACKO_STATUS_OK) {
        prefix_error(path);
        return GGML_MACKO_STATUS_NOT_SPARSE;
    }
    status    = open_for_load(path, compress, file.get());
    bool ours = file->is_sparse;
    if (status == GGML_MACKO_STATUS_NOT_SPARSE) {
        return status;
    }
    if (status == GGML_MACKO_STATUS_OK) {
        status = check_model(*file);
    } else if (!ours) {
        const std::string text = ggml_macko_last_error();
        ours                   = claims_to_be_sparse(*file);
        status                 = fail(status, "%s", text.c_str());
    }
    if (status == GGML_MACKO_STATUS_OK && !file->is_sparse) {
        status = compress_weights(file.get());
    }
    if (status != GGML_MACKO_STATUS_OK) {
        prefix_error(path);
        return ours ? status : GGML_MACKO_STATUS_NOT_SPARSE;
    }
    *out = std::move(file);
    return GGML_MACKO_STATUS_OK;
}

// ---- the macko.* keys ----

static bool starts_with(std::string_view s, std::string_view prefix) { return s.substr(0, prefix.size()) == prefix; }

static int check_reserved_keys(const gguf_header & header, bool is_sparse) {
    static const char * const known[] = { "macko.version",           "macko.min_reader_version", "macko.tensor.name",
                                          "macko.tensor.format",     "macko.tensor.type",        "macko.tensor.ne",
                                          "macko.tensor.delta_bits", "macko.tensor.nnz" };
    for (const gguf_key & key : header.keys) {
        if (!starts_with(key.name, "macko.") || starts_with(key.name, "macko.prune.") ||
            starts_with(key.name, "macko.x-")) {
            continue;
        }
        const bool is_known =
            std::any_of(std::begin(known), std::end(known), [&](const char * name) { return key.name == name; });
        if (!is_sparse || !is_known) {
            return fail(GGML_MACKO_STATUS_BAD_KEY, "key %s is reserved%s", printable(key.name.c_str()).text,
                        is_known ? ", but macko.version is missing" : "");
        }
    }
    return GGML_MACKO_STATUS_OK;
}

static int find_u32(const gguf_header & header, const char * name, int64_t * value) {
    const gguf_key * key = header.find(name);
    if (key == nullptr) {
        return fail(GGML_MACKO_STATUS_MISSING_KEY, "key %s is missing", name);
    }
    if (key->type != GGUF_U32) {
        return fail(GGML_MACKO_STATUS_BAD_KEY_TYPE, "key %s is not a u32", name);
    }
    return header.get_int(*key, 0, value) ? GGML_MACKO_STATUS_OK
                                          : fail(GGML_MACKO_STATUS_BAD_KEY_TYPE, "key %s is not a u32", name);
}

static int check_version(const gguf_header & header) {
    int64_t version    = 0;
    int64_t min_reader = 0;
    if (const int status = find_u32(header, "macko.version", &version)) {
        return status;
    }
    if (const int status = find_u32(header, "macko.min_reader_version", &min_reader)) {
        return status;
    }
    if (min_reader > FORMAT_VERSION) {
        return fail(GGML_MACKO_STATUS_FORMAT_VERSION,
                    "written by format version %" PRId64 " for readers of version %" PRId64
                    ", this build reads <= %" PRId64 ": upgrade",
                    version, min_reader, FORMAT_VERSION);
    }
    if (version < 1 || min_reader < 1 || min_reader > version) {
        return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "macko.version is %" PRId64 ", macko.min_reader_version %" PRId64,
                    version, min_reader);
    }
    return GGML_MACKO_STATUS_OK;
}

// an array key with n elements of a type; n = 0: any number but none
static int find_array(const gguf_header & header, const char * name, gguf_type type, uint64_t n,
                      const gguf_key ** out) {
    const gguf_key * key = header.find(name);
    if (key == nullptr) {
        return fail(GGML_MACKO_STATUS_MISSING_KEY, "key %s is missing", name);
    }
    if (key->type != GGUF_ARRAY || key->element_type != type) {
        return fail(GGML_MACKO_STATUS_BAD_KEY_TYPE, "key %s has the wrong type", name);
    }
    if (n != 0 ? key->n != n : key->n == 0) {
        return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE,
                    "key %s has the wrong number of elements (%" PRIu64 " vs %" PRIu64 ")", name, key->n, n);
    }
    *out = key;
    return GGML_MACKO_STATUS_OK;
}

static int read_shape(const gguf_header & header, const gguf_key & key, uint64_t i, sparse_tensor_info * m) {
    int64_t rows = 1;
    m->n_dims    = 1;
    for (int d = 0; d < MAX_DIMS; d++) {
        if (!header.get_int(key, i * MAX_DIMS + static_cast<uint64_t>(d), &m->ne[d])) {
            return fail(GGML_MACKO_STATUS_LIMIT, "dimension %d is larger than 2^63", d);
        }
        if (m->ne[d] < 1) {
            return fail(GGML_MACKO_STATUS_BAD_SHAPE, "dimension %d is %" PRId64, d, m->ne[d]);
        }
        if (d > 0 && !checked_mul(rows, m->ne[d], &rows)) {
            return fail(GGML_MACKO_STATUS_LIMIT, "the number of rows overflows");
        }
        if (m->ne[d] > 1) {
            m->n_dims = d + 1;
        }
    }
    m->desc.rows = rows;
    m->desc.cols = m->ne[0];
    return GGML_MACKO_STATUS_OK;
}

static int check_name(const std::string & name) {
    const bool ok = !name.empty() && name.size() + MAX_SUFFIX <= MAX_NAME &&
                    std::all_of(name.begin(), name.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
    return ok ? GGML_MACKO_STATUS_OK
              : fail(GGML_MACKO_STATUS_BAD_NAME, "name is empty, not printable or too long (%zu vs 1...%zu bytes)",
                     name.size(), MAX_NAME - MAX_SUFFIX);
}

// matrix i of the macko.tensor.* arrays, without its components
struct sparse_keys {
    const gguf_key *format, *type, *ne, *delta_bits, *nnz;
    int64_t         min_reader;
};

static int read_matrix(const gguf_header & header, const sparse_keys & keys, uint64_t i, const std::string & format,
                       sparse_tensor_info * m) {
    if (const int status = check_name(m->name)) {
        return status;
    }
    m->format = nullptr;
    for (const sparse_format * f : FORMATS) {
        m->format = format == f->name ? f : m->format;
    }
    if (m->format == nullptr) {
        return fail(GGML_MACKO_STATUS_BAD_FORMAT, "format '%s' is not known to this build",
                    printable(format.c_str(), format.size()).text);
    }
    if (keys.min_reader < m->format->version) {
        return fail(GGML_MACKO_STATUS_BAD_FORMAT, "format '%s' in a file for readers of version %" PRId64,
                    m->format->name, keys.min_reader);
    }
    int64_t type = 0;
    int64_t bits = 0;
    header.get_int(*keys.type, i, &type); // u32 arrays: these two cannot fail
    header.get_int(*keys.delta_bits, i, &bits);
    if (type > INT32_MAX || bits > INT32_MAX) {
        return fail(GGML_MACKO_STATUS_BAD_FORMAT, "type %" PRId64 " or delta_bits %" PRId64 " is out of range", type,
                    bits);
    }
    m->desc.type       = static_cast<int32_t>(type);
    m->desc.delta_bits = static_cast<int32_t>(bits);
    m->value_type      = m->desc.type;
    m->index_bits      = 0;
    if (m->format == &FORMAT_PACKED) { // its value type is that of X.values
        m->index_bits      = m->desc.delta_bits;
        m->desc.delta_bits = RECODED_BITS;
    }
    if (const int status = read_shape(header, *keys.ne, i, m)) {
        return status;
    }
    if (!header.get_int(*keys.nnz, i, &m->desc.nnz)) {
        return fail(GGML_MACKO_STATUS_BAD_NNZ, "nnz is larger than 2^63");
    }
    if (const int status = m->format == &FORMAT_EC_CSR   ? check_ec_csr_desc(m->desc)
                           : m->format == &FORMAT_PACKED ? check_packed_desc(m->packed())
                                                         : check_desc(m->desc)) {
        return status;
    }
    m->nbytes_dense = m->desc.rows * m->desc.cols * value_nbytes(m->desc.type); // check_desc: <= 16 GiB
    return GGML_MACKO_STATUS_OK;
}

static int read_matrices(model_file * file) {
    const gguf_header & header = file->header;
    sparse_keys         keys   = {};
    const gguf_key *    name   = nullptr;
    if (const int status = find_u32(header, "macko.min_reader_version", &keys.min_reader)) {
        return status;
    }
    if (const int status = find_array(header, "macko.tensor.name", GGUF_STRING, 0, &name)) {
        return status;
    }
    if (name->n > MAX_TENSORS / 3) { // each has three components at least; also bounds 4 n below
        return fail(GGML_MACKO_STATUS_LIMIT, "too many sparse tensors (%" PRIu64 " vs %" PRIu64 ")", name->n,
                    MAX_TENSORS / 3);
    }
    if (const int status = find_array(header, "macko.tensor.format", GGUF_STRING, name->n, &keys.format)) {
        return status;
    }
    if (const int status = find_array(header, "macko.tensor.type", GGUF_U32, name->n, &keys.type)) {
        return status;
    }
    if (const int status = find_array(header, "macko.tensor.ne", GGUF_U64, 4 * name->n, &keys.ne)) {
        return status;
    }
    if (const int status = find_array(header, "macko.tensor.delta_bits", GGUF_U32, name->n, &keys.delta_bits)) {
        return status;
    }
    if (const int status = find_array(header, "macko.tensor.nnz", GGUF_U64, name->n, &keys.nnz)) {
        return status;
    }
    std::vector<std::string> names, formats;
    header.get_strings(*name, &names); // string arrays: cannot fail
    header.get_strings(*keys.format, &formats);
    file->sparse.resize(names.size());
    for (size_t i = 0; i < names.size(); i++) {
        file->sparse[i].name = names[i];
        if (const int status = read_matrix(header, keys, i, formats[i], &file->sparse[i])) {
            prefix_error(printable(names[i].c_str(), names[i].size()).text);
            return status;
        }
    }
    return GGML_MACKO_STATUS_OK;
}

// ---- components ----

// names and their indices, sorted: a hash table would let a file choose its collisions
using name_index = std::vector<std::pair<std::string_view, size_t>>;

static int64_t name_find(const name_index & index, std::string_view name) {
    const auto it = std::lower_bound(index.begin(), index.end(), name,
                                     [](const auto & a, std::string_view b) { return a.first < b; });
    return it != index.end() && it->first == name ? static_cast<int64_t>(it->second) : -1;
}

static int check_component(const gguf_tensor & t, int32_t type, int64_t n) {
    if (t.type != type) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s has the wrong type (%d vs %d)", t.name.c_str(), t.type, type);
    }
    if (t.n_dims != 1) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s has %d dimensions, not 1", t.name.c_str(), t.n_dims);
    }
    if (t.ne[0] != n) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s has the wrong length (%" PRId64 " vs %" PRId64 ")",
                    t.name.c_str(), t.ne[0], n);
    }
    return GGML_MACKO_STATUS_OK;
}

static int check_macko_components(const gguf_tensor * t, sparse_tensor_info * m) {
    m->n_padded = t[MACKO_VALUES].ne[0];
    // each dense element is stored once at most
    const int64_t n_max = n_padded(std::min(m->desc.rows * m->desc.cols, MAX_STORED));
    if (m->n_padded % 8 != 0 || m->n_padded > n_max) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT,
                    "%s has the wrong length (%" PRId64 " vs a multiple of 8 <= %" PRId64 ")", t->name.c_str(),
                    m->n_padded, n_max);
    }
    if (m->desc.nnz > m->n_padded) {
        return fail(GGML_MACKO_STATUS_BAD_NNZ, "%s: nnz (%" PRId64 " vs %" PRId64 " entries)", m->name.c_str(),
                    m->desc.nnz, m->n_padded);
    }
    if (const int status = check_component(t[MACKO_VALUES], m->desc.type, m->n_padded)) {
        return status;
    }
    if (const int status = check_component(t[MACKO_DELTAS], TYPE_I8, deltas_nbytes(m->n_padded, m->desc.delta_bits))) {
        return status;
    }
    return check_component(t[MACKO_ROW_PTR], TYPE_I32, m->desc.rows + 1);
}

// types, and lengths as far as they do not depend on the set table: that is payload
static int check_ec_csr_components(const gguf_tensor * t, int64_t file_size, sparse_tensor_info * m) {
    // no component has one element per row, as row_ptr has; what is made of a matrix has
    if (m->desc.rows / MAX_EC_ROWS > file_size) {
        return fail(GGML_MACKO_STATUS_LIMIT,
                    "%s: %" PRId64 " rows from a file of %" PRId64 " bytes (limit %" PRId64 " x)", m->name.c_str(),
                    m->desc.rows, file_size, MAX_EC_ROWS);
    }
    const int32_t base_type = ec_base_nbytes(m->desc.cols) == 2 ? TYPE_I16 : TYPE_I32;
    const int32_t types[]   = { m->desc.type, TYPE_I8, base_type, TYPE_I32, TYPE_I32, TYPE_I32 };
    for (size_t c = 0; c < FORMAT_EC_CSR.n_components; c++) {
        const int64_t n = t[c].n_dims == 1 ? std::min(t[c].ne[0], MAX_STORED) : 0;
        if (const int status = check_component(t[c], types[c], n)) {
            return status;
        }
    }
    if (t[EC_SETS].ne[0] % 4 != 0 || t[EC_SETS].ne[0] > 4 * EC_MAX_SETS) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT,
                    "%s has the wrong length (%" PRId64 " vs a multiple of 4 <= %" PRId64 ")", t[EC_SETS].name.c_str(),
                    t[EC_SETS].ne[0], 4 * EC_MAX_SETS);
    }
    if (m->desc.nnz > t[EC_VALUES].ne[0]) {
        return fail(GGML_MACKO_STATUS_BAD_NNZ, "%s: nnz (%" PRId64 " vs %" PRId64 " values)", m->name.c_str(),
                    m->desc.nnz, t[EC_VALUES].ne[0]);
    }
    m->n_padded = n_padded(max_recoded(m->desc));
    return GGML_MACKO_STATUS_OK;
}

// the index's exact length is known only from its codes, unless it is a bitmap
static int check_packed_components(const gguf_tensor * t, sparse_tensor_info * m) {
    const int32_t type     = t[PACKED_VALUES].type;
    const int64_t n_values = packed_n_values(m->desc.nnz);
    // Q4_NL is no type of ggml's: bytes
    m->value_type = type == TYPE_I8 ? GGML_MACKO_TYPE_Q4_NL : is_quant_type(type) ? type : m->desc.type;
    if (const int status = type == TYPE_I8
                               ? check_component(t[PACKED_VALUES], TYPE_I8, values_nbytes(m->value_type, n_values))
                               : check_component(t[PACKED_VALUES], m->value_type, n_values)) {
        return status;
    }
    const int64_t most = max_index_nbytes(m->packed()), n = t[PACKED_INDEX].ne[0];
    if (const int status =
            check_component(t[PACKED_INDEX], TYPE_I8, m->index_bits == INDEX_BITMAP || n % 4 || n > most ? most : n)) {
        return status;
    }
    m->n_padded = n_padded(max_recoded(m->desc));
    return check_component(t[PACKED_ROW_PTR], TYPE_I32, m->desc.rows + 1);
}

// the tensors from table entry t on are matrix m's components, and have the types and lengths they must have
static int bind_components(model_file * file, size_t t, size_t index) {
    sparse_tensor_info & m       = file->sparse[index];
    const auto &         tensors = file->header.tensors;
    for (size_t c = 0; c < m.format->n_components; c++) {
        if (t + c >= tensors.size() || tensors[t + c].name != m.name + m.format->components[c]) {
            return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s%s does not stand in its place of the tensor table",
                        m.name.c_str(), m.format->components[c]);
        }
        file->tensor_sparse_index[t + c] = static_cast<int64_t>(index);
    }
    m.first = t;
    return m.format == &FORMAT_EC_CSR   ? check_ec_csr_components(&tensors[t], file->header.file_size, &m)
           : m.format == &FORMAT_PACKED ? check_packed_components(&tensors[t], &m)
                                        : check_macko_components(&tensors[t], &m);
}

// a tensor that is not a component must not look like one
static int check_not_component(const gguf_tensor & t, const name_index & sparse_names) {
    if (name_find(sparse_names, t.name) >= 0) {
        return fail(GGML_MACKO_STATUS_DUPLICATE_TENSOR, "%s is there both dense and sparse", t.name.c_str());
    }
    for (size_t dot = t.name.find('.'); dot != std::string::npos; dot = t.name.find('.', dot + 1)) {
        if (name_find(sparse_names, std::string_view(t.name).substr(0, dot)) >= 0) {
            return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s is no component, or out of place", t.name.c_str());
        }
    }
    const std::string_view suffix = std::string_view(t.name).substr(std::min(t.name.size(), t.name.rfind('.')));
    for (const sparse_format * f : FORMATS) {
        if (std::any_of(f->components, f->components + f->n_components, [&](const char * c) { return suffix == c; })) {
            return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s belongs to no sparse tensor", t.name.c_str());
        }
    }
    return GGML_MACKO_STATUS_OK;
}

// Value types that came later than their format: what a reader must be to know them
struct value_type_version {
    int32_t      type;
    const char * name;
    int64_t      reader;
};
static constexpr value_type_version LATER_VALUE_TYPES[] = { { GGML_MACKO_TYPE_Q5_0, "Q5_0", 4 },
                                                            { GGML_MACKO_TYPE_Q4_NL, "Q4_NL", 5 } };

static int check_value_versions(const model_file & file) {
    int64_t min_reader = 0;
    if (const int status = find_u32(file.header, "macko.min_reader_version", &min_reader)) {
        return status;
    }
    for (const sparse_tensor_info & m : file.sparse) {
        for (const value_type_version & v : LATER_VALUE_TYPES) {
            if (m.value_type == v.type && min_reader < v.reader) {
                return fail(GGML_MACKO_STATUS_BAD_FORMAT, "%s: %s values in a file for readers of version %" PRId64,
                            m.name.c_str(), v.name, min_reader);
            }
        }
    }
    return GGML_MACKO_STATUS_OK;
}

static int check_components(model_file * file) {
    const auto & tensors = file->header.tensors;
    name_index   sparse_names, tensor_names;
    for (size_t i = 0; i < file->sparse.size(); i++) {
        sparse_names.emplace_back(file->sparse[i].name, i);
    }
    for (size_t i = 0; i < tensors.size(); i++) {
        tensor_names.emplace_back(tensors[i].name, i);
    }
    std::sort(sparse_names.begin(), sparse_names.end());
    std::sort(tensor_names.begin(), tensor_names.end());
    for (size_t i = 0; i < sparse_names.size(); i++) {
        if (i > 0 && sparse_names[i].first == sparse_names[i - 1].first) {
            return fail(GGML_MACKO_STATUS_DUPLICATE_TENSOR, "%s is twice in macko.tensor.name",
                        file->sparse[sparse_names[i].second].name.c_str());
        }
    }
    for (const sparse_tensor_info & m : file->sparse) {
        for (size_t c = 0; c < m.format->n_components; c++) {
            if (name_find(tensor_names, m.name + m.format->components[c]) < 0) {
                return fail(GGML_MACKO_STATUS_MISSING_COMPONENT, "%s%s is missing", m.name.c_str(),
                            m.format->components[c]);
            }
        }
    }
    size_t next = 0; // matrices stand in the order of macko.tensor.name
    for (size_t t = 0; t < tensors.size();) {
        if (next < file->sparse.size() &&
            tensors[t].name == file->sparse[next].name + file->sparse[next].format->components[0]) {
            if (const int status = bind_components(file, t, next)) {
                return status;
            }
            t += file->sparse[next++].format->n_components;
        } else {
            if (const int status = check_not_component(tensors[t], sparse_names)) {
                return status;
            }
            t++;
        }
    }
    return check_value_versions(*file); // all components exist, and each is bound or was refused: next == n
}

static int check_dense_size(const model_file & file) {
    int64_t total = 0; // <= 2^16 tensors of <= 2^34 bytes: no overflow
    for (const gguf_tensor & t : dense_tensors(file)) {
        total += t.nbytes;
    }
    if (total > MAX_MODEL_BYTES) {
        return fail(GGML_MACKO_STATUS_LIMIT, "declares too much dense data (%" PRId64 " vs %" PRId64 " bytes)", total,
                    MAX_MODEL_BYTES);
    }
    if ((total + MAX_EXPANSION - 1) / MAX_EXPANSION > file.header.file_size) {
        return fail(GGML_MACKO_STATUS_LIMIT,
                    "declares %" PRId64 " dense bytes from a file of %" PRId64 " (limit %" PRId64 " x)", total,
                    file.header.file_size, MAX_EXPANSION);
    }
    return GGML_MACKO_STATUS_OK;
}

int check_sparse_tensors(model_file * file) {
    file->is_sparse = file->header.find("macko.version") != nullptr;
    file->sparse.clear();
    file->tensor_sparse_index.assign(file->header.tensors.size(), -1);
    if (!file->is_sparse) {
        return check_reserved_keys(file->header, false);
    }
    if (const int status = check_version(file->header)) { // first: a newer format may have keys that we do not know
        return status;
    }
    if (const int status = check_reserved_keys(file->header, true)) {
        return status;
    }
    if (const int status = read_matrices(file)) {
        return status;
    }
    if (const int status = check_components(file)) {
        return status;
    }
    return check_dense_size(*file);
}

std::vector<gguf_tensor> dense_tensors(const model_file & file) {
    std::vector<gguf_tensor> out;
    for (size_t t = 0; t < file.header.tensors.size();) {
        const int64_t index = file.tensor_sparse_index[t];
        if (index < 0) {
            out.push_back(file.header.tensors[t++]);
            out.back().offset = 0;
            continue;
        }
        const sparse_tensor_info & m = file.sparse[static_cast<size_t>(index)];
        out.push_back({ m.name, m.desc.type, m.n_dims, { m.ne[0], m.ne[1], m.ne[2], m.ne[3] }, 0, m.nbytes_dense });
        t += m.format->n_components;
    }
    return out;
}

// ---- payload ----

namespace {

// the error of the earliest block, whichever thread met it: the blocks behind it need no work any more
struct first_error {
    std::atomic<int64_t> block{ INT64_MAX };
    std::mutex           mutex;
    int                  status = GGML_MACKO_STATUS_OK;
    std::string          text;

    bool any() const { return status != GGML_MACKO_STATUS_OK; } // when all threads are done

    void set(int64_t b, int s) noexcept {
        const std::lock_guard<std::mutex> lock(mutex);
        if (b < block) {
            block  = b;
            status = s;
            try {
                text = ggml_macko_last_error();
            } catch (const std::bad_alloc &) {
                text.clear();
            }
        }
    }
};

// What blocks have, summed up. Not an OpenMP ordered region: libgomp ends one only where its thread takes the next
// iteration, so that what follows in the loop
// waits for other threads, too.
class running_sum {
public:
    void add(int64_t n) {
        const std::lock_guard<std::mutex> lock(mutex_);
        sum_ += n;
    }
    // adds n of block b; returns the sum of those before it, as soon as they are there. A thread that sleeps here takes
    // long to wake up
    int64_t add_in_order(int64_t b, int64_t n) {
        std::unique_lock<std::mutex> lock(mutex_);
        turn_.wait(lock, [&] { return next_ == b; });
        const int64_t before = sum_;
        sum_ += n;
        next_++;
        turn_.notify_all();
        return before;
    }
    int64_t sum() const { return sum_; } // after the last block

private:
    std::mutex              mutex_;
    std::condition_variable turn_;
    int64_t                 next_ = 0, sum_ = 0;
};

struct payload_reader {
    const byte_source &        source;
    const gguf_header &        header;
    const sparse_tensor_info & m;
    std::vector<int32_t>       row_ptr;
    std::vector<int64_t>       blocks;  // first row of each block, then rows
    macko_matrix               recoded; // of another format: blocks of rows are taken from here, not from the file

    const gguf_tensor & component(size_t c) const { return header.tensors[m.first + c]; }
    int64_t             values_offset(int64_t entry) const {
        return component(MACKO_VALUES).offset + entry * value_nbytes(m.desc.type);
    }
    // entry % 8 == 0
    int64_t deltas_offset(int64_t entry) const {
        return component(MACKO_DELTAS).offset + entry * m.desc.delta_bits / 8;
    }

    int read_row_ptr() {
        row_ptr.resize(static_cast<size_t>(m.desc.rows) + 1);
        if (const int status =
                source.read(component(MACKO_ROW_PTR).offset, row_ptr.data(), component(MACKO_ROW_PTR).nbytes)) {
            return status;
        }
        return check_row_ptr(m.desc, row_ptr.data(), m.n_padded);
    }

    int read_padding() const {
        const int64_t n_stored = row_ptr.back();
        const int64_t base     = n_stored & ~int64_t(7);
        const int64_t n_deltas = component(MACKO_DELTAS).nbytes;
        // n_padded is 8 at least: <= 64 bytes
        const int64_t      n_values_bytes = (m.n_padded - base) * value_nbytes(m.desc.type);
        const int64_t      n_deltas_bytes = n_deltas - base * m.desc.delta_bits / 8;
        alignas(8) uint8_t values[64];
        uint8_t            deltas[16];
        if (const int status = source.read(values_offset(base), values, n_values_bytes)) {
            return status;
        }
        if (const int status = source.read(deltas_offset(base), deltas, n_deltas_bytes)) {
            return status;
        }
        return check_padding(m.desc, n_stored, values, deltas, base, m.n_padded, n_deltas);
    }

    // whole rows of about BLOCK_NBYTES; an empty row counts too, because a consumer works on it
    void make_blocks() {
        const int64_t bits_per_entry = 8 * value_nbytes(m.desc.type) + m.desc.delta_bits;
        const int64_t row_nbytes     = m.format == &FORMAT_DENSE ? m.desc.cols * value_nbytes(m.desc.type) : 16;
        int64_t       nbytes         = 0;
        blocks.push_back(0);
        for (int64_t r = 0; r < m.desc.rows; r++) {
            const int64_t n =
                (row_ptr[static_cast<size_t>(r) + 1] - row_ptr[static_cast<size_t>(r)]) * bits_per_entry / 8 +
                row_nbytes;
            // a block that is encoded here has no codes of its neighbours, so it may not share a byte with them:
            // consumers copy whole bytes
            const bool may_begin =
                m.format != &FORMAT_DENSE || row_ptr[static_cast<size_t>(r)] * int64_t(m.desc.delta_bits) % 8 == 0;
            if (nbytes > 0 && nbytes + n > BLOCK_NBYTES && may_begin) {
                blocks.push_back(r);
                nbytes = 0;
            }
            nbytes += n;
        }
        blocks.push_back(m.desc.rows);
    }

    int read_block(size_t b, std::vector<uint8_t> & buffer, macko_view * view) const {
        const int64_t row_begin = blocks[b];
        const int64_t row_end   = blocks[b + 1];
        if (!recoded.values.empty()) {
            return validate(
                { m.desc, row_begin, row_end, row_ptr.data(), 0, recoded.values.data(), recoded.deltas.data() }, view);
        }
        const int64_t base = row_ptr[static_cast<size_t>(row_begin)] & ~int64_t(7);
        const int64_t end  = (row_ptr[static_cast<size_t>(row_end)] + int64_t(7)) & ~int64_t(7); // <= n_padded
        // multiples of 8 entries:
        const int64_t n_values = (end - base) * value_nbytes(m.desc.type);
        const int64_t n_deltas = (end - base) * m.desc.delta_bits / 8; // whole bytes
        const size_t  slack    = 64;                                   // validate and consumers may load whole vectors
        if (buffer.size() < static_cast<size_t>(n_values + n_deltas) + 2 * slack) {
            buffer.resize(static_cast<size_t>(n_values + n_deltas) + 2 * slack);
        }
        uint8_t *        values = buffer.data();
        uint8_t *        deltas = values + n_values + slack;
        const macko_rows rows   = { m.desc, row_begin, row_end, row_ptr.data(), base, values, deltas };
        if (m.format == &FORMAT_DENSE) {
            if (const int status = encode_block(rows, values, n_values, deltas, n_deltas)) {
                return status;
            }
            return validate(rows, view);
        }
        if (const int status = source.read(values_offset(base), values, n_values)) {
            return status;
        }
        if (const int status = source.read(deltas_offset(base), deltas, n_deltas)) {
            return status;
        }
        return validate(rows, view);
    }

    // dense rows, read and encoded
    int encode_block(const macko_rows & rows, uint8_t * values, int64_t n_values, uint8_t * deltas,
                     int64_t n_deltas) const {
        const int64_t        row_nbytes = m.desc.cols * value_nbytes(m.desc.type);
        std::vector<uint8_t> dense(static_cast<size_t>((rows.row_end - rows.row_begin) * row_nbytes));
        if (const int status = source.read(component(0).offset + rows.row_begin * row_nbytes, dense.data(),
                                           static_cast<int64_t>(dense.size()))) {
            return status;
        }
        memset(values, 0, static_cast<size_t>(n_values));
        memset(deltas, 0, static_cast<size_t>(n_deltas));
        return encode(dense.data(), rows, values, deltas);
    }

    int read_blocks(int n_max_team, payload_consumer & consumer) {
        const int64_t        n_blocks = static_cast<int64_t>(blocks.size()) - 1;
        first_error          error;
        running_sum          nnz;
        std::atomic<int64_t> next{ 0 }; // blocks are taken in their order: none waits for one that nobody has
        const int            n_team = static_cast<int>(std::min<int64_t>(n_max_team, n_blocks));

#pragma omp parallel num_threads(n_team)
        {
            std::vector<uint8_t> buffer;
            for (int64_t b; (b = next++) < n_blocks;) {
                macko_view view;
                int        status = GGML_MACKO_STATUS_OK;
                const bool run    = b < error.block;
                if (run) {
                    status = c_boundary([&] { return read_block(static_cast<size_t>(b), buffer, &view); });
                }
                int64_t first_value = 0;
                if (consumer.wants_first_value()) {
                    first_value = nnz.add_in_order(b, view.nnz());
                } else {
                    nnz.add(view.nnz());
                }
                if (run && status == GGML_MACKO_STATUS_OK) {
                    status = c_boundary([&] { return consumer.consume(view, first_value); });
                }
                if (status != GGML_MACKO_STATUS_OK) {
                    error.set(b, status);
                }
            }
        }
        if (error.any()) {
            return fail(error.status, "%s", error.text.c_str());
        }
        const int64_t expected = recoded.values.empty() ? m.desc.nnz : recoded.desc.nnz;
        if (nnz.sum() != expected) {
            return fail(GGML_MACKO_STATUS_BAD_NNZ, "nnz does not match its payload (%" PRId64 " vs %" PRId64 ")",
                        expected, nnz.sum());
        }
        return GGML_MACKO_STATUS_OK;
    }
};

int team_of(int n_threads) { return n_threads > 0 ? n_threads : omp_get_max_threads(); }

// what a consumer of MACKO gets of a matrix that was recoded into reader.recoded
int read_recoded(payload_reader & reader, int n_team, payload_consumer & consumer) {
    reader.row_ptr = std::move(reader.recoded.row_ptr);
    reader.make_blocks();
    return reader.read_blocks(n_team, consumer);
}

int read_packed(const byte_source & source, const gguf_header & header, const sparse_tensor_info & m, int n_threads,
                payload_consumer & consumer) {
    const int      n_team = team_of(n_threads);
    payload_reader reader = { source, header, m, {}, {}, {} };
    {
        std::unique_ptr<uint8_t[]> memory[std::size(PACKED_COMPONENTS)];
        for (size_t c = 0; c < std::size(memory); c++) {
            const gguf_tensor & t = reader.component(c);
            memory[c].reset(new uint8_t[static_cast<size_t>(t.nbytes)]); // not touched before it is read into
            if (const int status = read_by_all(source, t.offset, memory[c].get(), t.nbytes, n_team)) {
                return status;
            }
        }
        packed_view view;
        if (const int status = check_packed({ m.packed(), memory[PACKED_VALUES].get(), packed_n_values(m.desc.nnz),
                                              memory[PACKED_INDEX].get(), reader.component(PACKED_INDEX).nbytes,
                                              reinterpret_cast<const int32_t *>(memory[PACKED_ROW_PTR].get()),
                                              reader.component(PACKED_ROW_PTR).ne[0] },
                                            n_team, &view)) {
            return status;
        }
        if (consumer.takes_packed()) {
            return consumer.consume_packed(view);
        }
        if (const int status = recode(view, n_team, &reader.recoded)) {
            return status;
        }
    }
    return read_recoded(reader, n_team, consumer);
}

// the components of an EC-CSR matrix in private memory
struct ec_csr_payload {
    std::vector<uint8_t> memory[std::size(EC_CSR_COMPONENTS)];
    ec_csr_arrays        arrays = {};

    int read(const byte_source & source, const gguf_header & header, const sparse_tensor_info & m) {
        for (size_t c = 0; c < std::size(memory); c++) {
            const gguf_tensor & t = header.tensors[m.first + c];
            memory[c].resize(static_cast<size_t>(t.nbytes));
            if (const int status = source.read(t.offset, memory[c].data(), t.nbytes)) {
                return status;
            }
        }
        const auto n   = [&](size_t c) { return header.tensors[m.first + c].ne[0]; };
        const auto i32 = [&](size_t c) { return reinterpret_cast<const int32_t *>(memory[c].data()); };
        arrays         = { m.desc,         reinterpret_cast<const ec_csr_set *>(memory[EC_SETS].data()),
                           n(EC_SETS) / 4, i32(EC_ROWS),
                           n(EC_ROWS),     i32(EC_BLK_PTR),
                           n(EC_BLK_PTR),  memory[EC_BASES].data(),
                           n(EC_BASES),    memory[EC_DELTAS].data(),
                           n(EC_DELTAS),   memory[EC_VALUES].data(),
                           n(EC_VALUES) };
        return GGML_MACKO_STATUS_OK;
    }
};

int read_ec_csr(const byte_source & source, const gguf_header & header, const sparse_tensor_info & m, int n_threads,
                payload_consumer & consumer) {
    const int      n_team = team_of(n_threads);
    payload_reader reader = { source, header, m, {}, {}, {} };
    {
        ec_csr_payload payload;
        ec_csr_view    view;
        if (const int status = payload.read(source, header, m)) {
            return status;
        }
        if (const int status = check_ec_csr(payload.arrays, &view)) {
            return status;
        }
        if (consumer.takes_blocks()) {
            const int status = each_row(view, n_team, [](int64_t, const void *) {});
            return status ? status : consumer.consume_blocks(view);
        }
        if (const int status = recode(view, n_team, &reader.recoded)) {
            return status;
        }
    }
    return read_recoded(reader, n_team, consumer);
}

} // namespace

int read_by_all(const byte_source & source, int64_t offset, uint8_t * dst, int64_t n, int n_team) {
    constexpr int64_t PIECE = 256 << 10;
    first_error       error;
#pragma omp parallel for schedule(dynamic, 1) num_threads(n_team) if (n > PIECE)
    for (int64_t at = 0; at < n; at += PIECE) {
        if (at < error.block) {
            if (const int status =
                    c_boundary([&] { return source.read(offset + at, dst + at, std::min(PIECE, n - at)); })) {
                error.set(at, status);
            }
        }
    }
    return error.any() ? fail(error.status, "%s", error.text.c_str()) : static_cast<int>(GGML_MACKO_STATUS_OK);
}

int read_payload(const byte_source & source, const gguf_header & header, const sparse_tensor_info & matrix,
                 int n_threads, payload_consumer & consumer) {
    const int status = c_boundary([&]() -> int {
        if (matrix.format == &FORMAT_EC_CSR) {
            return read_ec_csr(source, header, matrix, n_threads, consumer);
        }
        if (matrix.format == &FORMAT_PACKED) {
            return read_packed(source, header, matrix, n_threads, consumer);
        }
        payload_reader reader = { source, header, matrix, {}, {}, {} };
        if (matrix.format == &FORMAT_DENSE) {
            reader.row_ptr = *matrix.row_ptr;
        } else if (const int s = reader.read_row_ptr()) {
            return s;
        } else if (const int t = reader.read_padding()) {
            return t;
        }
        reader.make_blocks();
        return reader.read_blocks(team_of(n_threads), consumer);
    });
    if (status != GGML_MACKO_STATUS_OK) {
        prefix_error(matrix.name.c_str());
    }
    return status;
}

int read_payload(const model_file & file, const sparse_tensor_info & matrix, int n_threads,
                 payload_consumer & consumer) {
    const int status = read_payload(file, file.header, matrix, n_threads, consumer);
    if (status != GGML_MACKO_STATUS_OK) {
        prefix_error(file.path.c_str());
    }
    return status;
}

} // namespace macko
