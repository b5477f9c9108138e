// Products of rows with weights that lie in panels (linear.py), in fp32. Weights in bf16 become fp32 as
// they are read: in registers for one tile, once in a buffer for several.
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
    const void* panels;   // [panels, depth, PANEL], dense
    const float* bias;    // [columns] or null
    int64_t num_rows, num_columns, depth, row_stride;
};

namespace {

constexpr int64_t PANEL = 2 * LANES;  // columns
constexpr int TILE_ROWS = 6;          // 12 sums, 2 vectors of weights and 1 number fill AVX2's registers
constexpr int64_t BLOCK_ROWS = 96;
constexpr int64_t BLOCK_DEPTH = 768;
constexpr int64_t PORTION = 4;  // panels that a thread takes at once; it may have to share its core
constexpr int64_t LINE_BYTES = 64;
constexpr int64_t STEPS = 8;  // of depth at once
constexpr int64_t AHEAD = 4;  // lines that are fetched ahead in each of these

template <class T>
struct Tile {
    float* out;
    const float* rows;
    const T* panel;
    const char* next;  // weights that are wanted soon
    const float* bias;  // null: none, or it is in `out` already
    int64_t num_columns, depth, out_stride, row_stride;
    bool adds;  // to what is in `out`
};

template <class T, int R>
void multiply(const Tile<T>& t) {
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
        for (int64_t i = 0; i < AHEAD; i++)
            __builtin_prefetch(t.next + (k / STEPS * AHEAD + i) * LINE_BYTES, 0, 2);
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

template <class T>
constexpr void (*MULTIPLY[])(const Tile<T>&) = {multiply<T, 1>, multiply<T, 2>, multiply<T, 3>,
                                                multiply<T, 4>, multiply<T, 5>, multiply<T, 6>};

// Some rows times some depth of a panel.
struct Block {
    int64_t panel, first_row, num_rows, first, depth;
};

// `weights` are the block's; `next` is what will be wanted then, `next_bytes` of it.
template <class T>
void multiply_tiles(const Linear& a, const Block& b, const T* weights, const char* next, int64_t next_bytes) {
    const int64_t num_tiles = (b.num_rows + TILE_ROWS - 1) / TILE_ROWS;
    Tile<T> t;
    t.panel = weights;
    t.num_columns = std::min(PANEL, a.num_columns - b.panel * PANEL);
    t.depth = b.depth;
    t.out_stride = a.num_columns;
    t.row_stride = a.row_stride;
    t.adds = b.first > 0;
    t.bias = a.bias ? a.bias + b.panel * PANEL : nullptr;
    for (int64_t tile = 0; tile < num_tiles; tile++) {  // of as many rows each as can be
        const int64_t row = b.num_rows * tile / num_tiles, end = b.num_rows * (tile + 1) / num_tiles;
        t.next = next + next_bytes * tile / num_tiles;
        t.out = a.out + (b.first_row + row) * t.out_stride + b.panel * PANEL;
        t.rows = a.rows + (b.first_row + row) * t.row_stride + b.first;
        MULTIPLY<T>[end - row - 1](t);
    }
}

void multiply_block(const Linear& a, const Block& b, const float* weights, const float* next) {
    multiply_tiles(a, b, weights, (const char*)next, b.depth * PANEL * sizeof(float));
}

void multiply_block(const Linear& a, const Block& b, const BFloat16* weights, const BFloat16* next) {
    const int64_t size = b.depth * PANEL, next_bytes = size * sizeof(BFloat16);
    if (b.num_rows <= TILE_ROWS) return multiply_tiles(a, b, weights, (const char*)next, next_bytes);
    alignas(64) float floats[BLOCK_DEPTH * PANEL];
    for (int64_t i = 0; i < size; i += LANES) store(floats + i, load(weights + i));
    multiply_tiles(a, b, (const float*)floats, (const char*)next, next_bytes);
}

template <class T>
void multiply_all(const Linear& a) {
    const int64_t num_panels = (a.num_columns + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t portion = 0; portion < num_panels; portion += PORTION)
        for (int64_t row = 0; row < a.num_rows; row += BLOCK_ROWS)
            for (int64_t first = 0; first < a.depth; first += BLOCK_DEPTH)
                for (int64_t panel = portion; panel < std::min(portion + PORTION, num_panels); panel++) {
                    const Block block{panel, row, std::min(BLOCK_ROWS, a.num_rows - row), first,
                                      std::min(BLOCK_DEPTH, a.depth - first)};
                    const T* weights = (const T*)a.panels + (panel * a.depth + first) * PANEL;
                    multiply_block(a, block, weights, panel + 1 < num_panels ? weights + a.depth * PANEL : weights);
                }
}

}  // namespace

extern "C" int64_t panel_columns() { return PANEL; }
extern "C" void linear_fp32(const Linear* arguments) { multiply_all<float>(*arguments); }
extern "C" void linear_bf16(const Linear* arguments) { multiply_all<BFloat16>(*arguments); }
