// The table of environment variables, and the errors for unknown variables and words.
#include "platform/environment.h"

#include "system.h"
#include "test.h"

#include <cstring>
#include <string>

using namespace macko::environment;

// Unsets a variable at the end of the scope.
struct variable_set {
    const char * name;
    variable_set(const char * variable, const char * value) : name(variable) { test_system::set_variable(name, value); }
    ~variable_set() { test_system::set_variable(name, nullptr); }
};

TEST(allowed_words_pass) {
    CHECK(find_error().empty(), "%s", find_error().c_str());
    for (size_t i = 0; const setting * s = setting_at(i); i++) {
        const variable_set v(s->variable, s->word ? s->word : "any, path");
        CHECK(find_error().empty(), "%s", find_error().c_str());
        CHECK(!s->word || has(s->variable, s->word), "%s=%s", s->variable, s->word);
    }
    for (const char * value : { "", "graphs", "offload,graphs", "graphs,graphs", "csc,relu-skip,fusion" }) {
        const variable_set v(DISABLE, value);
        CHECK(find_error().empty(), "%s", find_error().c_str());
        CHECK(is_disabled("graphs") == (strstr(value, "graphs") != nullptr), "%s", value);
        CHECK(is_disabled("csc") == (strstr(value, "csc") != nullptr), "%s", value);
        CHECK(!is_disabled("cublas"), "%s", value);
    }
}

TEST(unknown_words_are_named) {
    const struct {
        const char *variable, *value, *word;
    } cases[] = {
        { DISABLE, "graph", "graph" },
        { DISABLE, "graphs,", "" },
        { DISABLE, ",graphs", "" },
        { DISABLE, "graphs,,fusion", "" },
        { DISABLE, "graphs, fusion", " fusion" },
        { DISABLE, "GRAPHS", "GRAPHS" },
        { DISABLE, "1", "1" },
        { LOAD, "graphs", "graphs" },
        { ENABLE, "strict-versions,rpc", "rpc" },
        { CPU_KERNELS, "avx1024", "avx1024" },
    };
    for (const auto & c : cases) {
        const variable_set v(c.variable, c.value);
        const std::string  error = find_error(), start = std::string(c.variable) + "=" + c.value + ": unknown word '";
        CHECK(error.compare(0, start.size(), start) == 0, "%s", error.c_str());
        CHECK(error.compare(start.size(), strlen(c.word) + 1, c.word + std::string("'")) == 0, "%s", error.c_str());
        CHECK(find_error(c.variable) == error, "%s", error.c_str());
        for (size_t i = 0; const setting * s = setting_at(i); i++) {
            const bool named = error.find(std::string(s->word ? s->word : "?"), error.find("allowed: ")) != error.npos;
            CHECK(strcmp(s->variable, c.variable) != 0 || named, "%s", error.c_str());
        }
    }
    const variable_set v(DISABLE, "nothing,fusion");
    CHECK(is_disabled("fusion") && !is_disabled("graphs"), "known words next to an unknown one have an effect");
}

TEST(unknown_variables_are_named) {
    for (const char * name : { "GGML_MACKO_", "GGML_MACKO_SKIP", "GGML_MACKO_DISABLED", "GGML_MACKO_load" }) {
        const variable_set v(name, "1");
        CHECK(find_error() == std::string(name) + ": unknown environment variable; ggml-macko reads GGML_MACKO_LOAD, "
                                                  "GGML_MACKO_DISABLE, GGML_MACKO_ENABLE, GGML_MACKO_CPU_KERNELS, "
                                                  "GGML_MACKO_PLUGIN, GGML_MACKO_CONVERT_HF",
              "%s", find_error().c_str());
    }
    const variable_set v("GGML_MACK", "1"), w("XGGML_MACKO_SKIP", "1");
    CHECK(find_error().empty(), "%s", find_error().c_str());
}

TEST(only_one_kernel_set) {
    const variable_set v(CPU_KERNELS, "portable,portable");
    CHECK(find_error().find("only one word") != std::string::npos, "%s", find_error().c_str());
}

TEST(words_are_bits_in_their_order) {
    const variable_set v(LOAD, "act-thresholds,compress");
    CHECK(words_of(LOAD) == (1 | 32), "%u", words_of(LOAD));
    CHECK(words_of(DISABLE) == 0, "%u", words_of(DISABLE));
}

int main(int argc, char ** argv) {
    for (size_t i = 0; const setting * s = setting_at(i); i++) {
        test_system::set_variable(s->variable, nullptr);
    }
    return test_main("test-environment", argc, argv);
}
