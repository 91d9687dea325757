// Reads and checks the description of the sparse tensors: the macko.* keys and the component tensors (FORMAT.md
// sections 1, 2 and 4). The codec of each format (codec/codec.h) decides which components a matrix has, and their types
// and sizes.
#include "load/sparse-header.h"
#include "codec/registry.h"
#include "gguf/names.h"
#include "load/activation-keys.h"
#include "load/file-shards.h"

#include <algorithm>
#include <cinttypes>
#include <string_view>

namespace macko {

ggml_macko_matrix sparse_tensor_info::matrix(const gguf_tensor * component_tensors) const {
    ggml_macko_matrix m = {};
    m.format            = format->name();
    m.rows              = desc.rows;
    m.cols              = desc.cols;
    m.type              = desc.type;
    m.value_type        = value_type;
    m.index_bits        = index_bits;
    m.nnz               = desc.nnz;
    m.n_arrays          = static_cast<int32_t>(n_tensors);
    for (size_t c = 0; component_tensors != nullptr && c < n_tensors; c++) {
        m.arrays[c] = { nullptr, component_tensors[c].nbytes, component_tensors[c].type };
    }
    return m;
}

// ---- the macko.* keys ----

static int check_reserved_keys(const gguf_header & header, bool is_sparse) {
    static const char * const known[] = { "macko.version",     "macko.tensor.name", "macko.tensor.format",
                                          "macko.tensor.type", "macko.tensor.ne",   "macko.tensor.index_bits",
                                          "macko.tensor.nnz" };
    for (const gguf_key & key : header.keys) {
        if (!starts_with(key.name, "macko.") || starts_with(key.name, "macko.prune.") ||
            starts_with(key.name, "macko.x-") || is_activation_key(key.name)) {
            continue;
        }
        const bool is_known =
            std::any_of(std::begin(known), std::end(known), [&](const char * name) { return key.name == name; });
        if (key.name == "macko.link.file") {
            std::string name;
            header.get_string(key, 0, &name);
            return fail(GGML_MACKO_STATUS_BAD_KEY, "is a link to the sparse model %s: use that file",
                        printable(name.c_str(), name.size()).text);
        }
        if (!is_sparse || !is_known) {
            return fail(GGML_MACKO_STATUS_BAD_KEY, "key %s is reserved%s", printable(key.name.c_str()).text,
                        is_known ? ", but macko.version is missing" : "");
        }
    }
    return check_activation_keys(header);
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
    int64_t version = 0;
    TRY(find_u32(header, "macko.version", &version));
    if (version > FORMAT_VERSION) {
        return fail(GGML_MACKO_STATUS_FORMAT_VERSION,
                    "written in format version %" PRId64 ", this build reads <= %" PRId64 ": upgrade", version,
                    FORMAT_VERSION);
    }
    return version >= 1 ? GGML_MACKO_STATUS_OK
                        : fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "macko.version is %" PRId64, version);
}

// Finds an array key with n elements of a type; with n = 0, any number of elements but 0 is accepted.
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

// The macko.tensor.* keys, parallel arrays with one entry per matrix (ne: four).
struct sparse_keys {
    const gguf_key *format, *type, *ne, *index_bits, *nnz;
};

static int read_matrix(const gguf_header & header, const sparse_keys & keys, uint64_t i, const std::string & format,
                       sparse_tensor_info * m) {
    TRY(check_name(m->name));
    m->format = find_codec(format);
    if (m->format == nullptr) {
        return fail(GGML_MACKO_STATUS_BAD_FORMAT, "format '%s' is not known to this build",
                    printable(format.c_str(), format.size()).text);
    }
    int64_t type = 0;
    int64_t bits = 0;
    header.get_int(*keys.type, i, &type); // cannot fail, because the elements are u32
    header.get_int(*keys.index_bits, i, &bits);
    if (type > INT32_MAX || bits > INT32_MAX) {
        return fail(GGML_MACKO_STATUS_BAD_FORMAT, "type %" PRId64 " or index_bits %" PRId64 " is out of range", type,
                    bits);
    }
    m->desc.type       = static_cast<int32_t>(type);
    m->value_type      = m->desc.type; // the components replace it
    m->index_bits      = static_cast<int32_t>(bits);
    m->desc.delta_bits = m->format->recoded_bits(m->index_bits);
    m->n_tensors       = m->format->components().size();
    TRY(read_shape(header, *keys.ne, i, m));
    if (!header.get_int(*keys.nnz, i, &m->desc.nnz)) {
        return fail(GGML_MACKO_STATUS_BAD_NNZ, "nnz is larger than 2^63");
    }
    TRY(m->format->check_desc(m->matrix()));
    m->nbytes_dense = m->desc.rows * m->desc.cols * value_nbytes(m->desc.type); // at most 16 GiB, by check_desc
    return GGML_MACKO_STATUS_OK;
}

