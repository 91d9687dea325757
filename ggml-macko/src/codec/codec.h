// The interface of a sparse matrix format. The loader, the C API and the tools work with any format that implements it.
// There is one object per format, listed in the registry (registry.h). Only a format's own folder, the registry and the
// devices' layout tables name a format. Uses neither ggml nor CUDA.
#pragma once

#include "codec/macko/macko.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

namespace macko {

class codec;
class encoded_matrix;

// delta_bits of the MACKO rows that matrices with bitmaps or gap codes are recoded to
constexpr int32_t RECODED_BITS = 4;

// Requirements on a component tensor of a matrix: its ggml type, and its length in elements. The length must be exactly
// `length`, or, if `multiple` > 0, a multiple of `multiple` that is at most `length`.
struct component_rule {
    int32_t type;
    int64_t length;
    int64_t multiple;
};

// Elements of an array; 0 for a type that no component has.
int64_t array_length(const ggml_macko_array & array);

// Elements of an unchecked matrix; 0 if the number is negative or overflows.
inline int64_t n_elements(const ggml_macko_matrix & m) {
    int64_t n = 0;
    return m.rows > 0 && m.cols > 0 && checked_mul(m.rows, m.cols, &n) ? n : 0;
}

// Upper bound on the MACKO entries of a recoded matrix, from its description.
constexpr int64_t max_recoded(const macko_desc & desc) {
    const int64_t n = desc.nnz + (desc.rows * desc.cols - desc.nnz) / (int64_t(1) << desc.delta_bits);
    return n < MAX_STORED ? n : MAX_STORED;
}

// A matrix whose arrays passed the checks of codec::open(). The arrays must outlive it. Each format derives its own
// class; a device with a layout for a format casts the view to that class.
class codec_view {
public:
    virtual ~codec_view() = default;
    const codec & format() const { return *format_; }
    // shape, type and nnz; delta_bits of the MACKO rows that recode() makes
    virtual const macko_desc & desc() const = 0;
    // Runs the checks that need decoded rows, which open() skips. Columns and values are untrusted before they pass.
    [[nodiscard]] virtual int check_rows(int n_threads) const {
        (void)n_threads;
        return GGML_MACKO_STATUS_OK;
    }
    // Calls f(row, its cols dense elements) for all rows, from several threads, in any order. Also runs the checks of
    // check_rows(); on an error f has been called for some rows.
    [[nodiscard]] virtual int for_each_row(int                                                n_threads,
                                           const std::function<void(int64_t, const void *)> & f) const = 0;
    // Maximum distance of the dense values of n non-zeros of a row from `source`, the values that were encoded.
    // columns: the columns of these non-zeros, ascending. k: the number of non-zeros before them, in row-major order.
    // Only valid after the checks.
    virtual void error_bounds(int64_t row, const int32_t * columns, int64_t k, int64_t n, const float * source,
                              double * bounds) const {
        (void)row;
        (void)columns;
        (void)k;
        (void)source;
        std::fill(bounds, bounds + n, 0.0);
    }
    // Writes rows x cols dense elements and runs the checks of check_rows(); on an error some elements have been
    // written.
    [[nodiscard]] virtual int decode(void * dense, int n_threads) const;

protected:
    explicit codec_view(const codec & format) : format_(&format) {}
    codec_view(const codec_view &)             = default;
    codec_view & operator=(const codec_view &) = default;

private:
    const codec * format_;
};

// Calls decode(row, its dense elements) and then f(row, them) for all rows of desc, from several threads, in any order.
void for_each_decoded_row(const macko_desc & desc, int n_threads, const std::function<void(int64_t, void *)> & decode,
                          const std::function<void(int64_t, const void *)> & f);

// The arrays made by an encoder, with their memory.
class encoded_matrix {
public:
    virtual ~encoded_matrix() = default;
    // Points into this object. The caller of encode_matrix sets the format's name.
    virtual ggml_macko_matrix matrix() const = 0;

protected:
    // The description of a matrix, without its arrays.
    static ggml_macko_matrix describe(const macko_desc & d, int32_t value_type, int32_t index_bits, int32_t n_arrays) {
        return { 0, nullptr, d.rows, d.cols, d.type, value_type, index_bits, d.nnz, n_arrays, {} };
    }
    // A component that consists of all elements of v.
    template <typename V> static ggml_macko_array whole(const V & v, int32_t type) {
        return { v.data(), static_cast<int64_t>(v.size() * sizeof(v[0])), type };
    }
};

class codec {
public:
    struct traits {
        const char *                   name;       // value of macko.tensor.format
        std::vector<const char *>      components; // suffixes with their dot, in the order of the tensor table
        std::vector<ggml_macko_option> options;    // options of the encoder, with their defaults
        // The components are MACKO's values, deltas and row_ptr, which the loader streams in ranges of rows. Matrices
        // of other formats are read and checked as a whole.
        bool streams_rows;
    };

