// The --tune mode of bench-spmv-gpu.cu, which includes this file: the product of one column with the layout and the
// lanes that the plugin chooses, and with all others that there are kernels for; and products of several columns the
// ways there are. Values that are not quantized only. Every result is checked against float64. The --json file has a
// line for the device, then lines for each matrix, microseconds each; 0 where there is no such time:
//
//   "record": "device"   what the GPU is and how fast it reads memory: bytes, bytes per second, MHz
//   "record": "choice"   one column, in a layout and with lanes. "chosen": the plugin's own; it comes first
//   "record": "columns"  n columns with the layout that the plugin chooses. tiles_us: as the plugin multiplies them, if
//                        that is by tiles; passes_us: at most 8 columns at a time; dense_rows_us: x to 16 bits, and a
//                        panel of rows at a time made dense and multiplied (the device makes the next panel meanwhile).
//                        "chosen": "tiles", "passes" or "dense rows"
//   dense_us             cuBLAS with dense F16 weights and as many columns
struct tune_bench {
    spmv_bench &                    bench;
    std::unique_ptr<cublas_library> cublas = cublas_open();
    op_context                      ctx;

    explicit tune_bench(spmv_bench & b) : bench(b) {
        cuda_device_info info;
        CHECKED(cuda_current_device(&info));
        CHECKED(op_compute_capability(&ctx.cc));
        ctx.stream        = bench.stream;
        ctx.n_sm          = info.multiprocessors;
        ctx.shared_nbytes = info.shared_nbytes;
        ctx.cublas        = cublas.get();
        CHECKED(cudaMalloc(&ctx.cublas_workspace, CUBLAS_WORKSPACE_NBYTES));
    }
    ~tune_bench() { CHECKED(cudaFree(ctx.cublas_workspace)); }
    tune_bench(const tune_bench &) = delete;

    void run() {
        report_device();
        for (const shape s : bench.options.shapes) {
            tune_shape(s);
        }
    }

private:
    // ---- the device ----

    static int64_t attribute(cudaDeviceAttr which) {
        int value = 0;
        CHECKED(cudaDeviceGetAttribute(&value, which, 0));
        return value;
    }

    void report_device() {
        const int64_t memory_khz = attribute(cudaDevAttrMemoryClockRate),
                      bus_bits   = attribute(cudaDevAttrGlobalMemoryBusWidth);
        print_record("{\"record\": \"device\", \"gpu\": \"%s\", \"date\": \"%s\", \"cc\": \"%d.%d\", "
                     "\"multiprocessors\": %d, \"mhz\": %lld, \"memory_nbytes\": %zu, \"memory_mhz\": %lld, "
                     "\"bus_bits\": %lld, \"bandwidth\": %.4g, \"read_bandwidth\": %.4g, \"l2_nbytes\": %d, "
                     "\"shared_nbytes\": %lld, \"driver\": \"%s\", \"runtime\": \"%s\", \"cublas\": %s}\n",
                     bench.device.name, bench.date, bench.device.major, bench.device.minor,
                     bench.device.multiProcessorCount, static_cast<long long>(attribute(cudaDevAttrClockRate) / 1000),
                     bench.device.totalGlobalMem, static_cast<long long>(memory_khz / 1000),
                     static_cast<long long>(bus_bits),
                     2e3 * static_cast<double>(memory_khz) * static_cast<double>(bus_bits) / 8, // double data rate
                     bench.bandwidth * 1e6, bench.device.l2CacheSize, static_cast<long long>(bench.shared_nbytes),
                     bench.driver.c_str(), bench.runtime.c_str(), cublas ? "true" : "false");
    }

    // a line of the file, which keeps what was measured before a run is cut off
    __attribute__((format(printf, 2, 3))) void print_record(const char * format, ...) const {
        if (bench.options.json) {
            va_list args;
            va_start(args, format);
            vfprintf(bench.options.json, format, args);
            va_end(args);
            fflush(bench.options.json);
        }
    }
    static std::string name_of_matrix(const spmv_bench::copies & m) {
        char text[128];
        snprintf(text, sizeof(text), "\"rows\": %lld, \"cols\": %lld, \"values\": \"%s\", \"density\": %g",
                 static_cast<long long>(m.s.rows), static_cast<long long>(m.s.cols), m.type, m.density);
        return text;
    }

    // ---- what is launched ----

    struct launched_kernel {
        void *   kernel;
        unsigned blocks, threads;
    };

