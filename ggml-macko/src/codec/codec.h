// What a file format of sparse matrices has to provide, so that everything else works with it: the loader, the C API,
// the tools. One object per format, listed in the registry (registry.h); nothing outside a format's folder, the
// registry and a device's own tables of layouts names a format. No ggml, no CUDA.
#pragma once

#include "codec/macko/macko.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

namespace macko {

class codec;
class encoded_matrix;

// What a component tensor of a matrix must be: its ggml type and its length in elements, exactly `length`, or, with
// `multiple` > 0, any multiple of that up to `length`.
struct component_rule {
    int32_t type;
    int64_t length;
    int64_t multiple;
};

// elements of an array; 0 for a type that no component has
int64_t array_length(const ggml_macko_array & array);

// elements of a matrix that nobody has checked; 0 if their number is negative or does not fit
inline int64_t n_elements(const ggml_macko_matrix & m) {
    int64_t n = 0;
    return m.rows > 0 && m.cols > 0 && checked_mul(m.rows, m.cols, &n) ? n : 0;
}

// entries that recoding a matrix to MACKO may take, as far as its description tells
constexpr int64_t max_recoded(const macko_desc & desc) {
    const int64_t n = desc.nnz + (desc.rows * desc.cols - desc.nnz) / (int64_t(1) << desc.delta_bits);
    return n < MAX_STORED ? n : MAX_STORED;
}

// A matrix whose arrays passed the checks of codec::open(). The arrays must outlive it. Formats derive from it; a
// device that has something of its own for a format casts the view to the format's class.
class codec_view {
public:
    virtual ~codec_view() = default;
    const codec & format() const { return *format_; }
    // shape, type and nnz; delta_bits: those of the MACKO rows that recode() makes of it
    virtual const macko_desc & desc() const = 0;
    // The checks that open() left because they need the rows decoded. Nothing may rely on columns and values before
    // they passed.
    [[nodiscard]] virtual int check_rows(int n_threads) const {
        (void)n_threads;
        return GGML_MACKO_STATUS_OK;
    }
    // Calls f(row, its cols dense elements) for all rows, from several threads, in any order. Makes the checks of
    // check_rows() as well; on an error f has seen some of the rows.
    [[nodiscard]] virtual int for_each_row(int                                                n_threads,
                                           const std::function<void(int64_t, const void *)> & f) const = 0;
    // How far the dense values of non-zeros k ... k + n - 1, counted row after row, may be from `source`, which was
    // encoded. Only after the checks.
    virtual void error_bounds(int64_t k, int64_t n, const float * source, double * bounds) const {
        (void)k;
        (void)source;
        std::fill(bounds, bounds + n, 0.0);
    }
    // Writes rows x cols dense elements, with the checks of check_rows(); on an error some have been written.
    [[nodiscard]] virtual int decode(void * dense, int n_threads) const;

protected:
    explicit codec_view(const codec & format) : format_(&format) {}
    codec_view(const codec_view &)             = default;
    codec_view & operator=(const codec_view &) = default;

private:
    const codec * format_;
};

// arrays that an encoder made, with their memory
class encoded_matrix {
public:
    virtual ~encoded_matrix() = default;
    // points into this object; everything but the format's name, which encode_matrix's caller sets
    virtual ggml_macko_matrix matrix() const = 0;
};

class codec {
public:
    struct traits {
        const char *                   name;       // in macko.tensor.format
        std::vector<const char *>      components; // suffixes with their dot, in the order of the tensor table
        std::vector<ggml_macko_option> options;    // of the encoder, with their defaults
        // The components are MACKO's values, deltas and row_ptr: the loader streams them in ranges of rows. Matrices of
        // other formats are read and checked as a whole.
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

    // ---- the header of a file: m describes the matrix, its arrays have types and sizes, but no data ----

    // shape, type, value type, bits and nnz, before any array is known: the limits of FORMAT.md section 4 and the
    // format's own. The value type is only known later and equals the type here.
    [[nodiscard]] virtual int check_desc(const ggml_macko_matrix & m) const = 0;
    // the value type that the type of the first component stands for
    virtual int32_t value_type_of(int32_t dense_type, int32_t component_type) const {
        (void)component_type;
        return dense_type;
    }
    // what each component must be; the length of one may follow from that of an earlier one
    virtual void component_rules(const ggml_macko_matrix & m, component_rule * rules) const = 0;
    // whether the components, which obey the rules, have room for nnz values
    [[nodiscard]] virtual int check_nnz(const ggml_macko_matrix & m) const {
        (void)m;
        return GGML_MACKO_STATUS_OK;
    }
    // delta_bits of the MACKO rows that a matrix is recoded to
    virtual int32_t recoded_bits(int32_t bits) const { return bits; }
    // entries of those rows with their padding, or an upper bound
    virtual int64_t max_entries(const ggml_macko_matrix & m) const;

    // ---- matrices ----

    // Checks everything that does not need decoding: m is untrusted, but has as many arrays as the format has
    // components, none of them null, of the right types. *view points into m's arrays.
    [[nodiscard]] virtual int open(const ggml_macko_matrix & m, int n_threads,
                                   std::unique_ptr<codec_view> * view) const = 0;
    // Encodes desc.rows x desc.cols elements of desc.type (desc's other members are not set). options: a value for each
    // of options(). NOT_FINITE if a value is Inf or NaN.
    [[nodiscard]] virtual int encode(const void * dense, const macko_desc & desc, const int64_t * options,
                                     int n_threads, std::unique_ptr<encoded_matrix> * out) const = 0;

private:
    const traits traits_;
};

// m as MACKO rows, from what its format says of it
inline macko_desc rows_desc(const codec & format, const ggml_macko_matrix & m) {
    return { m.rows, m.cols, m.type, format.recoded_bits(m.bits), m.nnz };
}

// An option that is a number of 32 bits; one that does not fit becomes INT32_MIN, which no option accepts.
constexpr int32_t int32_option(int64_t value) {
    return value < INT32_MIN || value > INT32_MAX ? INT32_MIN : static_cast<int32_t>(value);
}

// Encodes with options by name; those not given have their defaults. BAD_ARGUMENT for a name that the format lacks.
[[nodiscard]] int encode_matrix(const codec & format, const void * dense, const macko_desc & desc,
                                const ggml_macko_option * options, int n_options, int n_threads,
                                std::unique_ptr<encoded_matrix> * out);
// Checks what m says without its data: shape, number and types of its arrays.
[[nodiscard]] int check_header(const codec & format, const ggml_macko_matrix & m);
// The same, and that the arrays are there, then opens it.
[[nodiscard]] int open_matrix(const codec & format, const ggml_macko_matrix & m, int n_threads,
                              std::unique_ptr<codec_view> * view);

} // namespace macko
