// Packs keys and values into panels, by which the kernel of linear layers (tiles.h) multiplies rows.
#pragma once

#include "cached_rows.h"

namespace {

// Packs keys as the columns of panels that are `depth` units deep.
template <class T>
void pack_keys(const Rows<T>& keys, Unit<T>* panels, const Rows<T>& ahead) {
    const int64_t depth = keys.dim / ELEMENTS_PER_UNIT<T>;
    for (int64_t key = 0; key < keys.num_rows; key += LANES) {
        Unit<T>* columns = panels + key / PANEL * depth * PANEL + key % PANEL;
        for (int64_t unit = 0; unit < depth; unit += LANES) {
            Words square[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                ahead.template fetch<2>(key + i, unit * ELEMENTS_PER_UNIT<T>);
                square[i] = units(keys.rows[key + i], unit, depth);
            }
            transpose(square);
            for (int64_t i = 0; i < LANES; i++)  // may overrun into the next panel, which is written later
                std::memcpy(columns + (unit + i) * PANEL, &square[i], sizeof square[i]);
        }
    }
}

// Packs values as the rows of panels, whose depth is the number of units of values. If the last unit lacks a value, it
// gets zeros instead.
template <class T>
void pack_values(const Rows<T>& values, Unit<T>* panels, const Rows<T>& ahead) {
    static constexpr T ZEROS[MAX_DIM] = {};
    const int64_t depth = (values.num_rows + ELEMENTS_PER_UNIT<T> - 1) / ELEMENTS_PER_UNIT<T>;
    for (int64_t unit = 0; unit < depth; unit++) {
        const int64_t value = unit * ELEMENTS_PER_UNIT<T>;
        const T* first = values.rows[value];
        const T* second = value + 1 < values.num_rows ? values.rows[value + 1] : ZEROS;
        for (int64_t dim = 0; dim < values.dim; dim += LANES) {
            for (int64_t i = 0; i < ELEMENTS_PER_UNIT<T>; i++) ahead.template fetch<2>(value + i, dim);
            const Words value_units = units_of_two_rows(first + dim, second + dim);
            std::memcpy(panels + (dim / PANEL * depth + unit) * PANEL + dim % PANEL, &value_units, sizeof value_units);
        }
    }
}

}  // namespace
