// The largest accepted value and the smallest refused one; files truncated at every byte.
#include "lies.h"

TEST(limits_of_keys_and_tensors_are_enforced) {
    auto keys = [](size_t n) {
        builder::file f;
        for (size_t i = 0; i < n; i++) {
            f.keys.push_back(scalar<uint8_t>("k" + std::to_string(i), U8, 0));
        }
        return f;
    };
    expect("65536 keys", S(OK), check_header(keys(65536)));
    expect("65537 keys", S(LIMIT), check_header(keys(65537)));
    auto tensors = [](size_t n) {
        builder::file f;
        for (size_t i = 0; i < n; i++) {
            f.tensors.push_back({ "t" + std::to_string(i), { 1 }, TYPE_I8, {}, 1 });
        }
        return f;
    };
    expect("65536 tensors", S(OK), check_header(tensors(65536)));
    expect("65537 tensors", S(LIMIT), check_header(tensors(65537)));
    auto one = [](const tensor & t) {
        builder::file f;
        f.tensors.push_back(t);
        return f;
    };
    expect("name of 63", S(OK), check_header(one({ std::string(63, 'n'), { 4 }, TYPE_I8, {}, 4 })));
    expect("name of 64", S(BAD_NAME), check_header(one({ std::string(64, 'n'), { 4 }, TYPE_I8, {}, 4 })));
    expect("four dimensions", S(OK), check_header(one({ "t", { 2, 3, 4, 5 }, TYPE_F32, {}, 480 })));
    expect("16 GiB", S(OK), check_header(one({ "t", { uint64_t(1) << 34 }, TYPE_I8, {}, uint64_t(1) << 34 })));
    expect("16 GiB + 1", S(LIMIT),
           check_header(one({ "t", { (uint64_t(1) << 34) + 1 }, TYPE_I8, {}, (uint64_t(1) << 34) + 1 })));
    expect("no tensors", S(OK), check_header(keys(3)));
    auto with_key = [](const key & k) {
        builder::file f;
        f.keys.push_back(k);
        return f;
    };
    expect("key name of 65535", S(OK), check_header(with_key(scalar<uint8_t>(std::string(65535, 'k'), U8, 0))));
    expect("key name of 65536", S(LIMIT), check_header(with_key(scalar<uint8_t>(std::string(65536, 'k'), U8, 0))));
    expect("array of 2^24", S(OK), check_header(with_key(array<uint8_t>("k", U8, std::vector<uint8_t>(1 << 24)))));
    expect("array of 2^24+1", S(LIMIT),
           check_header(with_key(array<uint8_t>("k", U8, std::vector<uint8_t>((1 << 24) + 1)))));
    expect("string of 64 MiB", S(OK), check_header(with_key(text("k", std::string(64 << 20, 's')))));
    expect("string of 64 MiB + 1", S(LIMIT), check_header(with_key(text("k", std::string((64 << 20) + 1, 's')))));
}

TEST(valid_alignment_and_padding_are_accepted) {
    for (uint32_t a : { 8u, 16u, 1u << 20 }) {
        builder::file f = builder::sparse_file(base_model());
        f.set(scalar<uint32_t>("general.alignment", U32, a));
        f.alignment = a;
        expect("alignment", S(OK), check_header(f));
    }
    builder::file unpadded = builder::sparse_file(base_model());
    unpadded.tensors.push_back({ "last", { 5 }, TYPE_F32, bytes(20), 0 });
    unpadded.pad_end = false;
    expect("unpadded end", S(OK), check_header(unpadded));
}

