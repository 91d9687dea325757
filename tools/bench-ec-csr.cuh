// The --ec-csr mode of bench-spmv-gpu.cu, which includes this file: EC-CSR, in blocks and as rows, beside MACKO, cuBLAS
// and cuSPARSE, on masks with and without structure. Every result is checked against float64.
//
//   MASK     random; alike-K[-P]: K rows have one mask, P percent of the places redrawn; columns: a quarter of them at
//            .95, the others as sparse as it takes; uneven: densities of rows differ (log-normal, sigma 1); dense-rows:
//            one row in 64 is 10 times denser (.95 at most); FILE.f16: a matrix, its rows and cols from --shapes
//   VARIANT  bits of the deltas, and how blocks are extracted: "8" as `convert` does it, "8d" none (deltas alone),
//            "8x" every block of 128 columns, "8c" these, cut where they are larger than twice a row; "8a" as "8", and
//            kept on the GPU as the device would: in blocks or as rows. The others are kept in blocks if they have any
struct bench_mask {
    int64_t                              rows, cols;
    std::vector<uint16_t>                dense; // F16: both signs, magnitudes 1/8 ... 2
    std::map<std::string, ec_csr_blocks> found; // by variant; F32 values have the same

    bench_mask(const shape & s, double density, const std::string & name)
        : rows(s.rows), cols(s.cols), dense(static_cast<size_t>(s.rows * s.cols), 0) {
        if (name.size() > 4 && name.substr(name.size() - 4) == ".f16") {
            FILE * file = fopen(name.c_str(), "rb");
            if (!file || fread(dense.data(), 2, dense.size(), file) != dense.size()) {
                fprintf(stderr, "bench-spmv-gpu: %s: cannot read %lld values\n", name.c_str(),
                        static_cast<long long>(dense.size()));
                exit(1);
            }
            fclose(file);
            return;
        }
        int alike = 1, percent = 0;
        sscanf(name.c_str(), "alike-%d-%d", &alike, &percent);
        std::vector<int64_t> pattern(static_cast<size_t>(rows)); // of each row: rows that are alike stand anywhere
        for (int64_t r = 0; r < rows; r++) {
            pattern[static_cast<size_t>(r)] = r / alike;
        }
        std::shuffle(pattern.begin(), pattern.end(), std::mt19937_64(7));
        const bool columns = name == "columns", uneven = name == "uneven", dense_rows = name == "dense-rows";
#pragma omp parallel for schedule(dynamic, 16)
        for (int64_t r = 0; r < rows; r++) {
            std::mt19937_64 shared(static_cast<uint64_t>(pattern[static_cast<size_t>(r)] * 2 + 1)),
                own(static_cast<uint64_t>(r * 2 + 2));
            const auto   unit = [](std::mt19937_64 & e) { return static_cast<double>(e() >> 11) * 0x1p-53; };
            const double d = uneven ? std::min(1.0, density * std::exp(std::normal_distribution<double>(-0.5, 1)(own)))
                             : dense_rows && own() % 64 == 0 ? std::min(0.95, 10 * density)
                                                             : density;
            for (int64_t c = 0; c < cols; c++) {
                const double chance     = columns ? (c * 2654435761u % 100 < 25 ? 0.95 : (d - 0.2375) / 0.75) : d,
                             of_pattern = unit(shared);
                const double place      = unit(own) * 100 < percent ? unit(own) : of_pattern;
                if ((alike == 1 ? unit(own) : place) < chance) {
                    const uint64_t q = own();
                    dense[static_cast<size_t>(r * cols + c)] =
                        static_cast<uint16_t>((q & 0x83ff) | (12 + (q >> 20) % 4) << 10);
                }
            }
        }
    }
};

// The blocks of a variant, made once for both types of values (seconds to minutes). "d": of rows alone
ec_csr_blocks & blocks_of(bench_mask & mask, int64_t nnz, const std::string & variant) {
    const auto [at, fresh] = mask.found.try_emplace(variant);
    if (fresh) {
        const bool alone = variant[1] == 'd';
        check_status(
            extract_blocks({ mask.rows, mask.cols, GGML_MACKO_TYPE_F16, variant[0] - '0', nnz }, mask.dense.data(),
                           { alone ? 1 : 16, variant == "4" ? 256 : 128, variant[1] != 'x', 0 }, 16, &at->second));
    }
    return at->second;
}

