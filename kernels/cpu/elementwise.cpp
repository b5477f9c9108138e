// The operations between matrix products, each in one pass over memory, and the KV cache write.
// They compute in fp32, but also round between steps that are separate operations in torch. A norm rounds after
// normalizing (if rounds_first) and before the residual is added; a gated activation rounds before the product with
// `up`.

#include <algorithm>

#include "team.h"
#include "vectors.h"

// These mirror the structures in elementwise.py. Strides are in elements.
struct Norm {
    void* out;  // [T, heads, width]; a token's heads are dense
    const void* rows;
    const void* weight;
    const void* bias;      // null, or of a LayerNorm
    const void* residual;  // null, or laid out as `out` and added to the result; may be `out` itself
    int64_t num_tokens, num_heads, width;
    int64_t strides[2];  // per token, head
    int64_t out_stride;  // per token, of `out` and `residual`
    float eps, offset;
    int32_t rounds_first;
};

struct Activation {
    void* out;  // [T, width]; may overwrite the gates or `up`
    const void *gate, *up;
    int64_t num_tokens, width;
    int64_t strides[3];  // per token, of out, gate and up
    int64_t kind;
};

struct Rotary {
    void* rows[2];  // query, key
    const void* cos;
    const void* sin;
    int64_t num_tokens, num_heads[2], half;
    int64_t strides[2][2];  // per token, head
    int64_t cos_stride, sin_stride;
    int64_t second_half;  // offset of the angles of the second half
};

// Mirrors `Write` in cache.py.
struct Write {
    const void* rows[2];  // K, V
    void* caches[2];
    const int64_t* slots;
    int64_t num_tokens, num_heads, block_size, dims[2];
    int64_t strides[2][2];        // per token, head
    int64_t cache_strides[2][3];  // per block, slot, head
};