    std::vector<launched_kernel> launched_by(const cuda_sparse_mul_mat_params & p) const {
        cudaGraph_t graph;
        size_t      n = 0;
        CHECKED(cudaStreamBeginCapture(bench.stream, cudaStreamCaptureModeGlobal));
        CHECKED(cuda_sparse_mul_mat(p, bench.stream));
        CHECKED(cudaStreamEndCapture(bench.stream, &graph));
        CHECKED(cudaGraphGetNodes(graph, nullptr, &n));
        std::vector<cudaGraphNode_t> nodes(n);
        CHECKED(cudaGraphGetNodes(graph, nodes.data(), &n));
        std::vector<launched_kernel> kernels;
        for (const cudaGraphNode_t node : nodes) { // all of a product are kernels
            cudaKernelNodeParams launch;
            CHECKED(cudaGraphKernelNodeGetParams(node, &launch));
            kernels.push_back({ launch.func, launch.gridDim.x, launch.blockDim.x });
        }
        CHECKED(cudaGraphDestroy(graph));
        return kernels;
    }

    // ---- one column ----

    // layouts and lanes for which there may be kernels
    static std::vector<layout_choice> choices_of(const macko_desc & desc) {
        std::vector<layout_choice> choices = { { CUDA_SPARSE_LAYOUT_FILE, 0 } };
        for (const int32_t layout : { CUDA_SPARSE_LAYOUT_FUSED, CUDA_SPARSE_LAYOUT_CODED }) {
            // deltas get another width: all lanes that any of them has
            const auto built = [&](int32_t lanes) {
                const bool banked = desc.cols >= CUDA_SPARSE_WIDE;
                return cuda_sparse_built_lanes(layout, desc.type, 2, banked).has(lanes) ||
                       cuda_sparse_built_lanes(layout, desc.type, 3, banked).has(lanes) ||
                       cuda_sparse_built_lanes(layout, desc.type, 6, false).has(lanes);
            };
            for (const int32_t lanes : { 8, 16, 32 }) {
                if (built(lanes)) {
                    choices.push_back({ layout, lanes });
                }
            }
        }
        return choices;
    }

    // Lets clocks rise that fell while the host made or uploaded a matrix.
    void warm_up(const cuda_sparse_mul_mat_params & p) const {
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
        while (std::chrono::steady_clock::now() < end) {
            for (int i = 0; i < 64; i++) {
                CHECKED(cuda_sparse_mul_mat(p, bench.stream));
            }
            CHECKED(cudaStreamSynchronize(bench.stream));
        }
    }

    // each launch may start before the one ahead of it has ended, as in the device's token graph
    double time_product(const spmv_bench::copies & m, cuda_sparse_mul_mat_params p) const {
        p.programmatic = true;
        return time_us(bench.stream, m.count(), [&](int i) {
            p.w[0] = &m.w[static_cast<size_t>(i)];
            CHECKED(cuda_sparse_mul_mat(p, bench.stream));
        });
    }

    void check_product(const spmv_bench::copies & m, const spmv_bench::operands & o,
                       const cuda_sparse_mul_mat_params & p, double slack = 1) const {
        o.compare(bench.stream, m, [&] { CHECKED(cuda_sparse_mul_mat(p, bench.stream)); }, slack);
    }

    void tune_choice(const spmv_bench::copies & m, const spmv_bench::operands & o, bool chosen, double dense_us) const {
        cuda_sparse_mul_mat_params p = o.params();
        const cuda_sparse_matrix & w = m.w.back();
        p.w[0]                       = &w;
        check_product(m, o, p);
        warm_up(p);
        const launched_kernel kernel = launched_by(p).at(0);
        print_record("{\"record\": \"choice\", %s, \"layout\": \"%s\", \"lanes\": %d, \"delta_bits\": %d, "
                     "\"blocks\": %u, \"threads\": %u, \"nbytes\": %.0f, \"us\": %.3f, \"chosen\": %s, "
                     "\"dense_us\": %.3f}\n",
                     name_of_matrix(m).c_str(), cuda_sparse_layout_name(w.layout), w.lanes, w.delta_bits, kernel.blocks,
                     kernel.threads, m.read, time_product(m, p), chosen ? "true" : "false", dense_us);
    }

    // ---- several columns ----

    // Sums of tensor cores are not rounded to nearest, each generation in its own way: so many times the error of
    // float32 sums is right. One wrong weight is more than that.
    static constexpr double TENSOR_CORES = 8;