static int read_matrices(model_file * file) {
    const gguf_header & header = file->header;
    sparse_keys         keys   = {};
    const gguf_key *    name   = nullptr;
    TRY(find_array(header, "macko.tensor.name", GGUF_STRING, 0, &name));
    if (name->n > MAX_TENSORS / 3) { // most formats have at least three components; 4 n cannot overflow then
        return fail(GGML_MACKO_STATUS_LIMIT, "too many sparse tensors (%" PRIu64 " vs %" PRIu64 ")", name->n,
                    MAX_TENSORS / 3);
    }
    TRY(find_array(header, "macko.tensor.format", GGUF_STRING, name->n, &keys.format));
    TRY(find_array(header, "macko.tensor.type", GGUF_U32, name->n, &keys.type));
    TRY(find_array(header, "macko.tensor.ne", GGUF_U64, 4 * name->n, &keys.ne));
    TRY(find_array(header, "macko.tensor.index_bits", GGUF_U32, name->n, &keys.index_bits));
    TRY(find_array(header, "macko.tensor.nnz", GGUF_U64, name->n, &keys.nnz));
    std::vector<std::string> names, formats;
    header.get_strings(*name, &names); // cannot fail, because the elements are strings
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

// Names and their indices, sorted by name. It is not a hash table, because a hostile file could contain many hash
// collisions.
using name_index = std::vector<std::pair<std::string_view, size_t>>;

static int64_t name_find(const name_index & index, std::string_view name) {
    const auto it = std::lower_bound(index.begin(), index.end(), name,
                                     [](const auto & a, std::string_view b) { return a.first < b; });
    return it != index.end() && it->first == name ? static_cast<int64_t>(it->second) : -1;
}

static int check_component(const gguf_tensor & t, const component_rule & rule) {
    if (t.type != rule.type) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s has the wrong type (%d vs %d)", t.name.c_str(), t.type,
                    rule.type);
    }
    if (t.n_dims != 1) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s has %d dimensions, not 1", t.name.c_str(), t.n_dims);
    }
    if (rule.multiple == 0 && t.ne[0] != rule.length) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s has the wrong length (%" PRId64 " vs %" PRId64 ")",
                    t.name.c_str(), t.ne[0], rule.length);
    }
    if (rule.multiple > 0 && (t.ne[0] % rule.multiple != 0 || t.ne[0] > rule.length)) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT,
                    "%s has the wrong length (%" PRId64 " vs a multiple of %" PRId64 " <= %" PRId64 ")", t.name.c_str(),
                    t.ne[0], rule.multiple, rule.length);
    }
    return GGML_MACKO_STATUS_OK;
}

