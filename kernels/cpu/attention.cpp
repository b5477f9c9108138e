// Paged attention: K and V are read where they lie, once for all queries of a tile.
//
// A row is one query of one head; the rows of a sequence that share a KV head make tiles of up to
// MAX_ROWS. Threads take items one after another: a tile of rows over all keys it may see or, where
// few sequences decode far into their context, over one split of them. An item keeps a running
// maximum (the online softmax of Milakov and Gimelshein, in tiles as in FlashAttention), and splits
// are combined at the end, as in Flash-Decoding.

#include <algorithm>
#include <vector>

#include "vectors.h"

extern "C" int omp_get_max_threads();

// The same fields as in attention.py. Strides count numbers.
struct Attention {
    void* out;  // [T, heads, value_dim], dense
    const void* query;
    const void* keys;
    const void* values;
    const int32_t* block_tables;
    const int32_t* query_starts;
    const int32_t* context_lens;
    const float* sinks;  // or null
    int64_t num_sequences, num_decodes, table_stride, block_size;
    int64_t num_heads, num_kv_heads, key_dim, value_dim;
    int64_t query_strides[2];  // of tokens, heads
    int64_t key_strides[3];    // of blocks, slots, heads
    int64_t value_strides[3];
    int64_t window;  // 0: none
    float scale;
    float softcap;  // 0: none
};

namespace {

constexpr int64_t MAX_ROWS = 32;
constexpr int64_t MAX_DIM = 256;
constexpr int64_t TILE = 64;           // keys
constexpr int64_t MIN_SPLIT = 256;     // keys
constexpr int64_t LINE_BYTES = 64;
constexpr int64_t ITEMS_A_THREAD = 4;  // so that none is left waiting for another's last
constexpr float NOTHING_SEEN = -1e30f;  // finite: the difference of two of them is a number
constexpr float HIDDEN = -3e38f;

struct Span {
    int64_t first_token, num_queries, context;
};

struct Item {
    int64_t sequence, kv_head;
    int64_t first_row, num_rows;
    int64_t first_key, last_key;
    int64_t partial;  // where its first row goes in Partials; -1: straight to `out`
};

// One thread's. Rows lie one after the other, of key_dim or value_dim numbers.
struct Scratch {
    float query[MAX_ROWS * MAX_DIM];
    float out[MAX_ROWS * MAX_DIM];
    float scores[MAX_ROWS][TILE];
    float top[MAX_ROWS];    // the largest score so far
    float total[MAX_ROWS];  // the sum of e^(score - top) so far
    float floats[TILE * MAX_DIM];  // keys, then values, that are no floats where they lie
};

// Rows of splits: out, top, total.
struct Partials {
    std::vector<float> numbers;
    int64_t value_dim;

    float* row(int64_t index) { return &numbers[index * (value_dim + 2)]; }
};

const float* as_floats(const float* row, float*, int64_t) { return row; }

const float* as_floats(const BFloat16* row, float* scratch, int64_t size) {
    for (int64_t dim = 0; dim < size; dim += LANES) store(scratch + dim, load(row + dim));
    return scratch;
}

// Rows of keys or values that are wanted soon, where they lie. They are asked for a few at a time, while
// others are computed with: all at once would have to wait for each other.
struct Ahead {
    const void* rows[TILE];
    int64_t num_rows, row_bytes;