// a matrix on the GPU, and copies of it whose addresses follow by a distance
struct bench_matrix {
    uint8_t *                       memory = nullptr;
    int64_t                         nbytes = 0; // of one copy
    cuda_sparse_matrix              first  = {};
    std::unique_ptr<matrix_part>    part;
    std::vector<cuda_sparse_matrix> copies;
    std::deque<ec_csr_part>         copies_of_part;

    void reserve(int64_t n, int64_t n_read) {
        nbytes          = (n + 255) & ~int64_t(255);
        const int count = n_copies(static_cast<double>(n_read));
        copies.resize(static_cast<size_t>(count));
        CHECKED(cudaMalloc(&memory, static_cast<size_t>(nbytes * count)));
    }
    void copy() {
        for (size_t i = 0; i < copies.size(); i++) {
            const int64_t distance = nbytes * static_cast<int64_t>(i);
            if (i) {
                CHECKED(cudaMemcpy(memory + distance, memory, static_cast<size_t>(nbytes), cudaMemcpyDeviceToDevice));
            }
            cuda_sparse_matrix & m = copies[i] = moved(first, distance);
            if (blocks()) {
                cuda_ec_csr_blocks b = *blocks();
                move(b.slot_ptr, distance), move(b.partial, distance);
                for (cuda_ec_csr_set & s : b.sets) {
                    move(s.chunk_ptr, distance), move(s.bases, distance), move(s.rows, distance),
                        move(s.slots, distance), move(s.deltas, distance), move(s.values, distance);
                }
                m.part = &copies_of_part.emplace_back(b);
            }
        }
    }
    // null: the matrix is kept as rows alone
    const cuda_ec_csr_blocks * blocks() const {
        return part ? &static_cast<const ec_csr_part &>(*part).blocks : nullptr;
    }
    ~bench_matrix() { cudaFree(memory); }
};

struct ec_csr_bench {
    cudaStream_t           stream;
    cuda_sparse_uploader & uploader;
    double                 bandwidth;
    FILE *                 json;

    std::string              where; // shape, mask, density
    int64_t                  rows = 0, cols = 0, nnz = 0;
    double                   dense_us = 0, csr_us = 0;
    float *                  x = nullptr, *y = nullptr;
    std::optional<reference> want;

    void report(const char * name, const bench_matrix & w, const gpu_times & model) {
        cuda_sparse_mul_mat_params p   = product_of(rows, cols, 1, x, y);
        const auto                 run = [&](int i) {
            p.w[0] = &w.copies[static_cast<size_t>(i)];
            CHECKED(cuda_sparse_mul_mat(p, stream));
        };
        CHECKED(cudaMemset(y, 0xff, static_cast<size_t>(rows) * 4));
        run(static_cast<int>(w.copies.size()) - 1);
        CHECKED(cudaStreamSynchronize(stream));
        want->compare(y, (where + " " + name).c_str());
        p.programmatic                   = false;
        const int    n                   = static_cast<int>(w.copies.size());
        const double alone               = time_us(stream, n, run);
        p.programmatic                   = true;
        const double             chained = time_us(stream, n, run), best = std::min(alone, chained);
        const cuda_ec_csr_blocks none = {}, &b = w.blocks() ? *w.blocks() : none;
        const double             row_nbytes = b.whole ? 0 : read_nbytes(w.first),
                     read                   = row_nbytes + static_cast<double>(b.nbytes_arrays);
        printf("%s %-8s %8.1f MB, %5.3f B/nnz, %4.0f%% in %6d pieces: %8.2f us, chained %8.2f; cuBLAS %7.2f %5.2fx, "
               "cuSPARSE %7.2f %5.2fx, %5.1f%% of bw\n",
               where.c_str(), name, read * 1e-6, read / static_cast<double>(nnz),
               100 * static_cast<double>(b.nbytes_arrays) / read, b.n_pieces, alone, chained, dense_us, dense_us / best,
               csr_us, csr_us / best, 100 * read / best / bandwidth);
        fflush(stdout);
        if (json) {
            fprintf(json,
                    "{\"where\": \"%s\", \"rows\": %lld, \"cols\": %lld, \"nnz\": %lld, \"variant\": \"%s\", "
                    "\"row_nbytes\": %.0f, \"block_nbytes\": %lld, \"pieces\": %d, \"sums\": %d, \"steps\": %.1f, "
                    "\"us\": %.3f, \"chained_us\": %.3f, \"dense_us\": %.3f, \"csr_us\": %.3f, \"model_rows_us\": "
                    "%.3f, \"model_blocks_us\": %.3f}\n",
                    where.c_str(), static_cast<long long>(rows), static_cast<long long>(cols),
                    static_cast<long long>(nnz), name, row_nbytes, static_cast<long long>(b.nbytes_arrays), b.n_pieces,
                    b.n_slots, (w.blocks() ? model.blocks : model.rows).n_steps, alone, chained, dense_us, csr_us,
                    model.rows_us, std::min(model.blocks_us, 1e9));
            fflush(json);
        }
    }

