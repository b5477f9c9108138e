// Products of rows with weights that lie in panels (linear.py). Sums are fp32. Weights in bf16 become fp32
// as they are read: in registers for one tile, once in a buffer for several. Where rows are bf16 too and
// the CPU has an instruction for it (vdpbf16ps), pairs of both are multiplied and added up at once.
//
// A tile is a few rows times one panel. Its sums stay in registers while the panel is read from end to
// end: the inner kernel of Goto's and BLIS's products, with the weights packed once, when the model is
// loaded, and not with every product. Rows and depth are taken in blocks that a core's second-level
// cache holds. The order of a sum depends on the depth alone, so a row gives the same bits whatever
// rows it is among.

#include <algorithm>
#include <type_traits>
#include <utility>

#include "vectors.h"

// The same fields as in linear.py. Depth and stride count what is multiplied at once: numbers, or pairs.
struct Linear {
    void* out;            // [rows, columns], dense
    const void* rows;     // [rows, depth]
    const void* panels;   // [panels, depth, PANEL], dense
    const float* bias;    // [columns] or null
    int64_t num_rows, num_columns, depth, row_stride;
};

namespace {

constexpr int64_t PANEL = 2 * LANES;  // columns
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;  // 24 sums, 2 vectors of weights and 1 number, of 32 registers
#else
constexpr int TILE_ROWS = 6;   // of AVX2's 16 registers 12, 2 and 1
#endif
constexpr int64_t BLOCK_ROWS = 96;
constexpr int64_t BLOCK_DEPTH = 768;
constexpr int64_t PORTION = 4;  // panels that a thread takes at once; it may have to share its core
constexpr int64_t LINE_BYTES = 64;
constexpr int64_t STEPS = 8;  // of depth at once
constexpr int64_t AHEAD = PANEL / 4;  // lines that are fetched ahead in each of these

template <class Row, class Weight>
struct Tile {
    float* sums;  // [rows, PANEL], dense
    const Row* rows;
    const Weight* panel;
    const char* next;  // weights that are wanted soon
    int64_t depth, row_stride;
    bool adds;  // to what is in `sums`
};

template <class Row, class Weight, int R>
void multiply(const Tile<Row, Weight>& t) {
    Floats sums[R][2] = {};
    const auto add = [&](int64_t k) __attribute__((always_inline)) {
        const auto left = load(t.panel + k * PANEL), right = load(t.panel + k * PANEL + LANES);
        for (int r = 0; r < R; r++) {
            const Row number = t.rows[r * t.row_stride + k];
            sums[r][0] = multiplied_and_added(number, left, sums[r][0]);
            sums[r][1] = multiplied_and_added(number, right, sums[r][1]);
        }
    };
    int64_t k = 0;
    for (; k + STEPS <= t.depth; k += STEPS) {
        for (int64_t i = 0; i < AHEAD; i++)
            __builtin_prefetch(t.next + (k / STEPS * AHEAD + i) * LINE_BYTES, 0, 2);
        for (int64_t i = 0; i < STEPS; i++) add(k + i);
    }
    for (; k < t.depth; k++) add(k);
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) {
            float* to = t.sums + r * PANEL + half * LANES;
            store(to, t.adds ? load(to) + sums[r][half] : sums[r][half]);
        }
}

template <class Row, class Weight, int... R>
void multiply_rows(const Tile<Row, Weight>& t, int num_rows, std::integer_sequence<int, R...>) {
    constexpr void (*TABLE[])(const Tile<Row, Weight>&) = {multiply<Row, Weight, R + 1>...};
    TABLE[num_rows - 1](t);
}

// Some rows times some depth of a panel.
template <class Row>
struct Block {
    const Row* rows;
    int64_t num_rows, row_stride, depth;
    float* sums;  // [num_rows, PANEL], dense
    bool adds;
};

