// What products with weights in panels share, whatever the panels hold.
#pragma once

#include <algorithm>

#include "tiles.h"

// Mirrors `Linear` in linear.py. Depth and stride are in units of one multiplication: numbers, or pairs.
struct Linear {
    void* out;             // [rows, columns], dense
    const void* rows;      // [rows, depth]
    const void* panels;    // [panels, depth, PANEL], dense
    const float* bias;     // [columns] or null
    const void* residual;  // [rows, columns], dense, added to the result, or null
    int64_t num_rows, num_columns, depth, row_stride;
};

namespace {

constexpr int64_t BLOCK_ROWS = 96;
constexpr int64_t PORTION = 4;  // panels that a thread takes at once; small, as threads may share cores

// Writes the sums of num_rows rows of a panel, from `row` on, to `out`, adding bias and residual.
template <class Out>
void write(const Linear& a, int64_t row, int64_t num_rows, int64_t panel, const float* sums) {
    const int64_t first = panel * PANEL, count = std::min(PANEL, a.num_columns - first);
    float bias[PANEL] = {};
    if (a.bias) std::copy_n(a.bias + first, count, bias);
    for (int64_t r = 0; r < num_rows; r++, sums += PANEL) {
        const int64_t place = (row + r) * a.num_columns + first;
        Out numbers[PANEL], residual[PANEL] = {};
        if (a.residual) std::copy_n((const Out*)a.residual + place, count, residual);
        for (int64_t half = 0; half < PANEL; half += LANES) {
            const Floats product = load(sums + half) + load(bias + half);
            store(numbers + half, a.residual ? rounded<Out>(product) + load(residual + half) : product);
        }
        std::copy_n(numbers, count, (Out*)a.out + place);
    }
}

}  // namespace