    // the product in float64, and x on the device
    void set_x(const bench_mask & mask) {
        std::vector<float> host_x(static_cast<size_t>(cols));
        for (size_t i = 0; i < host_x.size(); i++) {
            host_x[i] = static_cast<float>(static_cast<int>((i * 2654435761u & 0xffffffffu) >> 24) - 128) / 64.0f;
        }
        want.emplace(rows);
#pragma omp parallel for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            double sum = 0, magnitude = 0;
            for (int64_t c = 0; c < cols; c++) {
                const double product = f16_to_double(mask.dense[static_cast<size_t>(r * cols + c)]) *
                                       static_cast<double>(host_x[static_cast<size_t>(c)]);
                sum += product;
                magnitude += std::fabs(product);
            }
            want->set(r, sum, magnitude, 0);
        }
        CHECKED(cudaMalloc(&x, host_x.size() * 4));
        CHECKED(cudaMalloc(&y, static_cast<size_t>(rows) * 4));
        CHECKED(cudaMemcpy(x, host_x.data(), host_x.size() * 4, cudaMemcpyHostToDevice));
    }

    // the matrix as MACKO with the deltas that take the fewest bytes
    void run_macko(const void * dense, int32_t type, csr_product & csr) {
        ggml_macko_count count;
        check_status(count_dense(dense, type, rows, cols, 16, &count));
        static const int BITS[] = { 1, 2, 4, 8 };
        int              best   = 0;
        for (int i = 1; i < 4; i++) {
            const auto nbits = [&](int k) { return count.n_stored[k] * (8 * value_nbytes(type) + BITS[k]); };
            best             = nbits(i) < nbits(best) ? i : best;
        }
        nnz = count.nnz;
        random_matrix m; // F16 values, or room for twice as many
        m.desc   = { rows, cols, type, BITS[best], count.nnz };
        m.padded = n_padded(count.n_stored[best]);
        m.values.assign(static_cast<size_t>(m.padded * value_nbytes(type) / 2), 0);
        m.deltas.assign(static_cast<size_t>(deltas_nbytes(m.padded, BITS[best])), 0);
        m.row_ptr.assign(static_cast<size_t>(rows + 1), 0);
        check_status(encode(dense,
                            { rows, cols, type, BITS[best], count.nnz, count.n_stored[best], m.values.data(),
                              m.deltas.data(), m.row_ptr.data() },
                            16));
        if (type == GGML_MACKO_TYPE_F16) {
            csr_us = csr.time(stream, m);
        } else { // the columns are what it needs
            random_matrix narrow = m;
            narrow.values.assign(static_cast<size_t>(m.padded), 0);
            for (int64_t k = 0; k < m.padded; k++) {
                // zero where the value is
                narrow.values[static_cast<size_t>(k)] = m.values[static_cast<size_t>(2 * k + 1)];
            }
            csr_us = csr.time(stream, narrow, true);
        }
        bench_matrix w;
        macko_view   view;
        check_status(validate({ m.desc, 0, rows, m.row_ptr.data(), 0, m.values.data(), m.deltas.data() }, &view));
        w.reserve(cuda_sparse_nbytes(m.desc, m.padded), m.padded * value_nbytes(type));
        check_status(uploader.begin(m.desc, m.padded, w.memory));
        check_status(uploader.rows(view));
        check_status(uploader.finish(&w.first));
        w.copy();
        int64_t longest = 0;
        for (int64_t r = 0; r < rows; r++) {
            longest =
                std::max<int64_t>(longest, m.row_ptr[static_cast<size_t>(r + 1)] - m.row_ptr[static_cast<size_t>(r)]);
        }
        const gpu_work rows_work = gpu_rows_work(m.desc, count, longest);
        report(("macko-d" + std::to_string(BITS[best])).c_str(), w, { rows_work, {}, gpu_us(rows_work), 1e9 });
    }

    // the matrix as EC-CSR
    void run_variant(bench_mask & mask, const void * dense, int32_t type, const std::string & v) {
        const std::string as      = v.back() == 'a' ? v.substr(0, 1) : v; // the same file
        const macko_desc  desc    = { rows, cols, type, v[0] - '0', nnz };
        const auto        seconds = [] {
            return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
        };
        const double  t0 = seconds();
        ec_csr_matrix coded;
        check_status(assemble(desc, dense, blocks_of(mask, nnz, as), 16, &coded));
        if (as.size() == 1 && coded.sets[0].granularity > 1) { // as the encoder of the format does
            ec_csr_matrix plain;
            check_status(assemble(desc, dense, blocks_of(mask, nnz, as + "d"), 16, &plain));
            coded = plain.nbytes() < coded.nbytes() ? plain : coded;
        }
        const double t1 = seconds();
        ec_csr_view  view;
        check_status(check_ec_csr(coded.arrays(), &view));
        gpu_times model;
        check_status(gpu_times_of(view, 16, &model));
        bench_matrix        w;
        const int64_t       room   = cuda_sparse_nbytes(desc, n_padded(max_recoded(desc)));
        const ec_csr_choice choice = v.back() == 'a' ? ec_csr_choice::FASTER : ec_csr_choice::BLOCKS;
        w.reserve(room, coded.arrays().n_values * value_nbytes(type));
        check_status(cuda_ec_csr_upload(uploader, view, choice, 16, w.memory, room, &w.first, &w.part));
        w.copy();
        printf("%s ec-csr-%s: %.3f s to encode, %.3f to upload, file %.3f B/nnz\n", where.c_str(), v.c_str(), t1 - t0,
               seconds() - t1, static_cast<double>(coded.nbytes()) / static_cast<double>(nnz));
        report(("ec-csr-" + v).c_str(), w, model);
    }

    // one mask, as MACKO and in all variants; type: of the values
    void run(bench_mask & mask, int32_t type, const std::vector<std::string> & variants, csr_product & csr) {
        rows = mask.rows;
        cols = mask.cols;
        std::vector<float> wide;
        if (type == GGML_MACKO_TYPE_F32) {
            wide.resize(mask.dense.size());
#pragma omp parallel for schedule(static)
            for (size_t i = 0; i < wide.size(); i++) {
                wide[i] = static_cast<float>(f16_to_double(mask.dense[i]));
            }
        }
        const void * dense = wide.empty() ? static_cast<const void *>(mask.dense.data()) : wide.data();
        set_x(mask);
        run_macko(dense, type, csr);
        for (const std::string & v : variants) {
            run_variant(mask, dense, type, v);
        }
        CHECKED(cudaFree(x));
        CHECKED(cudaFree(y));
    }
};

