// Multiplies rows by weights that are packed into panels (linear.py). Sums are fp32. bf16 weights are
// widened to fp32 as they are read: the first tile of rows does so in registers and leaves the result in
// a buffer for the tiles after it. Rows in bf16 are widened to a buffer, too. If rows are bf16 too and the CPU has vdpbf16ps, that instruction
// multiplies and adds pairs of bf16. With AMX, amx.cpp multiplies these.
//
// Weights are packed once, when the model is loaded, not in every matmul. Rows and depth are split into
// blocks that fit a core's L2 cache.

#include <algorithm>
#include <type_traits>

#include "linear.h"
#include "team.h"
#include "tiles.h"

namespace {

constexpr int64_t BLOCK_DEPTH = 768;
constexpr int64_t COPY_STRIDE = BLOCK_DEPTH + 16;  // a cache line more, so that rows use different L1 sets
constexpr int64_t SET_BYTES = 4096;  // addresses this far apart map to the same set of the L1 cache
constexpr int64_t WAYS = 8;          // lines of a set

template <class Row, class Weight>
void multiply_block(const Product<Row, Weight>& block) {
    if constexpr (std::is_same_v<Row, float> && std::is_same_v<Weight, BFloat16>)
        if (block.num_rows > TILE_ROWS) {
            alignas(64) float floats[BLOCK_DEPTH * PANEL];
            const int64_t end = block.num_rows / num_tiles(block.num_rows);
            Product<Row, Weight> first = block.part(0, end);
            first.widened = floats;
            multiply(first);
            const Product<Row, Weight> rest = block.part(end, block.num_rows);
            return multiply(Product<float, float>{rest.sums, rest.rows, floats, rest.num_rows, rest.depth,
                                                  rest.sum_stride, rest.row_stride, rest.adds, rest.next,
                                                  rest.next_bytes});
        }
    multiply(block);
}

// Rows of Row's are multiplied; rows of another type, In, are widened to them.
template <class Row, class Weight, class Out, class In = Row>
void multiply_all(const Linear& a, Team& team) {
    const int64_t num_panels = count_panels(a);
    constexpr bool WIDENS = !std::is_same_v<In, Row>;
    const bool collide = a.num_rows >= WAYS && a.row_stride * (int64_t)sizeof(Row) % SET_BYTES == 0;
    const int64_t ahead = team.num_threads * PORTION;  // distance to a thread's probable next portion
    team.share(num_portions(a), [&](int64_t number) {
        const int64_t portion = number * PORTION;
        const int64_t end = std::min(portion + PORTION, num_panels);
        for (int64_t row = 0; row < a.num_rows; row += BLOCK_ROWS) {
            alignas(64) float sums[PORTION][BLOCK_ROWS * PANEL];
            alignas(64) Row copies[BLOCK_ROWS * COPY_STRIDE];  // wider ones, or of rows that would evict each other
            const int64_t num_rows = std::min(BLOCK_ROWS, a.num_rows - row);
            for (int64_t first = 0; first < a.depth; first += BLOCK_DEPTH) {
                const In* given = (const In*)a.rows + row * a.row_stride + first;
                const Row* rows = (const Row*)given;
                int64_t row_stride = a.row_stride;
                const int64_t depth = std::min(BLOCK_DEPTH, a.depth - first);
                if (WIDENS || collide) {
                    for (int64_t r = 0; r < num_rows; r++) {
                        const In* from = given + r * a.row_stride;
                        if constexpr (WIDENS)
                            widen(from, depth, copies + r * COPY_STRIDE);
                        else
                            std::copy_n(from, depth, copies + r * COPY_STRIDE);
                    }
                    rows = copies, row_stride = COPY_STRIDE;
                }
                for (int64_t panel = portion; panel < end; panel++) {
                    const Weight* weights = (const Weight*)a.panels + (panel * a.depth + first) * PANEL;
                    const int64_t then = panel + 1 < end ? panel + 1 : portion + ahead;
                    const Weight* next = then < num_panels ? weights + (then - panel) * a.depth * PANEL : weights;
                    multiply_block(Product<Row, Weight>{
                        sums[panel - portion], rows, weights, num_rows, depth, PANEL, row_stride, first > 0,
                        (const char*)next, depth * PANEL * (int64_t)sizeof(Weight)});
                }
            }
            for (int64_t panel = portion; panel < end; panel++)
                write<Out>(a, row, num_rows, panel, sums[panel - portion]);
        }
    });
}

}  // namespace

extern "C" int64_t panel_columns() { return PANEL; }
extern "C" void linear_fp32(const Linear* arguments, Team& team) { multiply_all<float, float, float>(*arguments, team); }
extern "C" void linear_bf16(const Linear* arguments, Team& team) { multiply_all<float, BFloat16, float>(*arguments, team); }
extern "C" void linear_widened(const Linear* arguments, Team& team) {
    multiply_all<float, BFloat16, BFloat16, BFloat16>(*arguments, team);
}
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)  // amx.cpp
extern "C" void linear_pairs(const Linear* arguments, Team& team) { multiply_all<Pair, Pair, BFloat16>(*arguments, team); }
#endif