    void fetch(int64_t first, int64_t count) const {
        for (int64_t row = first; row < std::min(first + count, num_rows); row++)
            for (int64_t byte = 0; byte < row_bytes; byte += LINE_BYTES)
                __builtin_prefetch((const char*)rows[row] + byte);
    }
};

// scores[r][k] = query r · key k, of R rows and 8 / R keys.
template <int R>
inline void score_eight(float (*scores)[TILE], int64_t at, const float* query,
                        const float* const* keys, int64_t size) {
    constexpr int K = 8 / R;
    Floats products[8] = {};
    for (int64_t dim = 0; dim < size; dim += LANES) {
        Floats queries[R];
        for (int r = 0; r < R; r++) queries[r] = load(query + r * size + dim);
        for (int k = 0; k < K; k++) {
            Floats key = load(keys[k] + dim);
            for (int r = 0; r < R; r++) products[r * K + k] += queries[r] * key;
        }
    }
    EightFloats eight = sums(products);
    for (int r = 0; r < R; r++)
        std::memcpy(scores[r] + at, (const float*)&eight + r * K, K * sizeof(float));
}

template <int R>
void score_rows(Scratch& my, int64_t row, const float* const* keys, int64_t num_keys, int64_t size,
                const Ahead& ahead) {
    for (int64_t key = 0; key < num_keys; key += 8 / R) {
        if (row == 0) ahead.fetch(key, 8 / R);
        score_eight<R>(my.scores + row, key, my.query + row * size, keys + key, size);
    }
}

// Turns scores into weights, and what the row has so far into what it is at the new maximum.
void weigh(Scratch& my, int64_t row, int64_t num_keys, int64_t value_dim) {
    float* scores = my.scores[row];
    Floats tops = all(my.top[row]);
    for (int64_t key = 0; key < num_keys; key += LANES) tops = maximum(tops, load(scores + key));
    const float top = largest(tops);
    Floats totals = {};
    for (int64_t key = 0; key < num_keys; key += LANES) {
        Floats weights = exponential(load(scores + key) - top);
        store(scores + key, weights);
        totals += weights;
    }
    const float shrink = exponential(all(my.top[row] - top))[0];
    my.total[row] = my.total[row] * shrink + sum(totals);
    my.top[row] = top;
    if (shrink == 1.0f) return;
    float* out = my.out + row * value_dim;
    for (int64_t dim = 0; dim < value_dim; dim += LANES) store(out + dim, load(out + dim) * shrink);
}

// out r += weights r @ values, of R rows and V vectors from `dim` on.
template <int R, int V>
inline void accumulate(float* out, const float (*weights)[TILE], const float* const* values,
                       int64_t num_keys, int64_t size, int64_t dim, const Ahead* ahead) {
    Floats sums[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = load(out + r * size + dim + v * LANES);
    for (int64_t key = 0; key < num_keys; key++) {
        if (ahead) ahead->fetch(key, 1);
        for (int v = 0; v < V; v++) {
            Floats value = load(values[key] + dim + v * LANES);
            for (int r = 0; r < R; r++) sums[r][v] += weights[r][key] * value;
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(out + r * size + dim + v * LANES, sums[r][v]);
}

template <int R>
void accumulate_rows(Scratch& my, int64_t row, const float* const* values, int64_t num_keys,
                     int64_t size, const Ahead& ahead) {
    constexpr int V = 8 / R;
    float* out = my.out + row * size;
    int64_t dim = 0;
    for (; dim + V * LANES <= size; dim += V * LANES)
        accumulate<R, V>(out, my.scores + row, values, num_keys, size, dim,
                         row + dim == 0 ? &ahead : nullptr);
    for (; dim < size; dim += LANES)
        accumulate<R, 1>(out, my.scores + row, values, num_keys, size, dim,
                         row + dim == 0 ? &ahead : nullptr);
}

// Rows in pairs, so that a key or value that was loaded serves twice.
#define IN_PAIRS(function, my, num_rows, ...)                                 \
    do {                                                                      \
        int64_t row = 0;                                                      \
        for (; row + 2 <= (num_rows); row += 2) function<2>(my, row, __VA_ARGS__); \
        if (row < (num_rows)) function<1>(my, row, __VA_ARGS__);              \
    } while (false)

void cap(float* scores, int64_t num_keys, float softcap) {
    for (int64_t key = 0; key < num_keys; key += LANES)
        store(scores + key, softcap * hyperbolic_tangent(load(scores + key) / softcap));
}

// Of a tile of keys that starts at position `first`, leaves what the query at `position` may see.
void hide(float* scores, int64_t first, int64_t num_keys, int64_t position, int64_t window) {
    const int64_t past = position + 1 - first;
    std::fill(scores + std::clamp<int64_t>(past, 0, num_keys), scores + TILE, HIDDEN);
    if (window) std::fill_n(scores, std::clamp<int64_t>(past - window, 0, TILE), HIDDEN);
}

template <class T>
void write(const Attention& a, T* out, const float* row, float top, float total, int64_t head) {
    float shrink = 1.0f;
    if (a.sinks) {  // takes its share of the weight, and adds nothing
        const float new_top = std::max(top, a.sinks[head]);
        shrink = exponential(all(top - new_top))[0];
        total = total * shrink + exponential(all(a.sinks[head] - new_top))[0];
    }
    for (int64_t dim = 0; dim < a.value_dim; dim += LANES)
        store(out + dim, load(row + dim) * (shrink / total));
}

template <class T>
T* out_row(const Attention& a, const Span& span, int64_t kv_head, int64_t row, int64_t* head) {
    const int64_t group = a.num_heads / a.num_kv_heads;
    *head = kv_head * group + row % group;
    return (T*)a.out + ((span.first_token + row / group) * a.num_heads + *head) * a.value_dim;
}

// Not inlined, or the compiler asks for the address of what is thread_local in the innermost loop.
template <class T>
__attribute__((noinline)) void run(const Attention& a, const Span& span, const Item& item, Scratch& my, Partials& partials) {
    const int64_t group = a.num_heads / a.num_kv_heads;
    for (int64_t row = 0; row < item.num_rows; row++) {
        const int64_t token = span.first_token + (item.first_row + row) / group;
        const int64_t head = item.kv_head * group + (item.first_row + row) % group;
        const T* query = (const T*)a.query + token * a.query_strides[0] + head * a.query_strides[1];
        for (int64_t dim = 0; dim < a.key_dim; dim += LANES)
            store(my.query + row * a.key_dim + dim, load(query + dim) * a.scale);
        std::fill_n(my.out + row * a.value_dim, a.value_dim, 0.0f);
        my.top[row] = NOTHING_SEEN;
        my.total[row] = 0.0f;
    }
    const int32_t* table = a.block_tables + item.sequence * a.table_stride;
    const int64_t first_position = span.context - span.num_queries;
    const auto find = [&](Ahead& rows, const void* cache, const int64_t* strides, int64_t first) {
        rows.num_rows = std::clamp<int64_t>(item.last_key - first, 0, TILE);
        int64_t place = first / a.block_size, slot = first % a.block_size;
        for (int64_t row = 0; row < rows.num_rows; row++, slot++) {
            if (slot == a.block_size) place++, slot = 0;
            rows.rows[row] = (const T*)cache + table[place] * strides[0] + slot * strides[1] +
                             item.kv_head * strides[2];
        }
    };
    Ahead key_rows{{}, 0, a.key_dim * (int64_t)sizeof(T)}, value_rows{{}, 0, a.value_dim * (int64_t)sizeof(T)};
    const float* rows[TILE];
    find(key_rows, a.keys, a.key_strides, item.first_key);
    for (int64_t first = item.first_key; first < item.last_key; first += TILE) {
        const int64_t num_keys = key_rows.num_rows;
        const int64_t num_scores = (num_keys + LANES - 1) / LANES * LANES;
        find(value_rows, a.values, a.value_strides, first);
        for (int64_t key = 0; key < num_keys; key++)
            rows[key] = as_floats((const T*)key_rows.rows[key], my.floats + key * a.key_dim, a.key_dim);
        std::fill(rows + num_keys, rows + num_scores, rows[0]);  // scored in eights, then hidden
        IN_PAIRS(score_rows, my, item.num_rows, rows, num_scores, a.key_dim, value_rows);
        for (int64_t row = 0; row < item.num_rows; row++) {
            if (a.softcap != 0) cap(my.scores[row], num_scores, a.softcap);
            const int64_t position = first_position + (item.first_row + row) / group;
            hide(my.scores[row], first, num_keys, position, a.window);
            weigh(my, row, num_scores, a.value_dim);
        }
        find(key_rows, a.keys, a.key_strides, first + TILE);
        for (int64_t key = 0; key < num_keys; key++)
            rows[key] = as_floats((const T*)value_rows.rows[key], my.floats + key * a.value_dim, a.value_dim);
        IN_PAIRS(accumulate_rows, my, item.num_rows, rows, num_keys, a.value_dim, key_rows);
    }
    for (int64_t row = 0; row < item.num_rows; row++) {
        const float* out = my.out + row * a.value_dim;
        if (item.partial >= 0) {
            float* partial = partials.row(item.partial + row);
            std::copy_n(out, a.value_dim, partial);
            partial[a.value_dim] = my.top[row];
            partial[a.value_dim + 1] = my.total[row];
        } else {
            int64_t head;
            T* to = out_row<T>(a, span, item.kv_head, item.first_row + row, &head);
            write(a, to, out, my.top[row], my.total[row], head);
        }
    }
}

// Of one row: num_splits partial rows, `stride` apart.
template <class T>
void combine(const Attention& a, T* out, Partials& partials, int64_t first, int64_t stride,
             int64_t num_splits, int64_t head) {
    float top = NOTHING_SEEN, total = 0.0f, row[MAX_DIM] = {};
    for (int64_t split = 0; split < num_splits; split++)
        top = std::max(top, partials.row(first + split * stride)[a.value_dim]);
    for (int64_t split = 0; split < num_splits; split++) {
        const float* partial = partials.row(first + split * stride);
        const float share = exponential(all(partial[a.value_dim] - top))[0];
        total += partial[a.value_dim + 1] * share;
        for (int64_t dim = 0; dim < a.value_dim; dim += LANES)
            store(row + dim, load(row + dim) + load(partial + dim) * share);
    }
    write(a, out, row, top, total, head);
}

std::vector<Span> spans_of(const Attention& a) {
    std::vector<Span> spans;
    for (int64_t i = 0; i < a.num_sequences; i++) {
        const int64_t after = i - a.num_decodes;
        if (after < 0)
            spans.push_back({i, 1, a.context_lens[i]});
        else
            spans.push_back({a.num_decodes + a.query_starts[after],
                             a.query_starts[after + 1] - a.query_starts[after], a.context_lens[i]});
    }
    return spans;
}

template <class T>
void attend(const Attention& a) {
    const int64_t group = a.num_heads / a.num_kv_heads;
    const int64_t num_threads = omp_get_max_threads();
    const std::vector<Span> spans = spans_of(a);
    int64_t num_tiles = 0;
    for (const Span& span : spans)
        num_tiles += a.num_kv_heads * ((span.num_queries * group + MAX_ROWS - 1) / MAX_ROWS);
    const int64_t wanted_splits = (ITEMS_A_THREAD * num_threads + num_tiles - 1) / num_tiles;

    struct Combined {
        int64_t sequence, kv_head, row, first, stride, num_splits;
    };
    std::vector<Item> items;
    std::vector<Combined> combined;
    Partials partials{{}, a.value_dim};
    int64_t num_partials = 0;
    for (int64_t i = 0; i < a.num_sequences; i++) {
        const Span& span = spans[i];
        if (span.context == 0) {  // padding
            T* out = (T*)a.out + span.first_token * a.num_heads * a.value_dim;
            std::memset(out, 0, span.num_queries * a.num_heads * a.value_dim * sizeof(T));
            continue;
        }
        const int64_t all_rows = span.num_queries * group;
        for (int64_t row = 0; row < all_rows; row += MAX_ROWS) {
            const int64_t num_rows = std::min(MAX_ROWS, all_rows - row);
            const int64_t position = span.context - span.num_queries + row / group;
            const int64_t end = span.context - span.num_queries + (row + num_rows - 1) / group + 1;
            const int64_t start = a.window ? std::max<int64_t>(0, position + 1 - a.window) : 0;
            const int64_t most = std::max<int64_t>(1, (end - start) / MIN_SPLIT);
            const int64_t splits = std::min(most, wanted_splits);
            const int64_t size = ((end - start + splits - 1) / splits + TILE - 1) / TILE * TILE;
            const int64_t num_splits = (end - start + size - 1) / size;
            for (int64_t kv_head = 0; kv_head < a.num_kv_heads; kv_head++) {
                if (num_splits == 1) {
                    items.push_back({i, kv_head, row, num_rows, start, end, -1});
                    continue;
                }
                for (int64_t r = 0; r < num_rows; r++)
                    combined.push_back({i, kv_head, row + r, num_partials + r, num_rows, num_splits});
                for (int64_t key = start; key < end; key += size, num_partials += num_rows)
                    items.push_back(
                        {i, kv_head, row, num_rows, key, std::min(key + size, end), num_partials});
            }
        }
    }
    partials.numbers.resize(num_partials * (a.value_dim + 2));

    const int64_t num_items = items.size(), num_combined = combined.size();
#pragma omp parallel
    {
        static thread_local Scratch my;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_items; i++)
            run<T>(a, spans[items[i].sequence], items[i], my, partials);
#pragma omp for
        for (int64_t i = 0; i < num_combined; i++) {
            const Combined& row = combined[i];
            int64_t head;
            T* out = out_row<T>(a, spans[row.sequence], row.kv_head, row.row, &head);
            combine(a, out, partials, row.first, row.stride, row.num_splits, head);
        }
    }
}

}  // namespace

extern "C" void attend_fp32(const Attention* arguments) { attend<float>(*arguments); }
extern "C" void attend_bf16(const Attention* arguments) { attend<BFloat16>(*arguments); }
