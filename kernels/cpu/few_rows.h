// Both matrix products of attention for a few rows, computed directly from the KV cache.
//
// Packing keys and values into panels (packed_rows.h) would take longer than multiplying a few rows by them. Each
// score is first summed in the lanes of its own vector. Then the lanes of LANES such vectors are added at once. Results
// have the same bits as those of packed rows: `multiply_tile_by_lanes` (tiles.h) sums in the order of `compute_scores`.
#pragma once

#include <algorithm>
#include <utility>

#include "cached_rows.h"

namespace {

constexpr int ROWS_AT_ONCE = 4;
#if defined(__AVX512F__)
constexpr int64_t FEW_ROWS = 12;    // with more rows, packing saves more than it costs
constexpr int VECTORS_AT_ONCE = 4;  // of 32 registers: 16 sums, 4 vectors of queries, 1 of a key
#else
constexpr int64_t FEW_ROWS = 4;
constexpr int VECTORS_AT_ONCE = 2;  // of AVX2's 16 registers: 8 sums, 4 vectors of queries, 1 of a key
#endif

// Adds the products of two vectors of units to the lanes of `sum`.
template <class T>
inline Floats products_added(Words a, Words b, Floats sum) {
    return sum + (Floats)a * (Floats)b;
}

#if defined(__AVX512BF16__)
template <>
inline Floats products_added<BFloat16>(Words a, Words b, Floats sum) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#endif

template <class T>
struct FewRows {
    const Element<T> (*query)[MAX_DIM];
    float (*scores)[TILE];
    const Element<T> (*weights)[TILE];  // zeros after the last value, up to a multiple of LANES
    float (*out)[MAX_DIM];

    FewRows after(int64_t count) const { return {query + count, scores + count, weights + count, out + count}; }
};

// Writes the scores of all keys.
template <class T, int R>
void compute_scores(const FewRows<T>& rows, const Rows<T>& keys, const Rows<T>& ahead) {
    const int64_t depth = keys.dim / ELEMENTS_PER_UNIT<T>;
    for (int64_t key = 0; key < keys.num_rows; key += LANES) {
        Floats products[R][LANES];
        for (int64_t i = 0; i < LANES; i += VECTORS_AT_ONCE) {
            Floats sums[R][VECTORS_AT_ONCE] = {};
            for (int64_t unit = 0; unit < depth; unit += LANES) {
                Words query[R];
                for (int r = 0; r < R; r++) query[r] = units(rows.query[r], unit, depth);
                for (int k = 0; k < VECTORS_AT_ONCE; k++) {
                    ahead.template fetch<3>(key + i + k, unit * ELEMENTS_PER_UNIT<T>);
                    const Words key_units = units(keys.rows[key + i + k], unit, depth);
                    for (int r = 0; r < R; r++) sums[r][k] = products_added<T>(query[r], key_units, sums[r][k]);
                }
            }
            for (int r = 0; r < R; r++)
                for (int k = 0; k < VECTORS_AT_ONCE; k++) products[r][i + k] = sums[r][k];
        }
        for (int r = 0; r < R; r++) store(rows.scores[r] + key, lane_sums(products[r]));
    }
}

// Adds the weighted values to V vectors of `out`, from dim `first` on.
template <class T, int R, int V>
void add_values_from(int64_t first, const FewRows<T>& rows, const Rows<T>& values, const Rows<T>& ahead) {
    Floats sums[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = load(rows.out[r] + first + v * LANES);
    for (int64_t value = 0; value < values.num_rows; value += ELEMENTS_PER_UNIT<T>) {
        const T *row = values.rows[value] + first, *next = values.rows[value + ELEMENTS_PER_UNIT<T> - 1] + first;
        Words weights[R];
        const int64_t unit = value / ELEMENTS_PER_UNIT<T>;
        for (int r = 0; r < R; r++) weights[r] = (Words)all(((const Unit<T>*)rows.weights[r])[unit]);
        for (int v = 0; v < V; v++) {
            for (int64_t i = 0; i < ELEMENTS_PER_UNIT<T>; i++) ahead.template fetch<3>(value + i, first + v * LANES);
            const Words value_units = units_of_two_rows(row + v * LANES, next + v * LANES);
            for (int r = 0; r < R; r++) sums[r][v] = products_added<T>(weights[r], value_units, sums[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(rows.out[r] + first + v * LANES, sums[r][v]);
}

template <class T, int R>
void add_values(const FewRows<T>& rows, const Rows<T>& values, const Rows<T>& ahead) {
    constexpr int64_t DIMS = VECTORS_AT_ONCE * LANES;
    int64_t first = 0;
    for (; first + DIMS <= values.dim; first += DIMS)
        add_values_from<T, R, VECTORS_AT_ONCE>(first, rows, values, ahead);
    for (; first < values.dim; first += LANES) add_values_from<T, R, 1>(first, rows, values, ahead);
}

template <class T>
using FewRowsFunction = void (*)(const FewRows<T>&, const Rows<T>& tile, const Rows<T>& ahead);

template <class T>
constexpr FewRowsFunction<T> COMPUTE_SCORES[] = {compute_scores<T, 1>, compute_scores<T, 2>, compute_scores<T, 3>,
                                                 compute_scores<T, 4>};
template <class T>
constexpr FewRowsFunction<T> ADD_VALUES[] = {add_values<T, 1>, add_values<T, 2>, add_values<T, 3>, add_values<T, 4>};

// Calls a function of the table for each group of rows. The table has a function for each number of rows in a group.
// The groups are of nearly equal size.
template <class T>
void for_few_rows(const FewRowsFunction<T> (&table)[ROWS_AT_ONCE], const FewRows<T>& rows, int64_t num_rows,
                  const Rows<T>& tile, const Rows<T>& ahead) {
    const int64_t count = (num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    for (int64_t i = 0; i < count; i++) {
        const int64_t first = num_rows * i / count, end = num_rows * (i + 1) / count;
        table[end - first - 1](rows.after(first), tile, ahead);
    }
}

}  // namespace
