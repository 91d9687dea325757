// The environment variables of ggml-macko: one table, and the only code that reads them. A value is a list of words
// with commas between them, or a path. The functions read the environment at each call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace macko::environment {

constexpr char LOAD[]        = "GGML_MACKO_LOAD";
constexpr char DISABLE[]     = "GGML_MACKO_DISABLE";
constexpr char ENABLE[]      = "GGML_MACKO_ENABLE";
constexpr char CPU_KERNELS[] = "GGML_MACKO_CPU_KERNELS";

// A row of the table: an allowed word of a variable, or a variable that holds a path.
struct setting {
    const char * variable;
    const char * word; // nullptr: a path
    const char * help; // a Markdown fragment
};
// The i-th row, or nullptr after the last one. The rows of a variable are adjacent.
const setting * setting_at(size_t i);

// An error line with the variable, the word and the allowed words, if a variable that begins with GGML_MACKO_ is
// missing in the table or contains a word that is not allowed. "" if there is no error.
std::string find_error();
// The same for one variable.
std::string find_error(const char * variable);

// "" if the variable is not set.
const char * value_of(const char * variable);
// One bit for each word in the variable's value: bit i is the i-th row of the variable in the table.
uint32_t words_of(const char * variable);
bool     has(const char * variable, const char * word);

inline bool is_disabled(const char * part) { return has(DISABLE, part); }
inline bool is_enabled(const char * feature) { return has(ENABLE, feature); }

} // namespace macko::environment