void bench_ec_csr(cudaStream_t stream, cuda_sparse_uploader & uploader, const std::vector<shape> & shapes,
                  const std::vector<double> & densities, const std::vector<std::string> & masks,
                  const std::vector<std::string> & variants, const std::vector<std::string> & types, double bandwidth,
                  FILE * json) {
    dense_product dense;
    csr_product   csr;
    for (const shape & s : shapes) {
        ec_csr_bench                  b{ stream, uploader, bandwidth, json, {}, 0, 0, 0, 0, 0, nullptr, nullptr, {} };
        std::map<std::string, double> dense_us;
        for (const std::string & type : types) {
            dense_us[type] = dense.time(stream, s.rows, s.cols, 1, type == "f32");
        }
        for (const std::string & name : masks) {
            for (const double d : densities) {
                bench_mask mask(s, d, name);
                for (const std::string & type : types) {
                    char text[96];
                    snprintf(text, sizeof(text), "%lldx%lld %s %s %.2f", static_cast<long long>(s.rows),
                             static_cast<long long>(s.cols), type.c_str(), name.c_str(), d);
                    b.where    = text;
                    b.dense_us = dense_us[type];
                    b.run(mask, type == "f32" ? GGML_MACKO_TYPE_F32 : GGML_MACKO_TYPE_F16, variants, csr);
                }
            }
        }
    }
}
