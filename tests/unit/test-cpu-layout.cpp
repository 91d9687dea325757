// The choice of the CPU layout: a table of headers and the layouts that different kernel sets get.
#include "cpu/layout/choose.h"
#include "test.h"

#include <cstring>

using namespace macko;
using namespace macko::cpu;

static const int F16 = GGML_MACKO_TYPE_F16, BF16 = GGML_MACKO_TYPE_BF16, F32 = GGML_MACKO_TYPE_F32;
static const int Q4 = GGML_MACKO_TYPE_Q4, CODED = GGML_MACKO_TYPE_CODED;

// like the sets of the same name; ZEN4 is AVX-512 VBMI2 with dispatch.cpp's changes for it
static const layout_traits PORTABLE = {}, AVX2 = { 0.55f }, VBMI2 = { 0.25f, 0.55f, true, 0.45f },
                           ZEN4 = { 0.55f, 0.55f, true, 1.0f };

static macko_desc desc_of(int64_t rows, int64_t cols, int type, int percent) {
    return { rows, cols, type, 4, rows * cols * percent / 100 };
}

// Bytes of coded values with m = 7 and e = 2, and the given number of additional words for outliers.
static int64_t coded_nbytes(const macko_desc & desc, int64_t more = 0) {
    return 4 * (2 + 10 * ((desc.nnz + 31) / 32) + more);
}

TEST(layout_is_the_fastest_of_the_kernel_set) {
    const char *B = "BITMAP", *C = "CODED_BITMAP", *S = "BUNDLES", *A = "QUANTIZED";
    const struct {
        macko_desc   desc;
        int          value_type;
        int64_t      more_words; // coded values: see coded_nbytes()
        const char * want[4];    // for PORTABLE, AVX2, VBMI2, ZEN4
    } cases[] = {
        // F16 and BF16 in bundles below the density limit of the set, which is higher for short rows
        { desc_of(500, 2000, F16, 10), F16, 0, { B, S, S, S } },
        { desc_of(500, 2000, BF16, 24), BF16, 0, { B, S, S, S } },
        { desc_of(500, 2000, F16, 25), F16, 0, { B, S, B, S } },
        { desc_of(1000, 1024, F16, 54), F16, 0, { B, S, S, S } },
        { desc_of(1000, 1024, F16, 56), F16, 0, { B, B, B, B } },
        { desc_of(500, 2000, F16, 1), F16, 0, { B, B, B, B } },   // too few for bundles
        { desc_of(500, 65537, F16, 10), F16, 0, { B, B, B, B } }, // too many columns
        { desc_of(500, 2000, F32, 10), F32, 0, { B, B, B, B } },
        { desc_of(500, 2000, F16, 50), Q4, 0, { A, A, A, A } }, // as in the file
        // coded values for sets that multiply them faster
        { desc_of(64, 2048, F16, 50), CODED, 0, { B, S, C, S } },
        { desc_of(64, 2048, F16, 40), CODED, 0, { B, S, B, S } },
        { desc_of(64, 2048, BF16, 90), CODED, 0, { B, B, C, B } },
        { desc_of(64, 2048, F32, 20), CODED, 0, { B, B, C, C } },
        { desc_of(64, 2048, F16, 50), CODED, 64 * 32 - 1, { B, S, C, S } }, // just few enough outliers
        { desc_of(64, 2048, F16, 50), CODED, 64 * 32, { B, S, B, S } },     // one more word for each block
        { desc_of(64, 65537, F16, 50), CODED, 0, { B, B, B, B } },          // columns have 16 bits
        { desc_of(65536, 2, F16, 50), CODED, 0, { B, S, S, S } },           // short rows, which are aligned
    };
    for (const auto & c : cases) {
        const layout_traits * traits[] = { &PORTABLE, &AVX2, &VBMI2, &ZEN4 };
        for (int i = 0; i < 4; i++) {
            const cpu_plan plan =
                choose_cpu_layout(*traits[i], c.desc, c.value_type, coded_nbytes(c.desc, c.more_words), 64);
            CHECK(strcmp(layout_name(plan.shape), c.want[i]) == 0,
                  "set %d, value type %d, %ld columns, %ld of them: %s instead of %s (%s)", i, c.value_type,
                  (long)c.desc.cols, (long)c.desc.nnz, layout_name(plan.shape), c.want[i], plan.reason);
            CHECK(plan.nbytes >= layout_nbytes(c.desc, plan.shape) && *plan.reason, "%s", c.want[i]);
            if (std::holds_alternative<bundles_shape>(plan.shape)) { // it may become a bitmap
                CHECK(plan.nbytes >= layout_nbytes(c.desc, bitmap_shape{}), "reserved for bundles only");
            }
        }
    }
}

TEST(no_values_become_bundles_if_x_is_not_rounded) {
    for (const int type : { F16, BF16 }) {
        const macko_desc desc = desc_of(500, 2000, type, 10);
        CHECK(strcmp(layout_name(choose_cpu_layout(AVX2, desc, type, 0, 0, false).shape), "BITMAP") == 0, "%d", type);
    }
}

TEST(parts_of_a_layout_are_aligned_and_fill_its_bytes) {
    const macko_desc                         desc = desc_of(300, 1000, F16, 30);
    alignas(LAYOUT_ALIGNMENT) static uint8_t memory[1 << 20];
    for (const cpu_shape & shape : { cpu_shape(bitmap_shape{}), cpu_shape(coded_bitmap_shape{ 77 }),
                                     cpu_shape(bundles_shape{}), cpu_shape(quantized_shape{ 4, 64, 50000 }) }) {
        const int64_t    nbytes = layout_nbytes(desc, shape);
        const cpu_matrix m      = bind_layout(desc, shape, memory);
        CHECK(m.index() == shape.index() && nbytes <= int64_t(sizeof(memory)), "%s", layout_name(shape));
        CHECK(base_of(m).rows == 300 && base_of(m).cols == 1000 && base_of(m).dense_type == F16, "%s",
              layout_name(shape));
        const void * last = std::visit(
            [](const auto & l) -> const void * {
                using layout = std::decay_t<decltype(l)>;
                if constexpr (std::is_same_v<layout, bundles_layout>) {
                    return l.bundles + l.bundles_nbytes;
                } else if constexpr (std::is_same_v<layout, coded_bitmap_layout>) {
                    return l.outlier_cols + 77;
                } else if constexpr (std::is_same_v<layout, quantized_layout>) {
                    return l.levels + 16;
                } else {
                    return l.values + l.row_off[0] + 300 * 1000 * 30 / 100 * 2 + VALUES_SLACK;
                }
            },
            m);
        const int64_t rest = memory + nbytes - static_cast<const uint8_t *>(last);
        CHECK(rest >= 0 && rest < LAYOUT_ALIGNMENT, "%s: %ld bytes are left", layout_name(shape), (long)rest);
    }
}

int main(int argc, char ** argv) { return test_main("test-cpu-layout", argc, argv); }
