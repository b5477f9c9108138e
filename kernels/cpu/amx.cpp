// Multiplies rows by panels of bf16 pairs with AMX, whose registers are tiles of 16 rows of 64 bytes.
//
// Panels of pairs (linear.py) have the order that AMX wants: 16 units by LANES columns are a tile of weights. One
// instruction multiplies 16 rows, 32 numbers deep, by such a tile and adds to the sums in an order that depends on the
// depth alone. Any number of rows is multiplied in this way, so a row's result is bitwise independent of the other rows.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.

#include <algorithm>

#include "amx.h"
#include "linear.h"
#include "team.h"

#if defined(__AMX_BF16__)

namespace {

constexpr int64_t UNITS = 16;              // pairs in a row of a tile
constexpr int64_t BLOCK_UNITS = 8 * UNITS;  // rows at once, this deep, and as much of a panel fit into L1
constexpr int64_t ROWS_PER_BLOCK = 256;    // rows that share a portion of panels in L2
constexpr int64_t UNIT_BYTES = PANEL * sizeof(Pair);

// Tiles 0 and 1 are sums of the upper rows by both halves of a panel, 2 and 3 of the lower rows. Tiles 4 and 5 are upper
// and lower rows, 6 and 7 the halves of a panel.
inline void configure(int64_t num_rows) {
    const uint8_t upper = std::min(num_rows, AMX_ROWS), lower = std::max<int64_t>(num_rows - AMX_ROWS, 1);
    configure_tiles({upper, upper, lower, lower, upper, lower, UNITS, UNITS});
}

// Multiplies as many units as a tile holds.
template <bool HAS_LOWER>
inline void multiply_units(const Pair* rows, int64_t row_stride, const Pair* panel) {
    _tile_loadd(6, panel, UNIT_BYTES);
    _tile_loadd(4, rows, row_stride * sizeof(Pair));
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + LANES, UNIT_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (HAS_LOWER) {
        _tile_loadd(5, rows + AMX_ROWS * row_stride, row_stride * sizeof(Pair));
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// Multiplies the units from `first` on, fewer than a tile holds, and zeros after them.
template <bool HAS_LOWER>
void multiply_last_units(const Product<Pair, Pair>& p, int64_t first) {
    alignas(64) Pair rows[2 * AMX_ROWS][UNITS] = {}, panel[UNITS][PANEL] = {};
    for (int64_t r = 0; r < p.num_rows; r++) std::copy_n(p.rows + r * p.row_stride + first, p.depth - first, rows[r]);
    std::copy_n(p.panel + first * PANEL, (p.depth - first) * PANEL, panel[0]);
    barrier();
    multiply_units<HAS_LOWER>(rows[0], UNITS, panel[0]);
}

// Multiplies all rows, at most AMX_ROWS or, with HAS_LOWER, twice as many.
template <bool HAS_LOWER>
void multiply_rows(const Product<Pair, Pair>& p) {
    const int64_t bytes = p.sum_stride * sizeof(float);
    float* lower = p.sums + AMX_ROWS * p.sum_stride;
    barrier();
    if (p.adds) {
        _tile_loadd(0, p.sums, bytes);
        _tile_loadd(1, p.sums + LANES, bytes);
        if constexpr (HAS_LOWER) {
            _tile_loadd(2, lower, bytes);
            _tile_loadd(3, lower + LANES, bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    int64_t unit = 0;
    for (; unit + UNITS <= p.depth; unit += UNITS) {
        for (int64_t byte = 0; p.next && byte < UNITS * UNIT_BYTES; byte += LINE_BYTES)
            __builtin_prefetch(p.next + unit * UNIT_BYTES + byte, 0, 2);
        multiply_units<HAS_LOWER>(p.rows + unit, p.row_stride, p.panel + unit * PANEL);
    }
    if (unit < p.depth) multiply_last_units<HAS_LOWER>(p, unit);
    _tile_stored(0, p.sums, bytes);
    _tile_stored(1, p.sums + LANES, bytes);
    if constexpr (HAS_LOWER) {
        _tile_stored(2, lower, bytes);
        _tile_stored(3, lower + LANES, bytes);
    }
    barrier();
}

// Multiplies the rows [row, end), at most ROWS_PER_BLOCK, by a portion of panels.
void multiply_portion(const Linear& a, int64_t row, int64_t end, int64_t portion, int64_t ahead) {
    const int64_t num_panels = count_panels(a), end_panel = std::min(portion + PORTION, num_panels);
    alignas(64) float sums[PORTION][ROWS_PER_BLOCK * PANEL];
    int64_t configured = 0;
    for (int64_t first = 0; first < a.depth; first += BLOCK_UNITS)
        for (int64_t upper = row; upper < end; upper += 2 * AMX_ROWS) {
            const int64_t num_rows = std::min(2 * AMX_ROWS, end - upper);
            if (num_rows != configured) configure(configured = num_rows);
            for (int64_t panel = portion; panel < end_panel; panel++) {
                const Pair* weights = (const Pair*)a.panels + (panel * a.depth + first) * PANEL;
                const int64_t then = panel + 1 < end_panel ? panel + 1 : portion + ahead;
                const bool is_read_next = upper == 0 && then < num_panels;
                const Product<Pair, Pair> product{
                    sums[panel - portion] + (upper - row) * PANEL, (const Pair*)a.rows + upper * a.row_stride + first,
                    weights, num_rows, std::min(BLOCK_UNITS, a.depth - first), PANEL, a.row_stride, first > 0,
                    is_read_next ? (const char*)(weights + (then - panel) * a.depth * PANEL) : nullptr};
                num_rows > AMX_ROWS ? multiply_rows<true>(product) : multiply_rows<false>(product);
            }
        }
    _tile_release();
    for (int64_t panel = portion; panel < end_panel; panel++)
        write<BFloat16>(a, row, end - row, panel, sums[panel - portion]);
}

}  // namespace

extern "C" void linear_pairs(const Linear* arguments, Team& team) {
    const Linear& a = *arguments;
    team.share(num_portions(a), [&](int64_t portion) {
        for (int64_t row = 0; row < a.num_rows; row += ROWS_PER_BLOCK)
            multiply_portion(a, row, std::min(row + ROWS_PER_BLOCK, a.num_rows), portion * PORTION,
                             team.num_threads * PORTION);
    });
}
#endif
