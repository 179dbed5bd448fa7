// The expert layer's passes around the matrix products, fused so that each operand is read once, and the whole layer
// for a few rows an expert. Arithmetic is in float32; storage is float32 or bfloat16. Every row is computed by one
// thread in a fixed order, so results do not depend on the number of threads.
// Shapes: S rows in expert order, F hidden width, D width, T tokens, K slots a token, E experts.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int lanes = 16;
typedef float floats __attribute__((vector_size(lanes * 4)));
typedef uint32_t words __attribute__((vector_size(lanes * 4)));
typedef uint16_t halves __attribute__((vector_size(lanes * 2)));

struct Float32 {
    using storage = float;
    static inline float load(float v) { return v; }
    static inline float store(float v) { return v; }
    static inline floats load_lanes(const float* p) {
        floats v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
};

struct BFloat16 {
    using storage = uint16_t;
    static inline float load(uint16_t v) {
        uint32_t bits = uint32_t(v) << 16;
        float out;
        std::memcpy(&out, &bits, 4);
        return out;
    }
    // Round to nearest even; NaN stays NaN.
    static inline uint16_t store(float v) {
        uint32_t bits;
        std::memcpy(&bits, &v, 4);
        uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        uint32_t nan = (bits >> 16) | 0x40u;
        return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
    static inline floats load_lanes(const uint16_t* p) {
        halves v;
        std::memcpy(&v, p, sizeof v);
        words wide = __builtin_convertvector(v, words) << 16;
        floats out;
        std::memcpy(&out, &wide, sizeof out);
        return out;
    }
};

// Run body(begin, end) over [0, count) on up to `threads` threads, each with at least `grain` items.
template <class Body>
void parallel(int64_t count, int64_t grain, int threads, const Body& body) {
    const int64_t parts = std::min<int64_t>(threads, count / std::max<int64_t>(grain, 1));
    if (parts <= 1) return body(0, count);
    std::vector<std::thread> workers;
    for (int64_t p = 1; p < parts; ++p)
        workers.emplace_back([&, p] { body(count * p / parts, count * (p + 1) / parts); });
    body(0, count / parts);
    for (auto& worker : workers) worker.join();
}

int64_t grain_of(int64_t width) { return (1 << 17) / std::max<int64_t>(width, 1) + 1; }

// exp by range reduction and a degree-6 polynomial; relative error below 2e-7 in [-80, 80], constant outside (so that
// no denormal number arises, which costs a hundred cycles). NaN stays NaN.
inline float exponential(float x) {
    float clamped = x < -80.0f ? -80.0f : (x > 80.0f ? 80.0f : x);
    float whole = __builtin_floorf(clamped * 1.44269504088896341f + 0.5f);
    float r = clamped - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = uint32_t(int32_t(whole) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

template <class T, class V = typename T::storage>
void swiglu_row(int64_t F, const V* __restrict gate, const V* __restrict up, V* __restrict out) {
    for (int64_t f = 0; f < F; ++f) {
        float g = T::load(gate[f]);
        out[f] = T::store(g * sigmoid(g) * T::load(up[f]));
    }
}

template <class T, class V = typename T::storage>
void swiglu_forward_of(int threads, int64_t S, int64_t F, const V* h, V* out) {
    parallel(S, grain_of(F), threads, [=](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) swiglu_row<T>(F, h + s * 2 * F, h + s * 2 * F + F, out + s * F);
    });
}

template <class T, class V = typename T::storage>
float swiglu_backward_row(int64_t F, float w, const V* __restrict gate, const V* __restrict up,
                          const V* __restrict grad, V* __restrict grad_gate, V* __restrict grad_up,
                          V* __restrict scaled) {
    float dot = 0.0f;
    for (int64_t f = 0; f < F; ++f) {
        float g = T::load(gate[f]), u = T::load(up[f]), d = T::load(grad[f]);
        float sig = sigmoid(g);
        float act = g * sig;
        float a = act * u;
        dot += d * a;
        scaled[f] = T::store(w * a);
        float wd = w * d;
        grad_up[f] = T::store(wd * act);
        grad_gate[f] = T::store(wd * u * (sig + act * (1.0f - sig)));
    }
    return dot;
}

template <class T, class V = typename T::storage>
void swiglu_backward_of(int threads, int64_t S, int64_t F, const V* h, const V* grad, const float* weight, V* grad_h,
                        V* scaled, float* grad_weight) {
    parallel(S, grain_of(F), threads, [=](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) {
            const V* gate = h + s * 2 * F;
            V* grad_gate = grad_h + s * 2 * F;
            grad_weight[s] = swiglu_backward_row<T>(F, weight[s], gate, gate + F, grad + s * F, grad_gate,
                                                    grad_gate + F, scaled + s * F);
        }
    });
}

constexpr int side = 32;
typedef uint16_t line __attribute__((vector_size(side * 2)));

// Transpose a 32 x 32 tile in registers: five rounds that interleave the upper with the lower half of the rows.
inline void transpose_tile(const uint16_t* in, int64_t in_stride, uint16_t* out, int64_t out_stride) {
    line rows[side], next[side];
    for (int i = 0; i < side; ++i) std::memcpy(&rows[i], in + i * in_stride, sizeof(line));
#pragma GCC unroll 5
    for (int round = 0; round < 5; ++round) {
#pragma GCC unroll 16
        for (int i = 0; i < side / 2; ++i) {
            line a = rows[i], b = rows[i + side / 2];
            next[2 * i] = __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40,
                                                  9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
            next[2 * i + 1] =
                __builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56,
                                        25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
        }
#pragma GCC unroll 32
        for (int i = 0; i < side; ++i) rows[i] = next[i];
    }
    for (int i = 0; i < side; ++i) std::memcpy(out + i * out_stride, &rows[i], sizeof(line));
}

// out (columns, rows) = in (rows, columns) transposed.
void transpose_halves(int threads, int64_t rows, int64_t columns, const uint16_t* in, uint16_t* out) {
    parallel((columns + side - 1) / side, grain_of(rows * side), threads, [=](int64_t begin, int64_t end) {
        for (int64_t c = begin * side; c < std::min(end * side, columns); c += side)
            for (int64_t r = 0; r < rows; r += side) {
                const uint16_t* from = in + r * columns + c;
                uint16_t* to = out + c * rows + r;
                const int64_t height = std::min<int64_t>(side, rows - r), width = std::min<int64_t>(side, columns - c);
                if (height == side && width == side) {
                    transpose_tile(from, columns, to, rows);
                } else {
                    for (int64_t j = 0; j < width; ++j)
                        for (int64_t i = 0; i < height; ++i) to[j * rows + i] = from[i * columns + j];
                }
            }
    });
}

template <class R, class T>
void combine_of(int threads, int64_t tokens, int64_t K, int64_t D, const typename R::storage* rows,
                const int64_t* position, const float* weights, typename T::storage* out) {
    parallel(tokens, grain_of(K * D), threads, [=](int64_t begin, int64_t end) {
        constexpr int64_t block = 256;
        float total[block];
        for (int64_t t = begin; t < end; ++t) {
            for (int64_t start = 0; start < D; start += block) {
                const int64_t width = std::min(block, D - start);
                for (int64_t d = 0; d < width; ++d) total[d] = 0.0f;
                for (int64_t k = 0; k < K; ++k) {
                    const int64_t p = position[t * K + k];
                    if (p < 0) continue;
                    const float w = weights ? weights[t * K + k] : 1.0f;
                    const auto* __restrict row = rows + p * D + start;
                    for (int64_t d = 0; d < width; ++d) total[d] += w * R::load(row[d]);
                }
                auto* __restrict target = out + t * D + start;
                for (int64_t d = 0; d < width; ++d) target[d] = T::store(total[d]);
            }
        }
    });
}

// y[n] = w · x[n] for N vectors and R matrix rows at once, so that memory is read at full speed.
template <class T, int R, int N>
inline void dots(int64_t width, const typename T::storage* w, const float* x, float* y, int64_t y_stride) {
    floats total[R][N] = {};
    int64_t d = 0;
    for (; d + lanes <= width; d += lanes) {
        floats v[N];
        for (int n = 0; n < N; ++n) std::memcpy(&v[n], x + n * width + d, sizeof v[n]);
        for (int r = 0; r < R; ++r) {
            __builtin_prefetch(w + (r + R) * width + d);
            floats m = T::load_lanes(w + r * width + d);
            for (int n = 0; n < N; ++n) total[r][n] += m * v[n];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) {
            float sum = 0.0f;
            for (int i = 0; i < lanes; ++i) sum += total[r][n][i];
            for (int64_t rest = d; rest < width; ++rest) sum += T::load(w[r * width + rest]) * x[n * width + rest];
            y[n * y_stride + r] = sum;
        }
}

// y (N, H) = x (N, D) times w (H, D) transposed.
template <class T, int N>
void product_of(int64_t H, int64_t D, const typename T::storage* w, const float* x, float* y) {
    constexpr int R = 4;
    int64_t j = 0;
    for (; j + R <= H; j += R) dots<T, R, N>(D, w + j * D, x, y + j, H);
    for (; j < H; ++j) dots<T, 1, N>(D, w + j * D, x, y + j, H);
}

template <class T>
void product(int64_t n, int64_t H, int64_t D, const typename T::storage* w, const float* x, float* y) {
    for (; n >= 4; n -= 4, x += 4 * D, y += 4 * H) product_of<T, 4>(H, D, w, x, y);
    if (n == 3) product_of<T, 3>(H, D, w, x, y);
    if (n == 2) product_of<T, 2>(H, D, w, x, y);
    if (n == 1) product_of<T, 1>(H, D, w, x, y);
}

// rows[s] of every assignment that has an expert, in float32: the SwiGLU layer for a few rows an expert.
template <class T>
void swiglu_few_rows_of(int threads, int64_t E, int64_t K, int64_t D, int64_t F, const typename T::storage* x,
                        const typename T::storage* gate_up, const typename T::storage* down, const int64_t* order,
                        const int64_t* counts, float* rows) {
    std::vector<int64_t> hit, start;
    int64_t S = 0;
    for (int64_t e = 0; e < E; S += counts[e++])
        if (counts[e]) hit.push_back(e), start.push_back(S);
    parallel(hit.size(), 1, threads, [&](int64_t begin, int64_t end) {
        std::vector<float> in, h, a;
        for (int64_t i = begin; i < end; ++i) {
            const int64_t e = hit[i], n = counts[e];
            in.resize(n * D), h.resize(n * 2 * F), a.resize(n * F);
            for (int64_t r = 0; r < n; ++r) {
                const auto* __restrict token = x + order[start[i] + r] / K * D;
                for (int64_t d = 0; d < D; ++d) in[r * D + d] = T::load(token[d]);
            }
            product<T>(n, 2 * F, D, gate_up + e * 2 * F * D, in.data(), h.data());
            swiglu_forward_of<Float32>(1, n, F, h.data(), a.data());
            product<T>(n, D, F, down + e * D * F, a.data(), rows + start[i] * D);
        }
    });
}

}  // namespace

extern "C" {

void swiglu_forward(int dtype, int threads, int64_t S, int64_t F, const void* h, void* out) {
    if (dtype == 0) swiglu_forward_of<Float32>(threads, S, F, (const float*)h, (float*)out);
    else swiglu_forward_of<BFloat16>(threads, S, F, (const uint16_t*)h, (uint16_t*)out);
}

void swiglu_backward(int dtype, int threads, int64_t S, int64_t F, const void* h, const void* grad,
                     const float* weight, void* grad_h, void* scaled, float* grad_weight) {
    if (dtype == 0)
        swiglu_backward_of<Float32>(threads, S, F, (const float*)h, (const float*)grad, weight, (float*)grad_h,
                                    (float*)scaled, grad_weight);
    else
        swiglu_backward_of<BFloat16>(threads, S, F, (const uint16_t*)h, (const uint16_t*)grad, weight,
                                     (uint16_t*)grad_h, (uint16_t*)scaled, grad_weight);
}

void transpose(int threads, int64_t rows, int64_t columns, const void* in, void* out) {
    transpose_halves(threads, rows, columns, (const uint16_t*)in, (uint16_t*)out);
}

void combine(int dtype, int threads, int64_t T, int64_t K, int64_t D, const void* rows, const int64_t* position,
             const float* weights, void* out) {
    if (dtype == 0)
        combine_of<Float32, Float32>(threads, T, K, D, (const float*)rows, position, weights, (float*)out);
    else
        combine_of<BFloat16, BFloat16>(threads, T, K, D, (const uint16_t*)rows, position, weights, (uint16_t*)out);
}

void swiglu_few_rows(int dtype, int threads, int64_t T, int64_t E, int64_t K, int64_t D, int64_t F, const void* x,
                     const void* gate_up, const void* down, const int64_t* order, const int64_t* counts,
                     const int64_t* position, const float* weights, void* out) {
    std::vector<float> rows(T * K * D);
    if (dtype == 0) {
        swiglu_few_rows_of<Float32>(threads, E, K, D, F, (const float*)x, (const float*)gate_up, (const float*)down,
                                    order, counts, rows.data());
        combine_of<Float32, Float32>(threads, T, K, D, rows.data(), position, weights, (float*)out);
    } else {
        swiglu_few_rows_of<BFloat16>(threads, E, K, D, F, (const uint16_t*)x, (const uint16_t*)gate_up,
                                     (const uint16_t*)down, order, counts, rows.data());
        combine_of<Float32, BFloat16>(threads, T, K, D, rows.data(), position, weights, (uint16_t*)out);
    }
}

}
