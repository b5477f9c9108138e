// Products of a few rows with one panel: PANEL columns, side by side.
//
// The sums of a tile of rows stay in registers while the panel is read from end to end: the inner
// kernel of Goto's and BLIS's products. The order of a sum depends on the depth alone, so a row gives
// the same bits whatever rows it is among.
#pragma once

#include <utility>

#include "vectors.h"

namespace {

constexpr int64_t PANEL = 2 * LANES;
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;  // 24 sums, 2 vectors of the panel and 1 number, of 32 registers
#else
constexpr int TILE_ROWS = 6;   // of AVX2's 16 registers 12, 2 and 1
#endif
constexpr int64_t LINE_BYTES = 64;
constexpr int64_t STEPS = 8;  // of depth at once
constexpr int64_t AHEAD = PANEL / 4;  // lines that are fetched ahead in each of these

// Depth and strides count what is multiplied at once: numbers, or pairs.
template <class Row, class Column>
struct Product {
    float* sums;          // [num_rows, PANEL]
    const Row* rows;      // [num_rows, depth]
    const Column* panel;  // [depth, PANEL], dense
    int64_t num_rows, depth, sum_stride, row_stride;
    bool adds = false;  // to what is in `sums`
    const char* next = nullptr;  // what will be wanted then, `next_bytes` of it
    int64_t next_bytes = 0;
};

template <class Row, class Column, int R>
void multiply_tile(const Product<Row, Column>& t) {
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
        if (t.next)
            for (int64_t i = 0; i < AHEAD; i++)
                __builtin_prefetch(t.next + (k / STEPS * AHEAD + i) * LINE_BYTES, 0, 2);
        for (int64_t i = 0; i < STEPS; i++) add(k + i);
    }
    for (; k < t.depth; k++) add(k);
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) {
            float* to = t.sums + r * t.sum_stride + half * LANES;
            store(to, t.adds ? load(to) + sums[r][half] : sums[r][half]);
        }
}

template <class Row, class Column, int... R>
void multiply_tile_of(int64_t num_rows, const Product<Row, Column>& t, std::integer_sequence<int, R...>) {
    constexpr void (*TABLE[])(const Product<Row, Column>&) = {multiply_tile<Row, Column, R + 1>...};
    TABLE[num_rows - 1](t);
}

template <class Row, class Column>
void multiply(const Product<Row, Column>& p) {
    const int64_t num_tiles = (p.num_rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t i = 0; i < num_tiles; i++) {  // of as many rows each as can be
        const int64_t row = p.num_rows * i / num_tiles, end = p.num_rows * (i + 1) / num_tiles;
        Product<Row, Column> tile = p;
        tile.sums += row * p.sum_stride;
        tile.rows += row * p.row_stride;
        if (p.next) tile.next += p.next_bytes * i / num_tiles;
        multiply_tile_of(end - row, tile, std::make_integer_sequence<int, TILE_ROWS>());
    }
}

}  // namespace
