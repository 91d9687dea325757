// Tests of the file layer with valid and hostile files. Each hostile file has one fault, and must be refused with the
// status of that fault: the tables of lies are in lies/.
#include "lies/lies.h"

TEST(valid_file_is_accepted) {
    lie("the valid file", S(OK), [](file &) {});
    lie("a dense file", S(OK), [](file & f) { f = base_model().dense; });
}

// All tests together must produce each status that a file can cause.
static void check_every_status_was_seen() {
    for (int code : { S(IO), S(NOT_A_FILE), S(TRUNCATED), S(FILE_CHANGED) }) {
        CHECK(seen.count(code), "no test file produced %s", ggml_macko_status_name(code));
    }
    for (int code = 20; code < 60; code++) {
        CHECK(strcmp(ggml_macko_status_name(code), "unknown") == 0 || seen.count(code), "no test file produced %s",
              ggml_macko_status_name(code));
    }
}

int main(int argc, char ** argv) {
    if (const int code = begin_tests(argc, argv); code >= 0) {
        return code;
    }
    run_tests();
    if (all_tests_run()) {
        check_every_status_was_seen();
    }
    printf("%d cases\n", n_cases);
    return test_summary("test-gguf-header");
}
