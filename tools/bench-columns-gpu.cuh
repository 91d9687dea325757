// Part of bench-spmv-gpu.cu: products with an x of which many elements are zero, by rows and by columns
// (cuda/sparse/columns.h). Zeros are at random places.
//
//   --zeros .5,.9 [--shapes ...] [--densities ...] [--values ...]
#pragma once

struct columns_bench {
    spmv_bench & bench;

    explicit columns_bench(spmv_bench & b) : bench(b) {}

    // copies of the columns of a matrix, beside those of its rows
    struct column_copies {
        std::vector<cuda_columns> columns;
        uint8_t *                 memory = nullptr;

        column_copies(const spmv_bench::copies & m, cudaStream_t stream) {
            const macko_desc & desc   = m.file.m.desc;
            const int64_t      nbytes = cuda_columns_nbytes(desc, desc.rows);
            const int          n      = n_copies(static_cast<double>(nbytes));
            CHECKED(cudaMalloc(&memory, static_cast<size_t>(nbytes * n)));
            cuda_columns c;
            check_status(cuda_columns_make(m.w[0], desc, desc.rows, memory, stream, &c));
            for (int i = 0; i < n; i++) {
                if (i) {
                    CHECKED(
                        cudaMemcpy(memory + nbytes * i, memory, static_cast<size_t>(nbytes), cudaMemcpyDeviceToDevice));
                    move(c.places, nbytes), move(c.values, nbytes);
                }
                columns.push_back(c);
            }
        }
        ~column_copies() { cudaFree(memory); }
        column_copies(const column_copies &) = delete;
        int count() const { return static_cast<int>(columns.size()); }
    };

    // bytes of the weights' places and values that a product needs if so many of the columns meet a zero
    static double read_nbytes(const macko_desc & desc, double zeros) {
        const cuda_columns c      = { desc.rows, desc.cols, 1, desc.type, true, nullptr, nullptr };
        const auto         places = static_cast<double>(c.n_places()) * sizeof(column_place);
        return (1 - zeros) * (places + static_cast<double>(desc.nnz) * 2);
    }

    void time_shape(shape s, double density, const value_type & values) {
        const file_matrix  file(s.rows, s.cols, density, values, bench.shared_nbytes);
        spmv_bench::copies m(file, s, values.name, density, *bench.uploader);
        column_copies      by_columns(m, bench.stream);
        for (const double zeros : bench.options.zeros) {
            const spmv_bench::operands      o(file, 1, zeros);
            const spmv_bench::product_times rows = bench.time_products(m, o, 0);
            cuda_sparse_mul_mat_params      p    = o.params();
            std::vector<cuda_sparse_matrix> w(static_cast<size_t>(by_columns.count()), m.w[0]);
            const auto                      run = [&](int i) {
                p.w[0] = &w[static_cast<size_t>(i)];
                CHECKED(cuda_sparse_mul_mat(p, bench.stream));
            };
            for (size_t i = 0; i < w.size(); i++) {
                w[i].columns = &by_columns.columns[i];
            }
            o.compare(bench.stream, m, [&] { run(by_columns.count() - 1); });
            const double alone = time_us(bench.stream, by_columns.count(), run);
            p.programmatic     = true;
            const double us    = std::min(alone, time_us(bench.stream, by_columns.count(), run));
            const double read  = read_nbytes(file.m.desc, zeros);
            printf("%14s %8s %7.2f %6.2f %9.2f %9.2f %8.2fx %8.1f %7.1f%%\n", m.shape_name().c_str(), m.type, m.density,
                   zeros, rows.best(), us, rows.best() / us, read * 1e-6, 100 * read / us / bench.bandwidth);
            fflush(stdout);
        }
    }

    void run() {
        printf("%14s %8s %7s %6s %9s %9s %9s %8s %8s\n", "shape", "values", "density", "zeros", "rows us", "columns",
               "speedup", "MB", "of bw");
        for (const shape s : bench.options.shapes) {
            for (const double d : bench.options.densities) {
                for (const value_type & t : bench.options.types) {
                    time_shape(s, d, t);
                }
            }
        }
    }
};
