// Products of rows with weights that lie in panels (linear.py), in fp32.
//
// A tile is a few rows times one panel. Its sums stay in registers while the panel is read from end to
// end: the inner kernel of Goto's and BLIS's products, with the weights packed once, when the model is
// loaded, and not with every product. Rows and depth are taken in blocks that a core's second-level
// cache holds. The order of a sum depends on the depth alone, so a row gives the same bits whatever
// rows it is among.

#include <algorithm>

#include "vectors.h"

// The same fields as in linear.py.
struct Linear {
    float* out;           // [rows, columns], dense
    const float* rows;    // [rows, depth]
    const float* panels;  // [panels, depth, PANEL], dense
    const float* bias;    // [columns] or null
    int64_t num_rows, num_columns, depth, row_stride;
};

namespace {

constexpr int64_t PANEL = 2 * LANES;  // columns
constexpr int TILE_ROWS = 6;          // 12 sums, 2 vectors of weights and 1 number fill AVX2's registers
constexpr int64_t BLOCK_ROWS = 96;
constexpr int64_t BLOCK_DEPTH = 768;
constexpr int64_t PORTION = 4;  // panels that a thread takes at once; it may have to share its core
constexpr int64_t LINE = 64 / sizeof(float);
constexpr int64_t STEPS = 8;  // of depth at once
constexpr int64_t AHEAD = 2;  // lines that are fetched ahead in each of these

struct Tile {
    float* out;
    const float* rows;
    const float* panel;
    const float* next;  // weights that are wanted soon
    const float* bias;  // null: none, or it is in `out` already
    int64_t num_columns, depth, out_stride, row_stride;
    bool adds;  // to what is in `out`
};

template <int R>
void multiply(const Tile& t) {
    Floats sums[R][2] = {};
    const auto add = [&](int64_t k) __attribute__((always_inline)) {
        const Floats left = load(t.panel + k * PANEL), right = load(t.panel + k * PANEL + LANES);
        for (int r = 0; r < R; r++) {
            const float number = t.rows[r * t.row_stride + k];
            sums[r][0] += number * left;
            sums[r][1] += number * right;
        }
    };
    int64_t k = 0;
    for (; k + STEPS <= t.depth; k += STEPS) {
        for (int64_t i = 0; i < AHEAD; i++) __builtin_prefetch(t.next + (k / STEPS * AHEAD + i) * LINE, 0, 2);
        for (int64_t i = 0; i < STEPS; i++) add(k + i);
    }
    for (; k < t.depth; k++) add(k);
    for (int r = 0; r < R; r++) {
        float row[PANEL];
        store(row, sums[r][0]);
        store(row + LANES, sums[r][1]);
        float* out = t.out + r * t.out_stride;
        for (int64_t column = 0; column < t.num_columns; column++)
            out[column] = row[column] + (t.adds ? out[column] : t.bias ? t.bias[column] : 0.0f);
    }
}

constexpr decltype(&multiply<1>) MULTIPLY[] = {multiply<1>, multiply<2>, multiply<3>,
                                               multiply<4>, multiply<5>, multiply<6>};

void multiply_block(const Linear& a, int64_t panel, int64_t first_row, int64_t num_rows, int64_t depth) {
    const int64_t num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    Tile t;
    t.panel = a.panels + (panel * a.depth + depth) * PANEL;
    t.num_columns = std::min(PANEL, a.num_columns - panel * PANEL);
    t.depth = std::min(BLOCK_DEPTH, a.depth - depth);
    t.out_stride = a.num_columns;
    t.row_stride = a.row_stride;
    t.adds = depth > 0;
    t.bias = a.bias ? a.bias + panel * PANEL : nullptr;
    const bool is_last = (panel + 1) * PANEL >= a.num_columns;
    const float* next = is_last ? t.panel : t.panel + a.depth * PANEL;
    for (int64_t tile = 0; tile < num_tiles; tile++) {  // of as many rows each as can be
        const int64_t row = num_rows * tile / num_tiles, end = num_rows * (tile + 1) / num_tiles;
        t.next = next + t.depth * tile / num_tiles * PANEL;
        t.out = a.out + (first_row + row) * t.out_stride + panel * PANEL;
        t.rows = a.rows + (first_row + row) * t.row_stride + depth;
        MULTIPLY[end - row - 1](t);
    }
}

}  // namespace

extern "C" int64_t panel_columns() { return PANEL; }

extern "C" void linear_fp32(const Linear* arguments) {
    const Linear a = *arguments;
    const int64_t num_panels = (a.num_columns + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t portion = 0; portion < num_panels; portion += PORTION)
        for (int64_t row = 0; row < a.num_rows; row += BLOCK_ROWS)
            for (int64_t depth = 0; depth < a.depth; depth += BLOCK_DEPTH)
                for (int64_t panel = portion; panel < std::min(portion + PORTION, num_panels); panel++)
                    multiply_block(a, panel, row, std::min(BLOCK_ROWS, a.num_rows - row), depth);
}