    explicit codec(traits t) : traits_(std::move(t)) {}
    virtual ~codec()                 = default;
    codec(const codec &)             = delete;
    codec & operator=(const codec &) = delete;

    const char *                           name() const { return traits_.name; }
    const std::vector<const char *> &      components() const { return traits_.components; }
    const std::vector<ggml_macko_option> & options() const { return traits_.options; }
    bool                                   streams_rows() const { return traits_.streams_rows; }

    // ---- the header of a file: m describes the matrix; its arrays have types and sizes, but no data ----

    // Checks shape, type, value type, bits and nnz against the limits of FORMAT.md section 4 and the format's own,
    // before any array is known. value_type is not known yet; callers pass type.
    [[nodiscard]] virtual int check_desc(const ggml_macko_matrix & m) const = 0;
    // The value type that the types and sizes of the components imply. m.value_type is not known yet.
    virtual int32_t value_type_of(const ggml_macko_matrix & m) const { return m.type; }
    // Requirements on each component. The length of one may depend on the length of an earlier one.
    virtual void component_rules(const ggml_macko_matrix & m, component_rule * rules) const = 0;
    // Checks that components that meet the requirements can hold nnz values.
    [[nodiscard]] virtual int check_nnz(const ggml_macko_matrix & m) const {
        (void)m;
        return GGML_MACKO_STATUS_OK;
    }
    // Columns that share a scale; 0 in formats without such scales.
    virtual int64_t window(const ggml_macko_matrix & m) const {
        (void)m;
        return 0;
    }
    // delta_bits of the MACKO rows that a matrix is recoded to
    virtual int32_t recoded_bits(int32_t bits) const { return bits; }
    // Entries of the recoded MACKO rows with their padding, or an upper bound.
    virtual int64_t max_entries(const ggml_macko_matrix & m) const;

    // ---- matrices ----

    // Runs all checks that need no decoding. m is untrusted, but has as many arrays as the format has components, with
    // the right types and no null pointers. *view points into m's arrays.
    [[nodiscard]] virtual int open(const ggml_macko_matrix & m, int n_threads,
                                   std::unique_ptr<codec_view> * view) const = 0;
    // Encodes desc.rows x desc.cols elements of desc.type (the other members of desc are not set). options: one value
    // for each of options(). NOT_FINITE if a value is Inf or NaN.
    [[nodiscard]] virtual int encode(const void * dense, const macko_desc & desc, const int64_t * options,
                                     int n_threads, std::unique_ptr<encoded_matrix> * out) const = 0;

protected:
    // BAD_NNZ if nnz is more than the n `elements` of a component.
    [[nodiscard]] static int check_room(const ggml_macko_matrix & m, int64_t n, const char * elements);

private:
    const traits traits_;
};

// The description of m as MACKO rows.
inline macko_desc rows_desc(const codec & format, const ggml_macko_matrix & m) {
    return { m.rows, m.cols, m.type, format.recoded_bits(m.index_bits), m.nnz };
}

// Converts an option to 32 bits; a number out of range becomes INT32_MIN, which no option accepts.
constexpr int32_t int32_option(int64_t value) {
    return value < INT32_MIN || value > INT32_MAX ? INT32_MIN : static_cast<int32_t>(value);
}

// Encodes with options by name; missing options have their defaults. BAD_ARGUMENT for an option that the format lacks.
[[nodiscard]] int encode_matrix(const codec & format, const void * dense, const macko_desc & desc,
                                const ggml_macko_option * options, int n_options, int n_threads,
                                std::unique_ptr<encoded_matrix> * out);
// Checks the description of m without its data: shape, number and types of its arrays.
[[nodiscard]] int check_header(const codec & format, const ggml_macko_matrix & m);
// Also checks that the arrays exist, then opens m.
[[nodiscard]] int open_matrix(const codec & format, const ggml_macko_matrix & m, int n_threads,
                              std::unique_ptr<codec_view> * view);

} // namespace macko