    // with dense rows, as the device multiplies many columns
    double time_dense_rows(const spmv_bench::copies & m, const spmv_bench::operands & o) const {
        const int64_t rows = m.s.rows, cols = m.s.cols, n = o.n, panel = bench.panel_rows(m.s),
                      ld  = (cols + 7) & ~int64_t(7);
        const op_tensor w = { nullptr,
                              TYPE_F16,
                              { cols, rows, 1, 1 },
                              { 2, cols * 2, rows * cols * 2, rows * cols * 2 } },
                        x = { reinterpret_cast<char *>(o.x),
                              TYPE_F32,
                              { cols, n, 1, 1 },
                              { 4, cols * 4, n * cols * 4, n * cols * 4 } },
                        y = { reinterpret_cast<char *>(o.y),
                              TYPE_F32,
                              { rows, n, 1, 1 },
                              { 4, rows * 4, n * rows * 4, n * rows * 4 } };
        char *dense, *scratch;
        CHECKED(cudaMalloc(&dense, static_cast<size_t>(panel * ld * 2)));
        CHECKED(cudaMalloc(&scratch, op_mul_mat_16_scratch_nbytes(w, x)));
        const auto run = [&](int i) {
            CHECKED(op_mul_mat_x16(ctx, TYPE_F16, x, scratch));
            for (int64_t r = 0; r < rows; r += panel) {
                const int64_t end = std::min(rows, r + panel);
                CHECKED(cuda_sparse_densify(m.w[static_cast<size_t>(i)], r, end, dense, ld, bench.stream));
                CHECKED(op_mul_mat_16(ctx, TYPE_F16, dense, ld, end - r, x, scratch, y, r, scratch));
            }
        };
        o.compare(bench.stream, m, [&] { run(m.count() - 1); }, TENSOR_CORES);
        const double t = time_us(bench.stream, m.count(), run);
        CHECKED(cudaFree(dense));
        CHECKED(cudaFree(scratch));
        return t;
    }

    void tune_columns(const spmv_bench::copies & m, int64_t n, double dense_us) const {
        const spmv_bench::operands o(m.file, n);
        const cuda_sparse_matrix & w           = m.w.back();
        cuda_sparse_mul_mat_params with_tiles  = o.params();
        with_tiles.w[0]                        = &w;
        cuda_sparse_mul_mat_params with_passes = with_tiles;
        with_passes.x16                        = nullptr;
        check_product(m, o, with_passes);
        warm_up(with_passes);
        const double passes_us = time_product(m, with_passes);
        double       tiles_us  = 0;
        check_product(m, o, with_tiles, TENSOR_CORES);
        if (launched_by(with_tiles).at(0).kernel != launched_by(with_passes).at(0).kernel) {
            tiles_us = time_product(m, with_tiles);
        }
        const double  dense_rows_us = time_dense_rows(m, o);
        const int64_t max_n         = cuda_sparse_mul_mat_max_n(w, false);
        print_record("{\"record\": \"columns\", %s, \"n\": %lld, \"max_n\": %lld, \"tiles_us\": %.3f, "
                     "\"passes_us\": %.3f, \"dense_rows_us\": %.3f, \"dense_us\": %.3f, \"chosen\": \"%s\"}\n",
                     name_of_matrix(m).c_str(), static_cast<long long>(n), static_cast<long long>(max_n), tiles_us,
                     passes_us, dense_rows_us, dense_us,
                     n > max_n      ? "dense rows"
                     : tiles_us > 0 ? "tiles"
                                    : "passes");
    }

    // ---- a matrix ----

    void tune_shape(shape s) {
        const double        dense_us = bench.dense.time(bench.stream, s.rows, s.cols, 1);
        std::vector<double> dense_us_of_columns;
        for (const int64_t n : bench.options.columns) {
            dense_us_of_columns.push_back(bench.dense.time(bench.stream, s.rows, s.cols, n));
        }
        for (const double density : bench.options.densities) {
            for (const value_type & values : bench.options.types) {
                tune_matrix(s, density, values, dense_us, dense_us_of_columns);
            }
        }
    }

    void tune_matrix(shape s, double density, const value_type & values, double dense_us,
                     const std::vector<double> & dense_us_of_columns) {
        const file_matrix          file(s.rows, s.cols, density, values, bench.shared_nbytes);
        const spmv_bench::operands one(file, 1);
        layout_choice              chosen;
        {
            const spmv_bench::copies m(file, s, values.name, density, *bench.uploader);
            chosen = { m.w[0].layout, m.w[0].lanes };
            tune_choice(m, one, true, dense_us);
            for (size_t c = 0; c < dense_us_of_columns.size(); c++) {
                tune_columns(m, bench.options.columns[c], dense_us_of_columns[c]);
            }
        }
        int n_choices = 1;
        for (const layout_choice & choice : choices_of(file.m.desc)) {
            if (choice.layout == chosen.layout && choice.lanes == chosen.lanes) {
                continue;
            }
            const spmv_bench::copies m(file, s, values.name, density, *bench.uploader, &choice);
            if (m.count()) {
                tune_choice(m, one, false, dense_us);
                n_choices++;
            }
        }
        printf("%lldx%lld %s density %.2f: %d choices\n", static_cast<long long>(s.rows),
               static_cast<long long>(s.cols), values.name, density, n_choices);
        fflush(stdout);
    }
};
