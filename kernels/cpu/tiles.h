// Multiplies a few rows by one panel, which has PANEL columns.
//
// The sums of a tile of rows stay in registers while the panel is read once, as in the inner kernel of
// GotoBLAS and BLIS. The order of summation depends only on the depth, so a row's result is bitwise
// independent of the other rows. Time the linear layers after each change (tests/kernels/cpu/times.py).
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
constexpr int64_t LANES_AT_ONCE = 2;  // lanes whose sums are in registers at a time; for so many times fewer rows
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

inline int64_t num_tiles(int64_t num_rows, int64_t tile_rows = TILE_ROWS) {
    return (num_rows + tile_rows - 1) / tile_rows;
}

// How sums begin, and the order of their products. It is a template parameter, because `sums` stay in registers only if
// nothing about them is decided at run time.
enum class Summing {
    FROM_ZERO,  // unit by unit, from zero
    CONTINUED,  // unit by unit, from `Product::sums`: as if one product had the whole depth
    BY_LANES,   // in the order of `compute_scores` (few_rows.h)
};

template <Summing SUMMING, class Row, class Column, int R>
void multiply_tile(const Product<Row, Column>& t) {
    Floats sums[R][2] = {};
    if constexpr (SUMMING == Summing::CONTINUED)
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++) sums[r][half] = load(t.sums + r * t.sum_stride + half * LANES);
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

// Adds the products of one unit to the sums of each row.
template <class Row, class Column, int R>
inline void add_unit(const Product<Row, Column>& t, int64_t unit, Floats (&sums)[R][2]) {
    const auto left = load(t.panel + unit * PANEL), right = load(t.panel + unit * PANEL + LANES);
    for (int r = 0; r < R; r++) {
        const Row number = t.rows[r * t.row_stride + unit];
        sums[r][0] = multiplied_and_added(number, left, sums[r][0]);
        sums[r][1] = multiplied_and_added(number, right, sums[r][1]);
    }
}

template <int R>
inline void add(Floats (&sums)[R][2], const Floats (&others)[R][2]) {
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) sums[r][half] += others[r][half];
}

// Lane i of a vector of units has every LANES-th unit from i on. This sums them for some lanes at a time, LANES /
// LANES_AT_ONCE apart, and adds the lanes' sums in the order of `lane_sums` (vectors.h): first those that are LANES / 2
// apart, then these sums that are LANES / 4 apart, and so on. Groups of lanes therefore follow each other in the order of
// their reversed bits, and a sum waits in `waiting` for its partner.
template <class Row, class Column, int R>
void multiply_tile_by_lanes(const Product<Row, Column>& t) {
    constexpr int64_t GROUPS = LANES / LANES_AT_ONCE;
    constexpr int BITS = __builtin_ctz(GROUPS);
    Floats waiting[BITS][R][2], sums[LANES_AT_ONCE][R][2];
    for (int64_t i = 0; i < GROUPS; i++) {
        int64_t unit = 0;
        for (int bit = 0; bit < BITS; bit++) unit |= (i >> bit & 1) << (BITS - 1 - bit);
        for (auto& lane : sums)
            for (int r = 0; r < R; r++) lane[r][0] = lane[r][1] = Floats{};
        for (; unit + LANES - GROUPS < t.depth; unit += LANES)
            for (int lane = 0; lane < LANES_AT_ONCE; lane++) add_unit(t, unit + lane * GROUPS, sums[lane]);
        for (int lane = 0; lane < LANES_AT_ONCE; lane++)
            if (unit + lane * GROUPS < t.depth) add_unit(t, unit + lane * GROUPS, sums[lane]);
        for (int step = LANES_AT_ONCE / 2; step > 0; step /= 2)
            for (int lane = 0; lane < step; lane++) add(sums[lane], sums[lane + step]);
        int level = 0;
        for (; i >> level & 1; level++) add(sums[0], waiting[level]);
        if (level < BITS) std::memcpy(waiting[level], sums[0], sizeof sums[0]);
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) store(t.sums + r * t.sum_stride + half * LANES, sums[0][r][half]);
}

// The functions for 1 to R rows.
template <Summing SUMMING, class Row, class Column, int... R>
void multiply_tile_of(int64_t num_rows, const Product<Row, Column>& t, std::integer_sequence<int, R...>) {
    if constexpr (SUMMING == Summing::BY_LANES) {
        constexpr void (*TABLE[])(const Product<Row, Column>&) = {multiply_tile_by_lanes<Row, Column, R + 1>...};
        TABLE[num_rows - 1](t);
    } else {
        constexpr void (*TABLE[])(const Product<Row, Column>&) = {multiply_tile<SUMMING, Row, Column, R + 1>...};
        TABLE[num_rows - 1](t);
    }
}

template <Summing SUMMING = Summing::FROM_ZERO, class Row, class Column>
void multiply(const Product<Row, Column>& p) {
    constexpr int MOST = SUMMING == Summing::BY_LANES ? TILE_ROWS / LANES_AT_ONCE : TILE_ROWS;
    const int64_t count = num_tiles(p.num_rows, MOST);
    for (int64_t i = 0; i < count; i++) {  // tiles of nearly equal size
        const Product<Row, Column> tile = p.part(p.num_rows * i / count, p.num_rows * (i + 1) / count);
        multiply_tile_of<SUMMING>(tile.num_rows, tile, std::make_integer_sequence<int, MOST>());
    }
}

}  // namespace
