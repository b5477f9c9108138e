// The code that all products with weights in panels share, whatever the panels contain.
#pragma once

#include <algorithm>

#include "tiles.h"

// Mirrors `Linear` in linear.py. Depth and stride count units of one multiplication: numbers, or pairs.
struct Linear {
    void* out;             // [rows, columns]
    const void* rows;      // [rows, depth]
    const void* panels;    // [panels, depth, PANEL], dense
    const float* bias;     // [columns] or null
    const void* residual;  // [rows, columns], to add to the result; or null
    int64_t num_rows, num_columns, depth, row_stride;
    int64_t out_stride;    // of rows of `out` and `residual`
    int64_t activation;    // an ActivationKind, of the result before the residual is added
    float scale;           // of the result before the residual is added
};

namespace {

constexpr int64_t BLOCK_ROWS = 96;
constexpr int64_t PORTION = 4;  // panels that a thread takes at once; small, as threads may share cores

inline int64_t count_panels(const Linear& a) { return (a.num_columns + PANEL - 1) / PANEL; }
inline int64_t num_portions(const Linear& a) { return (count_panels(a) + PORTION - 1) / PORTION; }

// Writes a row of a panel's sums to `to`, adding the bias, activating them and adding them, scaled, to the residual.
template <class Out>
void write_row(const Linear& a, Out* to, const float* sums, const float* bias, const Out* residual) {
    for (int64_t half = 0; half < PANEL; half += LANES) {
        Floats product = load(sums + half) + load(bias + half);
        if (a.activation) product = activated(rounded<Out>(product), a.activation);
        store(to + half, residual ? rounded<Out>(product) * a.scale + load(residual + half) : product);
    }
}

// Writes the sums of num_rows rows of a panel, from `row` on, to `out`, as `write_row` does.
template <class Out>
void write(const Linear& a, int64_t row, int64_t num_rows, int64_t panel, const float* sums) {
    const int64_t first = panel * PANEL, count = std::min(PANEL, a.num_columns - first);
    float bias[PANEL] = {};
    if (a.bias) std::copy_n(a.bias + first, count, bias);
    for (int64_t r = 0; r < num_rows; r++, sums += PANEL) {
        const int64_t place = (row + r) * a.out_stride + first;
        Out* to = (Out*)a.out + place;
        const Out* residual = a.residual ? (const Out*)a.residual + place : nullptr;
        if (count == PANEL) {
            write_row(a, to, sums, bias, residual);
            continue;
        }
        Out numbers[PANEL], residuals[PANEL] = {};  // the last panel of a weight may be wider than the rest of the row
        if (residual) std::copy_n(residual, count, residuals);
        write_row(a, numbers, sums, bias, residual ? residuals : nullptr);
        std::copy_n(numbers, count, to);
    }
}

}  // namespace
