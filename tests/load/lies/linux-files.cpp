// Files of Linux: pipes, devices and links in place of a model, and files that are replaced while they are read.
#include "lies.h"

#include <sys/stat.h>
#include <unistd.h>

TEST(file_system) {
    const temporary_folder folder("macko-test");
    const std::string &    base      = folder.path;
    const bytes            content   = builder::serialize(builder::sparse_file(base_model()));
    auto                   open_path = [](const std::string & path) {
        std::unique_ptr<macko::model_file> file;
        const int                          status = macko::model_file_open(path.c_str(), true, &file);
        seen.insert(status);
        return status;
    };
    CHECK(mkfifo((base + "/fifo").c_str(), 0600) == 0, "mkfifo");
    expect("FIFO without a writer", S(NOT_A_FILE), open_path(base + "/fifo"));
    expect("device", S(NOT_A_FILE), open_path("/dev/zero"));
    CHECK(symlink("loop", (base + "/loop").c_str()) == 0, "symlink");
    expect("symlink loop", S(IO), open_path(base + "/loop"));
    expect("procfs file of size 0", S(TRUNCATED), open_path("/proc/self/status"));
    write_file(base + "/model", content);
    CHECK(symlink("model", (base + "/link").c_str()) == 0, "symlink");
    expect("symlink to a file", S(OK), open_path(base + "/link"));

    std::unique_ptr<macko::model_file>   file;
    std::unique_ptr<macko::dense_stream> v;
    CHECK(macko::model_file_open((base + "/model").c_str(), true, &file) == S(OK) &&
              macko::dense_stream::create(*file, &v) == S(OK),
          "%s", ggml_macko_last_error());
    CHECK(file->check_unchanged() == S(OK), "%s", ggml_macko_last_error());
    write_file(base + "/other", content);
    CHECK(rename((base + "/other").c_str(), (base + "/model").c_str()) == 0, "rename");
    CHECK(file->check_unchanged() == S(OK), "renamed over: the old inode is still open and unchanged");
    CHECK(macko::model_file_open((base + "/model").c_str(), true, &file) == S(OK) &&
              macko::dense_stream::create(*file, &v) == S(OK),
          "%s", ggml_macko_last_error());
    FILE * stream = v->open_stream();
    CHECK(truncate((base + "/model").c_str(), static_cast<off_t>(content.size() / 2)) == 0, "truncate");
    bytes buffer(content.size() * 2);
    CHECK(fread(buffer.data(), 1, buffer.size(), stream) < static_cast<size_t>(v->size()) && ferror(stream),
          "the stream reports an error");
    expect("truncated while read", S(TRUNCATED), v->status());
    CHECK(strstr(ggml_macko_last_error(), "/model: short read"), "%s", ggml_macko_last_error());
    fclose(stream);
}
