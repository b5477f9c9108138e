// The tiles of AMX: eight registers of up to 16 rows of 64 bytes.
#pragma once

#include <cstdint>
#include <initializer_list>

constexpr int64_t AMX_ROWS = 16;   // of a tile
constexpr int64_t AMX_BYTES = 64;  // of a tile's row

#if defined(__AMX_TILE__)

#include <immintrin.h>

// GCC's functions for tiles do not tell the compiler which memory they read and write.
inline void barrier() { asm volatile("" ::: "memory"); }

// Sets the number of rows of each tile, 0 for a tile without use. Tiles become zero.
inline void configure_tiles(std::initializer_list<uint8_t> rows) {
    struct alignas(64) {  // what LDTILECFG reads
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } configuration;
    int tile = 0;
    for (const uint8_t count : rows) {
        configuration.row_bytes[tile] = count ? AMX_BYTES : 0;
        configuration.rows[tile++] = count;
    }
    barrier();
    _tile_loadconfig(&configuration);
}

#endif
