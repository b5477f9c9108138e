// Paged attention: reads K and V directly from the KV cache, once for all queries of a tile.
//
// A row is one query of one head. The rows of a sequence that share a KV head are grouped into tiles
// of up to MAX_ROWS. Threads take work items one after another: a tile of rows over all the keys that
// it may see or, when few sequences decode with long contexts, over one split of those keys. An item
// keeps a running maximum (the online softmax of Milakov and Gimelshein, tiled as in FlashAttention).
// Splits are combined at the end, as in Flash-Decoding.
//
// For a few rows, as in most decodes, both matrix products read the cache directly (few_rows.h). For
// more rows they use the kernel of linear layers (tiles.h): a tile of keys is packed into panels whose
// columns are keys, then its values into panels whose columns are dims. If the CPU multiplies bf16
// pairs, bf16 K and V stay in bf16 and the attention weights are rounded to bf16, as in FlashAttention.
// Sums are in fp32.

#include <algorithm>
#include <vector>

#include "few_rows.h"
#include "packed_rows.h"
#include "team.h"

// Mirrors `Attention` in attention.py. Strides are in elements.
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
    int64_t query_strides[2];  // per token, head
    int64_t key_strides[3];    // per block, slot, head
    int64_t value_strides[3];
    int64_t window;  // 0: none
    float scale;
    float softcap;  // 0: none
};

namespace {

constexpr int64_t MAX_ROWS = 32;
constexpr int64_t MIN_SPLIT = 256;         // in keys
constexpr int64_t ITEMS_PER_THREAD = 4;    // several, so that the load is balanced
constexpr int64_t CHUNKS_PER_THREAD = 16;  // a chunk is a run of items that a thread takes at once
constexpr float INITIAL_MAX = -1e30f;  // finite, so that the difference of two initial maxima is not NaN
constexpr float MASKED = -3e38f;

struct Span {
    int64_t first_token, num_queries, context;
};

struct Item {
    int64_t sequence, kv_head;
    int64_t first_row, num_rows;
    int64_t first_key, last_key;
    int64_t partial;  // index of the item's first row in Partials; -1: it writes to `out`
};

// Keys per tile. Each tile is prefetched while the previous tile is computed. With few rows there is too
// little computation to hide the prefetches behind, so tiles are smaller.
inline int64_t tile_of(const Item& item) { return item.num_rows > TILE_ROWS ? TILE : TILE / 2; }

// One thread's working memory.
template <class T>
struct alignas(64) Scratch {
    Element<T> panels[TILE * MAX_DIM];  // first of keys, then of values
    Element<T> query[MAX_ROWS][MAX_DIM];
    Element<T> weights[MAX_ROWS][TILE];
    float scores[MAX_ROWS][TILE];
    float out[MAX_ROWS][MAX_DIM];
    float top[MAX_ROWS];    // the largest score so far
    float total[MAX_ROWS];  // the sum of e^(score - top) so far
};

// A row whose keys are split. The results of its splits have to be combined.
struct Combined {
    int64_t sequence, kv_head, row, first, stride, num_splits;
};

// The partial results of splits, which are to be combined: each row is [out (value_dim), top, total].
struct Partials {
    std::vector<float> floats;
    int64_t count, value_dim;

    float* row(int64_t index) { return &floats[index * (value_dim + 2)]; }