// `next` is what will be wanted then, `next_bytes` of it.
template <class Row, class Weight>
void multiply_tiles(const Block<Row>& b, const Weight* weights, const char* next, int64_t next_bytes) {
    const int64_t num_tiles = (b.num_rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t tile = 0; tile < num_tiles; tile++) {  // of as many rows each as can be
        const int64_t row = b.num_rows * tile / num_tiles, end = b.num_rows * (tile + 1) / num_tiles;
        const Tile<Row, Weight> t{b.sums + row * PANEL, b.rows + row * b.row_stride, weights,
                                  next + next_bytes * tile / num_tiles, b.depth, b.row_stride, b.adds};
        multiply_rows(t, end - row, std::make_integer_sequence<int, TILE_ROWS>());
    }
}

template <class Row, class Weight>
void multiply_block(const Block<Row>& b, const Weight* weights, const Weight* next) {
    const int64_t size = b.depth * PANEL, next_bytes = size * sizeof(Weight);
    if constexpr (std::is_same_v<Row, float> && std::is_same_v<Weight, BFloat16>)
        if (b.num_rows > TILE_ROWS) {
            alignas(64) float floats[BLOCK_DEPTH * PANEL];
            for (int64_t i = 0; i < size; i += LANES) store(floats + i, load(weights + i));
            return multiply_tiles(b, (const float*)floats, (const char*)next, next_bytes);
        }
    multiply_tiles(b, weights, (const char*)next, next_bytes);
}

// Puts the sums of some rows of a panel, from `row` on, where they belong.
template <class Out>
void write(const Linear& a, int64_t row, int64_t num_rows, int64_t panel, const float* sums) {
    const int64_t first = panel * PANEL, count = std::min(PANEL, a.num_columns - first);
    float bias[PANEL] = {};
    if (a.bias) std::copy_n(a.bias + first, count, bias);
    for (int64_t r = 0; r < num_rows; r++, sums += PANEL) {
        Out numbers[PANEL];
        for (int64_t half = 0; half < PANEL; half += LANES)
            store(numbers + half, load(sums + half) + load(bias + half));
        std::copy_n(numbers, count, (Out*)a.out + (row + r) * a.num_columns + first);
    }
}

template <class Row, class Weight, class Out>
void multiply_all(const Linear& a) {
    const int64_t num_panels = (a.num_columns + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t portion = 0; portion < num_panels; portion += PORTION) {
        const int64_t end = std::min(portion + PORTION, num_panels);
        for (int64_t row = 0; row < a.num_rows; row += BLOCK_ROWS) {
            alignas(64) float sums[PORTION][BLOCK_ROWS * PANEL];
            const int64_t num_rows = std::min(BLOCK_ROWS, a.num_rows - row);
            for (int64_t first = 0; first < a.depth; first += BLOCK_DEPTH)
                for (int64_t panel = portion; panel < end; panel++) {
                    const Block<Row> block{(const Row*)a.rows + row * a.row_stride + first, num_rows, a.row_stride,
                                           std::min(BLOCK_DEPTH, a.depth - first), sums[panel - portion], first > 0};
                    const Weight* weights = (const Weight*)a.panels + (panel * a.depth + first) * PANEL;
                    multiply_block(block, weights, panel + 1 < num_panels ? weights + a.depth * PANEL : weights);
                }
            for (int64_t panel = portion; panel < end; panel++)
                write<Out>(a, row, num_rows, panel, sums[panel - portion]);
        }
    }
}

}  // namespace

extern "C" int64_t panel_columns() { return PANEL; }
extern "C" void linear_fp32(const Linear* arguments) { multiply_all<float, float, float>(*arguments); }
extern "C" void linear_bf16(const Linear* arguments) { multiply_all<float, BFloat16, float>(*arguments); }
#if defined(__AVX512BF16__)
extern "C" void linear_pairs(const Linear* arguments) { multiply_all<Pair, Pair, BFloat16>(*arguments); }
#endif
