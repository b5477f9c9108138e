// Multiplies a few rows by one panel, which has PANEL columns.
//
// The sums of a tile of rows stay in registers while the panel is read once, as in the inner kernel of
// GotoBLAS and BLIS. The order of summation depends only on the depth, so a row's result is bitwise
// independent of the other rows.
#pragma once

#include <type_traits>
#include <utility>

#include "vectors.h"

namespace {

constexpr int64_t PANEL = 2 * LANES;
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;  // of 32 registers: 24 sums, 2 vectors of the panel, 1 broadcast number
#else
constexpr int TILE_ROWS = 6;   // of AVX2's 16 registers: 12 sums, 2 vectors, 1 number
#endif
constexpr int64_t LINE_BYTES = 64;
constexpr int64_t AHEAD = 32;  // prefetch distance, in steps of depth

// Depth and strides count units of one multiplication: numbers, or pairs.
template <class Row, class Column>
struct Product {
    float* sums;          // [num_rows, PANEL]
    const Row* rows;      // [num_rows, depth]
    const Column* panel;  // [depth, PANEL], dense
    int64_t num_rows, depth, sum_stride, row_stride;
    bool adds = false;  // adds to `sums` instead of overwriting them
    const char* next = nullptr;  // memory to prefetch for the following matmul, `next_bytes` long
    int64_t next_bytes = 0;
    float* widened = nullptr;  // if set, receives the bf16 panel as fp32

    // Returns the part of this product that has only the rows [first, end).
    Product part(int64_t first, int64_t end) const {
        Product part = *this;
        part.sums += first * sum_stride;
        part.rows += first * row_stride;
        part.num_rows = end - first;
        if (next) part.next += next_bytes * first / num_rows;
        part.next_bytes = next_bytes * (end - first) / num_rows;
        return part;
    }
};

inline int64_t num_tiles(int64_t num_rows) { return (num_rows + TILE_ROWS - 1) / TILE_ROWS; }

template <class Row, class Column, int R>
void multiply_tile(const Product<Row, Column>& t) {
    Floats sums[R][2] = {};
    const char* next = t.next ? t.next : (const char*)t.panel;
    for (int64_t k = 0; k < t.depth; k++) {
        // Prefetches the next panel into L2 and the lines ahead in this one into L1, a line or two per step,
        // because a burst of requests would stall the sums.
        __builtin_prefetch(next + k * LINE_BYTES, 0, 2);
        for (int64_t byte = 0; byte < PANEL * (int64_t)sizeof(Column); byte += LINE_BYTES)
            __builtin_prefetch((const char*)(t.panel + (k + AHEAD) * PANEL) + byte);
        const auto left = load(t.panel + k * PANEL), right = load(t.panel + k * PANEL + LANES);
        if constexpr (std::is_same_v<Column, BFloat16>)
            if (t.widened) {
                store(t.widened + k * PANEL, left);
                store(t.widened + k * PANEL + LANES, right);
            }
        for (int r = 0; r < R; r++) {
            const Row number = t.rows[r * t.row_stride + k];
            sums[r][0] = multiplied_and_added(number, left, sums[r][0]);
            sums[r][1] = multiplied_and_added(number, right, sums[r][1]);
        }
    }
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
    const int64_t count = num_tiles(p.num_rows);
    for (int64_t i = 0; i < count; i++) {  // tiles of nearly equal size
        const Product<Row, Column> tile = p.part(p.num_rows * i / count, p.num_rows * (i + 1) / count);
        multiply_tile_of(tile.num_rows, tile, std::make_integer_sequence<int, TILE_ROWS>());
    }
}

}  // namespace