namespace {

template <class T>
void norm(const Norm& a, Team& team) {
    const T* weight = (const T*)a.weight;
    team.share_rows(a.num_tokens * a.num_heads, a.width, [&](int64_t i) {
        const int64_t token = i / a.num_heads, head = i % a.num_heads;
        const int64_t place = token * a.out_stride + head * a.width;
        const T* row = (const T*)a.rows + token * a.strides[0] + head * a.strides[1];
        T* out = (T*)a.out + place;
        const T* residual = a.residual ? (const T*)a.residual + place : nullptr;
        Floats squares = {};
        for (int64_t dim = 0; dim < a.width; dim += LANES) squares += load(row + dim) * load(row + dim);
        const float scale = 1.0f / __builtin_sqrtf(sum(squares) / a.width + a.eps);
        for (int64_t dim = 0; dim < a.width; dim += LANES) {
            Floats numbers = load(row + dim) * scale;
            if (a.rounds_first) numbers = rounded<T>(numbers);
            numbers *= load(weight + dim) + a.offset;
            store(out + dim, residual ? load(residual + dim) + rounded<T>(numbers) : numbers);
        }
    });
}

// The norm of LayerNorm: of the distances from their mean, with a bias.
template <class T>
void layer_norm(const Norm& a, Team& team) {
    const T *weight = (const T*)a.weight, *bias = (const T*)a.bias;
    team.share_rows(a.num_tokens * a.num_heads, a.width, [&](int64_t i) {
        const int64_t token = i / a.num_heads, head = i % a.num_heads;
        const int64_t place = token * a.out_stride + head * a.width;
        const T* row = (const T*)a.rows + token * a.strides[0] + head * a.strides[1];
        T* out = (T*)a.out + place;
        const T* residual = a.residual ? (const T*)a.residual + place : nullptr;
        Floats total = {}, squares = {};
        for (int64_t dim = 0; dim < a.width; dim += LANES) total += load(row + dim);
        const float mean = sum(total) / a.width;
        for (int64_t dim = 0; dim < a.width; dim += LANES) {
            const Floats distance = load(row + dim) - mean;
            squares += distance * distance;
        }
        const float scale = 1.0f / __builtin_sqrtf(sum(squares) / a.width + a.eps);
        for (int64_t dim = 0; dim < a.width; dim += LANES) {
            Floats numbers = (load(row + dim) - mean) * scale * load(weight + dim);
            if (bias) numbers += load(bias + dim);
            store(out + dim, residual ? load(residual + dim) + rounded<T>(numbers) : numbers);
        }
    });
}

template <class T>
void activation(const Activation& a, Team& team) {
    team.share_rows(a.num_tokens, a.width, [&](int64_t token) {
        const T *gate = (const T*)a.gate + token * a.strides[1], *up = (const T*)a.up + token * a.strides[2];
        T* out = (T*)a.out + token * a.strides[0];
        const auto compute = [&](const T* gate, const T* up, T* out) {
            store(out, rounded<T>(activated(load(gate), a.kind)) * load(up));
        };
        const int64_t whole = a.width / LANES * LANES, rest = a.width - whole;
        for (int64_t dim = 0; dim < whole; dim += LANES) compute(gate + dim, up + dim, out + dim);
        if (rest) {
            T gates[LANES] = {}, ups[LANES] = {}, results[LANES];
            std::copy_n(gate + whole, rest, gates);
            std::copy_n(up + whole, rest, ups);
            compute(gates, ups, results);
            std::copy_n(results, rest, out + whole);
        }
    });
}

template <class T>
void rotary(const Rotary& a, Team& team) {
    const int64_t num_heads = a.num_heads[0] + a.num_heads[1];
    team.share_rows(a.num_tokens, num_heads * a.half, [&](int64_t token) {
        const T* cos = (const T*)a.cos + token * a.cos_stride;
        const T* sin = (const T*)a.sin + token * a.sin_stride;
        for (int64_t i = 0; i < num_heads; i++) {
            const int which = i >= a.num_heads[0];
            const int64_t head = which ? i - a.num_heads[0] : i;
            T* first = (T*)a.rows[which] + token * a.strides[which][0] + head * a.strides[which][1];
            T* second = first + a.half;
            for (int64_t dim = 0; dim < a.half; dim += LANES) {
                const Floats x = load(first + dim), y = load(second + dim);
                store(first + dim, x * load(cos + dim) - y * load(sin + dim));
                store(second + dim, y * load(cos + a.second_half + dim) + x * load(sin + a.second_half + dim));
            }
        }
    });
}

template <class T>
void write_kv(const Write& a, Team& team) {
    team.share_rows(a.num_tokens, a.num_heads * a.dims[0], [&](int64_t token) {
        if (a.slots[token] < 0) return;  // padding
        const int64_t block = a.slots[token] / a.block_size, slot = a.slots[token] % a.block_size;
        for (int which = 0; which < 2; which++)
            for (int64_t head = 0; head < a.num_heads; head++) {
                const int64_t *from = a.strides[which], *to = a.cache_strides[which];
                std::copy_n((const T*)a.rows[which] + token * from[0] + head * from[1], a.dims[which],
                            (T*)a.caches[which] + block * to[0] + slot * to[1] + head * to[2]);
            }
    });
}

}  // namespace

extern "C" void rms_norm_fp32(const Norm* a, Team& team) { norm<float>(*a, team); }
extern "C" void rms_norm_bf16(const Norm* a, Team& team) { norm<BFloat16>(*a, team); }
extern "C" void layer_norm_fp32(const Norm* a, Team& team) { layer_norm<float>(*a, team); }
extern "C" void layer_norm_bf16(const Norm* a, Team& team) { layer_norm<BFloat16>(*a, team); }
extern "C" void gated_activation_fp32(const Activation* a, Team& team) { activation<float>(*a, team); }
extern "C" void gated_activation_bf16(const Activation* a, Team& team) { activation<BFloat16>(*a, team); }
extern "C" void rotary_fp32(const Rotary* a, Team& team) { rotary<float>(*a, team); }
extern "C" void rotary_bf16(const Rotary* a, Team& team) { rotary<BFloat16>(*a, team); }
extern "C" void write_kv_fp32(const Write* a, Team& team) { write_kv<float>(*a, team); }
extern "C" void write_kv_bf16(const Write* a, Team& team) { write_kv<BFloat16>(*a, team); }