TEST(limits_of_sparse_tensors_are_enforced) {
    const uint64_t MiB = 1 << 20;
    const uint64_t GiB = 1 << 30;
    expect("cols 2^24", S(OK), check_header(empty_sparse_file(1, 1 << 24, 1, 8, MiB)));
    expect("cols 2^24+1", S(LIMIT), check_header(empty_sparse_file(1, (1 << 24) + 1, 1, 8, MiB)));
    expect("rows 2^24", S(OK), check_header(empty_sparse_file(1, 1, 1 << 24, 8, MiB)));
    expect("rows 2^24+1", S(LIMIT), check_header(empty_sparse_file(1, 1, (1 << 24) + 1, 8, MiB)));
    expect("matrix of 16 GiB", S(OK), check_header(empty_sparse_file(1, 1 << 24, 512, 8, GiB)));
    expect("matrix of 16 GiB + a row", S(LIMIT), check_header(empty_sparse_file(1, 1 << 24, 513, 8, GiB)));
    expect("n_padded 2^31-512", S(OK), check_header(empty_sparse_file(1, 1 << 23, 256, (uint64_t(1) << 31) - 512, 0)));
    expect("n_padded 2^31-504", S(BAD_COMPONENT),
           check_header(empty_sparse_file(1, 1 << 23, 256, (uint64_t(1) << 31) - 504, 0)));
    expect("n_padded of all elements", S(OK), check_header(empty_sparse_file(1, 15, 5, 80, 0)));
    expect("n_padded of more", S(BAD_COMPONENT), check_header(empty_sparse_file(1, 15, 5, 88, 0)));
    expect("2 TiB", S(OK), check_header(empty_sparse_file(126, 1 << 24, 512, 8, 32 * GiB)));
    expect("2 TiB + 1", S(LIMIT), check_header(empty_sparse_file(126, 1 << 24, 512, 8, 32 * GiB + 1)));
    // The dense file may be 64 times as large as the sparse one. With s bytes next to a dense tensor of d bytes, the
    // limit is 2^25 + d = 64 (s + d).
    for (int64_t extra : { -1, 0, 1 }) {
        layout        l;
        uint64_t      rest = 0;
        builder::file f    = empty_sparse_file(1, 1 << 24, 1, 8, 1);
        f.pad_end          = false;
        serialize_header(f, &l, &rest);
        rest -= 1;
        const uint64_t fit = ((uint64_t(1) << 25) - 64 * rest + 62) / 63; // smallest d with 2^25 + d <= 64 (rest + d)
        f                  = empty_sparse_file(1, 1 << 24, 1, 8, fit + static_cast<uint64_t>(extra));
        f.pad_end          = false;
        expect("64 x file size", extra < 0 ? S(LIMIT) : S(OK), check_header(f));
    }
}

// ---- truncation ----

TEST(truncated_file_is_refused) {
    builder::model  small; // one matrix and no vocabulary, about 4 KB
    std::mt19937_64 rng(3);
    small.sparse.push_back({ "m", { 64, 80 }, TYPE_F16, builder::random_data(rng, TYPE_F16, 64 * 80, 64, 0.3) });
    small.bits = { 4 };
    small.dense.tensors.push_back({ "m", { 64, 80 }, TYPE_F16, small.sparse[0].data, 0 });
    for (const builder::model & m : { small, builder::tiny_llama(96, 2, 2) }) {
        const bytes b = builder::serialize(builder::sparse_file(m));
        printf("truncation at every byte of a file of %zu bytes\n", b.size());
        for (size_t n = 0; n < b.size(); n++) {
            macko::gguf_header header;
            const int          status = macko::read_gguf_header(memory_source(b.data(), n), &header);
            // only the padding after the last tensor may be missing
            CHECK(status == S(TRUNCATED) || (status == S(OK) && n + 32 > b.size()), "cut at %zu of %zu: %s", n,
                  b.size(), ggml_macko_last_error());
            n_cases++;
        }
        seen.insert(S(TRUNCATED));
        for (size_t n : { b.size() / 3, b.size() - 40 }) { // also read from the file system
            expect("cut", S(TRUNCATED), check_all(bytes(b.begin(), b.begin() + static_cast<int64_t>(n)), false));
        }
    }
}