    void fit() {
        const size_t size = count * (value_dim + 2);
        if (floats.size() < size) floats.resize(size);
    }
};

// The keys and values of an item that are read at once.
template <class T>
struct Tile {
    Rows<T> keys, values;
};

// One online softmax step of a row: turns scores into weights and rescales the sums to the new maximum.
template <class T>
void update_softmax(Scratch<T>& my, int64_t row, int64_t num_keys, int64_t value_dim) {
    const float* scores = my.scores[row];
    Floats tops = all(my.top[row]);
    for (int64_t key = 0; key < num_keys; key += LANES) tops = maximum(tops, load(scores + key));
    const float top = largest(tops);
    Floats totals = {};
    for (int64_t key = 0; key < num_keys; key += LANES) {
        Floats weights = exponential(load(scores + key) - top);
        store(my.weights[row] + key, weights);
        totals += weights;
    }
    const float shrink = exponential(all(my.top[row] - top))[0];
    my.total[row] = my.total[row] * shrink + sum(totals);
    my.top[row] = top;
    if (shrink == 1.0f) return;
    float* out = my.out[row];
    for (int64_t dim = 0; dim < value_dim; dim += LANES) store(out + dim, load(out + dim) * shrink);
}

void scale(float* scores, int64_t num_keys, float scale, float softcap) {
    for (int64_t key = 0; key < num_keys; key += LANES) {
        const Floats scaled = load(scores + key) * scale;
        store(scores + key, softcap == 0 ? scaled : softcap * hyperbolic_tangent(scaled / softcap));
    }
}

// Masks the scores of keys that the query at `position` may not see. The tile starts at position `first`.
void mask(float* scores, int64_t first, int64_t num_keys, int64_t position, int64_t window) {
    const int64_t past = position + 1 - first;
    std::fill(scores + std::clamp<int64_t>(past, 0, num_keys), scores + TILE, MASKED);
    if (window) std::fill_n(scores, std::clamp<int64_t>(past - window, 0, TILE), MASKED);
}

template <class T>
void write(const Attention& a, T* out, const float* row, float top, float total, int64_t head) {
    float shrink = 1.0f;
    if (a.sinks) {  // a sink takes a share of the weight but has no value
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

// Finds the keys or values of an item's tile that starts at position `first`; finds none if `item` is null.
template <class T>
void find(const Attention& a, const Item* item, int64_t first, const void* cache, const int64_t* strides,
          Rows<T>& rows) {
    rows.num_rows = item ? std::clamp<int64_t>(item->last_key - first, 0, tile_of(*item)) : 0;
    if (rows.num_rows == 0) return;
    const int32_t* table = a.block_tables + item->sequence * a.table_stride;
    int64_t place = first / a.block_size, slot = first % a.block_size;
    for (int64_t row = 0; row < rows.num_rows; row++, slot++) {
        if (slot == a.block_size) place++, slot = 0;
        rows.rows[row] = (const T*)cache + table[place] * strides[0] + slot * strides[1] + item->kv_head * strides[2];
    }
    std::fill_n(rows.rows + rows.num_rows, -rows.num_rows & (LANES - 1), rows.rows[rows.num_rows - 1]);
}

template <class T>
void find(const Attention& a, const Item* item, int64_t first, Tile<T>& tile) {
    find(a, item, first, a.keys, a.key_strides, tile.keys);
    find(a, item, first, a.values, a.value_strides, tile.values);
}

// `next` is the item that the thread probably runs afterwards, or null. Without noipa the compiler would look up
// the address of the thread_local scratch in the innermost loops.
template <class T>
__attribute__((noipa)) void run(const Attention& a, const Span& span, const Item& item, const Item* next,
                                Scratch<T>& my, Partials& partials) {
    const int64_t group = a.num_heads / a.num_kv_heads;
    for (int64_t row = 0; row < item.num_rows; row++) {
        const int64_t token = span.first_token + (item.first_row + row) / group;
        const int64_t head = item.kv_head * group + (item.first_row + row) % group;
        const T* query = (const T*)a.query + token * a.query_strides[0] + head * a.query_strides[1];
        for (int64_t dim = 0; dim < a.key_dim; dim += LANES) store(my.query[row] + dim, load(query + dim));
        std::fill_n(my.out[row], a.value_dim, 0.0f);
        my.top[row] = INITIAL_MAX;
        my.total[row] = 0.0f;
    }
    // Multiplies the rows of `from` by each panel, into the rows of `to`.
    const auto multiply_panels = [&](auto* to, const auto* from, int64_t num_columns, int64_t depth, bool adds) {
        const auto* panel = (const Unit<T>*)my.panels;
        for (int64_t column = 0; column < num_columns; column += PANEL, panel += depth * PANEL)
            multiply(Product<Unit<T>, Unit<T>>{
                to[0] + column, (const Unit<T>*)from[0], panel, item.num_rows, depth,
                sizeof to[0] / sizeof(float), sizeof from[0] / sizeof(Unit<T>), adds});
    };
    const bool is_few = item.num_rows <= FEW_ROWS;
    const FewRows<T> few{my.query, my.scores, my.weights, my.out};
    const Tile<T> none{{0, a.key_dim}, {0, a.value_dim}};
    Tile<T> tiles[] = {none, none};
    find(a, &item, item.first_key, tiles[0]);
    int turn = 0;
    for (int64_t first = item.first_key; first < item.last_key; first += tile_of(item), turn = !turn) {
        const Tile<T>& tile = tiles[turn];
        Tile<T>& ahead = tiles[!turn];
        const int64_t num_keys = tile.keys.num_rows;
        if (first + num_keys < item.last_key)
            find(a, &item, first + num_keys, ahead);
        else
            find(a, next, next ? next->first_key : 0, ahead);
        if (is_few) {
            for_few_rows(COMPUTE_SCORES<T>, few, item.num_rows, tile.keys, ahead.keys);
        } else {
            pack_keys(tile.keys, (Unit<T>*)my.panels, ahead.keys);
            multiply_panels(my.scores, my.query, num_keys, a.key_dim / ELEMENTS_PER_UNIT<T>, false);
        }
        for (int64_t row = 0; row < item.num_rows; row++) {
            scale(my.scores[row], num_keys, a.scale, a.softcap);
            const int64_t position = span.context - span.num_queries + (item.first_row + row) / group;
            mask(my.scores[row], first, num_keys, position, a.window);
            update_softmax(my, row, num_keys, a.value_dim);
        }
        if (is_few) {
            for_few_rows(ADD_VALUES<T>, few, item.num_rows, tile.values, ahead.values);
        } else {
            pack_values(tile.values, (Unit<T>*)my.panels, ahead.values);
            const int64_t depth = (num_keys + ELEMENTS_PER_UNIT<T> - 1) / ELEMENTS_PER_UNIT<T>;
            multiply_panels(my.out, my.weights, a.value_dim, depth, true);
        }
    }
    for (int64_t row = 0; row < item.num_rows; row++) {
        const float* out = my.out[row];
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

// Combines the splits of one row: num_splits partial rows, `stride` rows apart.
template <class T>
void combine(const Attention& a, T* out, Partials& partials, int64_t first, int64_t stride,
             int64_t num_splits, int64_t head) {
    float top = INITIAL_MAX, total = 0.0f, row[MAX_DIM] = {};
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

// The work of one call.
struct Plan {
    std::vector<Span> spans;
    std::vector<Item> items;
    std::vector<Combined> combined;
    Partials partials;
    int64_t chunk;  // items that a thread takes at once

    void make(const Attention& a, int64_t num_threads);

   private:
    void find_spans(const Attention& a);
    void add(const Attention& a, int64_t sequence, int64_t target_splits);
};

void Plan::find_spans(const Attention& a) {
    spans.clear();
    for (int64_t i = 0; i < a.num_sequences; i++) {
        const int64_t after = i - a.num_decodes;
        if (after < 0)
            spans.push_back({i, 1, a.context_lens[i]});
        else
            spans.push_back({a.num_decodes + a.query_starts[after],
                             a.query_starts[after + 1] - a.query_starts[after], a.context_lens[i]});
    }
}

// Adds the items of a sequence. Each of its tiles of rows is split into at most target_splits items.
void Plan::add(const Attention& a, int64_t sequence, int64_t target_splits) {
    const Span& span = spans[sequence];
    const int64_t group = a.num_heads / a.num_kv_heads;
    const int64_t all_rows = span.num_queries * group;
    for (int64_t row = 0; row < all_rows; row += MAX_ROWS) {
        const int64_t num_rows = std::min(MAX_ROWS, all_rows - row);
        const int64_t position = span.context - span.num_queries + row / group;
        const int64_t end = span.context - span.num_queries + (row + num_rows - 1) / group + 1;
        const int64_t start = a.window ? std::max<int64_t>(0, position + 1 - a.window) : 0;
        const int64_t max_splits = std::max<int64_t>(1, (end - start) / MIN_SPLIT);
        const int64_t splits = std::min(max_splits, target_splits);
        const int64_t size = ((end - start + splits - 1) / splits + TILE - 1) / TILE * TILE;
        const int64_t num_splits = (end - start + size - 1) / size;
        for (int64_t kv_head = 0; kv_head < a.num_kv_heads; kv_head++) {
            if (num_splits == 1) {
                items.push_back({sequence, kv_head, row, num_rows, start, end, -1});
                continue;
            }
            for (int64_t r = 0; r < num_rows; r++)
                combined.push_back({sequence, kv_head, row + r, partials.count + r, num_rows, num_splits});
            for (int64_t key = start; key < end; key += size, partials.count += num_rows)
                items.push_back({sequence, kv_head, row, num_rows, key, std::min(key + size, end), partials.count});
        }
    }
}

void Plan::make(const Attention& a, int64_t num_threads) {
    find_spans(a);
    items.clear(), combined.clear();
    partials.count = 0, partials.value_dim = a.value_dim;
    chunk = 1;
    const int64_t group = a.num_heads / a.num_kv_heads;
    int64_t num_tiles = 0;
    for (const Span& span : spans)
        num_tiles += a.num_kv_heads * ((span.num_queries * group + MAX_ROWS - 1) / MAX_ROWS);
    if (num_tiles == 0) return;  // no new tokens
    const int64_t target_splits = (ITEMS_PER_THREAD * num_threads + num_tiles - 1) / num_tiles;
    for (int64_t i = 0; i < a.num_sequences; i++)
        if (spans[i].context) add(a, i, target_splits);
    partials.fit();
    chunk = std::max<int64_t>(1, items.size() / (CHUNKS_PER_THREAD * num_threads));
}

// Writes zeros for padding, which has no context.
template <class T>
void clear_padding(const Attention& a, const Plan& plan) {
    for (const Span& span : plan.spans)
        if (span.context == 0) {
            T* out = (T*)a.out + span.first_token * a.num_heads * a.value_dim;
            std::memset(out, 0, span.num_queries * a.num_heads * a.value_dim * sizeof(T));
        }
}

template <class T>
void attend(const Attention& a, Team& team) {
    const Prepared prepared = team.once<Plan>([&](Plan& plan) {
        plan.make(a, team.num_threads);
        clear_padding<T>(a, plan);
        const int64_t num_items = plan.items.size(), num_combined = plan.combined.size();
        return Prepared{&plan, {(num_items + plan.chunk - 1) / plan.chunk, num_combined}};
    });
    Plan& plan = *(Plan*)prepared.object;
    team.share(prepared.counts[0], [&](int64_t number) {
        static thread_local Scratch<T> my;
        const int64_t num_items = plan.items.size(), end = std::min((number + 1) * plan.chunk, num_items);
        for (int64_t i = number * plan.chunk; i < end; i++) {
            const Item& item = plan.items[i];
            run<T>(a, plan.spans[item.sequence], item, i + 1 < num_items ? &item + 1 : nullptr, my, plan.partials);
        }
    });
    team.share(prepared.counts[1], [&](int64_t i) {
        const Combined& row = plan.combined[i];
        int64_t head;
        T* out = out_row<T>(a, plan.spans[row.sequence], row.kv_head, row.row, &head);
        combine(a, out, plan.partials, row.first, row.stride, row.num_splits, head);
    });
}

}  // namespace

extern "C" void attend_fp32(const Attention* arguments, Team& team) { attend<float>(*arguments, team); }
extern "C" void attend_bf16(const Attention* arguments, Team& team) { attend<BFloat16>(*arguments, team); }