// Checks the types and lengths of the components of matrix m, which begin at t, as far as the header describes them.
static int check_components_of(const gguf_tensor * t, int64_t file_size, sparse_tensor_info * m) {
    m->value_type                = m->format->value_type_of(m->matrix(t));
    const ggml_macko_matrix full = m->matrix(t);
    component_rule          rules[GGML_MACKO_MAX_ARRAYS];
    m->format->component_rules(full, rules);
    for (size_t c = 0; c < m->n_tensors; c++) {
        TRY(check_component(t[c], rules[c]));
    }
    if (const int status = m->format->check_nnz(full)) {
        prefix_error(m->name.c_str());
        return status;
    }
    // Not every format has a component with an element per row, but the MACKO rows made from it do. The size of the
    // file must bound their memory.
    if (m->desc.rows / MAX_ROWS_PER_BYTE > file_size) {
        return fail(GGML_MACKO_STATUS_LIMIT,
                    "%s: %" PRId64 " rows from a file of %" PRId64 " bytes (limit %" PRId64 " x)", m->name.c_str(),
                    m->desc.rows, file_size, MAX_ROWS_PER_BYTE);
    }
    m->n_padded      = m->format->max_entries(full);
    m->nbytes_values = t->nbytes;
    m->window        = m->format->window(full);
    return GGML_MACKO_STATUS_OK;
}

// Binds the tensors from table entry t on to a matrix as its components.
static int bind_components(model_file * file, size_t t, size_t index) {
    sparse_tensor_info & m       = file->sparse[index];
    const auto &         tensors = file->header.tensors;
    for (size_t c = 0; c < m.n_tensors; c++) {
        const char * suffix = m.format->components()[c];
        if (t + c >= tensors.size() || tensors[t + c].name != m.name + suffix) {
            return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s%s is not in its place in the tensor table", m.name.c_str(),
                        suffix);
        }
        file->tensor_sparse_index[t + c] = static_cast<int64_t>(index);
    }
    m.first = t;
    return check_components_of(&tensors[t], file->header.file_size, &m);
}

// The name of a dense tensor must not be that of a sparse tensor or of a component.
static int check_not_component(const gguf_tensor & t, const name_index & sparse_names) {
    if (name_find(sparse_names, t.name) >= 0) {
        return fail(GGML_MACKO_STATUS_DUPLICATE_TENSOR, "%s exists both dense and sparse", t.name.c_str());
    }
    for (size_t dot = t.name.find('.'); dot != std::string::npos; dot = t.name.find('.', dot + 1)) {
        if (name_find(sparse_names, std::string_view(t.name).substr(0, dot)) >= 0) {
            return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s is not a component, or is out of place", t.name.c_str());
        }
    }
    const std::string_view suffix = std::string_view(t.name).substr(std::min(t.name.size(), t.name.rfind('.')));
    for (const codec * f : all_codecs()) {
        const auto & known = f->components();
        if (std::any_of(known.begin(), known.end(), [&](const char * c) { return suffix == c; })) {
            return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%s belongs to no sparse tensor", t.name.c_str());
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
            return fail(GGML_MACKO_STATUS_DUPLICATE_TENSOR, "%s occurs twice in macko.tensor.name",
                        file->sparse[sparse_names[i].second].name.c_str());
        }
    }
    for (const sparse_tensor_info & m : file->sparse) {
        for (const char * suffix : m.format->components()) {
            if (name_find(tensor_names, m.name + suffix) < 0) {
                return fail(GGML_MACKO_STATUS_MISSING_COMPONENT, "%s%s is missing", m.name.c_str(), suffix);
            }
        }
    }
    size_t next = 0; // components are stored in the order of macko.tensor.name
    for (size_t t = 0; t < tensors.size();) {
        if (next < file->sparse.size() &&
            tensors[t].name == file->sparse[next].name + file->sparse[next].format->components()[0]) {
            TRY(bind_components(file, t, next));
            t += file->sparse[next++].n_tensors;
        } else {
            TRY(check_not_component(tensors[t], sparse_names));
            t++;
        }
    }
    // now next is the number of matrices: all components exist, and each was bound or refused
    return GGML_MACKO_STATUS_OK;
}

static int check_dense_size(const model_file & file) {
    int64_t total = 0; // cannot overflow: at most 2^16 tensors of at most 2^34 bytes
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
    // The version comes first, because a newer format may have keys that are unknown to this version.
    TRY(check_version(file->header));
    TRY(check_reserved_keys(file->header, true));
    TRY(read_matrices(file));
    TRY(check_components(file));
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
        t += m.n_tensors;
    }
    return out;
}

} // namespace macko
