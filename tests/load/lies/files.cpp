// The file system: what is not a regular file, files that change, and which files the plugin opens.
#include "lies.h"

static int open_path(const std::string & path, std::unique_ptr<macko::model_file> * file) {
    const int status = macko::model_file_open(path.c_str(), true, file);
    seen.insert(status);
    return status;
}

TEST(folders_and_missing_files_are_refused) {
    const temporary_folder             folder("macko-test");
    std::unique_ptr<macko::model_file> file;
    expect("directory", S(NOT_A_FILE), open_path(folder.path, &file));
    expect("missing", S(IO), open_path(folder.path + "/nonesuch", &file));
    CHECK(strstr(ggml_macko_last_error(), "No such file") && strstr(ggml_macko_last_error(), "nonesuch"), "%s",
          ggml_macko_last_error());
    expect("no name", S(IO), open_path("", &file));
}

TEST(change_of_an_open_file_is_noticed) {
    const bytes                        content = builder::serialize(builder::sparse_file(base_model()));
    const temporary_file               f(content);
    std::unique_ptr<macko::model_file> file;
    CHECK(open_path(f.path, &file) == S(OK) && file->check_unchanged() == S(OK), "%s", ggml_macko_last_error());
    std::filesystem::resize_file(f.path, content.size() / 2);
    const int status = file->check_unchanged();
    seen.insert(status);
    expect("truncated while open", S(FILE_CHANGED), status);
    collector c(file->sparse.back());
    expect("payload gone", S(TRUNCATED), macko::read_payload(*file, file->sparse.back(), 2, c));
    CHECK(strstr(ggml_macko_last_error(), "short read"), "%s", ggml_macko_last_error());
}

// The files that the plugin opens, and the files that it leaves to llama.cpp with NOT_SPARSE.
TEST(open_sparse) {
    auto open_content = [](const bytes & content) {
        const temporary_file               f(content);
        std::unique_ptr<macko::model_file> file;
        return macko::model_file_open_sparse(f.path.c_str(), macko::compression::off, false, &file);
    };
    auto sparse_with = [](const file_lie & change) {
        builder::file f = builder::sparse_file(base_model());
        change(f);
        return builder::serialize(f);
    };
    expect("sparse", S(OK), open_content(sparse_with([](file &) {})));
    expect("sparse, hostile metadata", S(BAD_KEY_VALUE),
           open_content(sparse_with([](file & f) { f.set(scalar<uint32_t>("llama.block_count", U32, 0)); })));
    expect("sparse, broken header", S(DUPLICATE_KEY),
           open_content(sparse_with([](file & f) { f.keys.push_back(f.keys[1]); })));
    expect("sparse, macko.version missing", S(BAD_KEY),
           open_content(sparse_with([](file & f) { f.drop("macko.version"); })));
    bytes late =
        sparse_with([](file & f) { f.keys.insert(f.keys.begin(), text("x", std::string((1 << 20) - 2000, 'x'))); });
    for (size_t n = 0; n < 3000; n += 7) { // so that the key also spans the border of two chunks
        late.insert(late.begin() + 100, 7, 'x');
        CHECK(open_content(late) != S(NOT_SPARSE), "claim not found after %zu more bytes", n);
    }
    builder::file dense = base_model().dense;
    expect("dense", S(NOT_SPARSE), open_content(builder::serialize(dense)));
    dense.set(text("general.architecture", "mamba"));
    expect("dense, other architecture", S(NOT_SPARSE), open_content(builder::serialize(dense)));
    dense.keys.push_back(dense.keys[1]);
    expect("dense, broken", S(NOT_SPARSE), open_content(builder::serialize(dense)));
    expect("no GGUF", S(NOT_SPARSE), open_content({ 'P', 'K' }));
    std::unique_ptr<macko::model_file> file;
    expect("missing", S(NOT_SPARSE), macko::model_file_open_sparse("/nonesuch", macko::compression::off, false, &file));
    expect("directory", S(NOT_A_FILE), macko::model_file_open_sparse("/", macko::compression::off, false, &file));
}

// A consumer that copies whole bytes, like the one for GPUs, must not overwrite the codes of an adjacent block with
// zeros.
TEST(compressed_blocks_are_not_the_sparse_file) {
    struct copier : macko::payload_consumer {
        bytes values, deltas;
        int   n_blocks = 0;
        int   consume(const macko::macko_view & view, int64_t) override {
            static std::mutex                 mutex;
            const std::lock_guard<std::mutex> lock(mutex);
            const macko::macko_rows &         r = view.rows();
            const int64_t begin = r.row_ptr[r.row_begin], end = r.row_ptr[r.row_end], b = r.desc.delta_bits,
                          nb         = macko::value_nbytes(r.desc.type);
            const int64_t byte_begin = begin * b / 8, byte_end = (end * b + 7) / 8;
            memcpy(values.data() + begin * nb, static_cast<const uint8_t *>(r.values) + (begin - r.base) * nb,
                     static_cast<size_t>((end - begin) * nb));
            memcpy(deltas.data() + byte_begin, r.deltas + byte_begin - r.base * b / 8,
                     static_cast<size_t>(byte_end - byte_begin));
            n_blocks++;
            return S(OK);
        }
    };
    const builder::model               m = builder::tiny_llama(512, 1, 31);
    const temporary_file               f(builder::serialize(m.dense));
    std::unique_ptr<macko::model_file> file;
    CHECK(macko::model_file_open_sparse(f.path.c_str(), macko::compression::bit_exact, false, &file) == S(OK), "%s",
          ggml_macko_last_error());
    int n_blocks = 0;
    for (const macko::sparse_tensor_info & matrix : file->sparse) {
        const auto                t = std::find_if(m.dense.tensors.begin(), m.dense.tensors.end(),
                                                   [&](const builder::tensor & x) { return x.name == matrix.name; });
        const builder::components want =
            builder::encode({ t->name, t->ne, t->type, t->data }, static_cast<uint32_t>(matrix.desc.delta_bits));
        copier c;
        c.values.resize(want.values.size());
        c.deltas.resize(want.deltas.size());
        CHECK(macko::read_payload(*file, matrix, 2, c) == S(OK), "%s", ggml_macko_last_error());
        CHECK(c.values == want.values && c.deltas == want.deltas, "%s, %d bits, %d blocks", matrix.name.c_str(),
              matrix.desc.delta_bits, c.n_blocks);
        n_blocks += c.n_blocks;
    }
    CHECK(n_blocks > 2 * static_cast<int>(file->sparse.size()), "%d blocks of %zu matrices", n_blocks,
          file->sparse.size());
}
