// Products with int8 weights for a few rows an expert, reading each weight once at memory speed. Compiled together with
// moe.cpp. Each row is rounded to 16-bit integers, one scale a block of columns: 512 · 32767 · 127 < 2^31, so a block
// sums exactly in 32 bits, in any order. Blocks and scales are added up in float32.
// Shapes: S rows in expert order, D width, H output width, E experts, B blocks of a row.

#include <cmath>

#if defined(__AVX2__) || defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t block = 512;
constexpr float smallest = 1e-33f;  // blocks below this count as zero, so that no scale is denormal

// step products in each instruction; `ints` holds the sums.
#if defined(__AVX512BW__)
struct Vector {
    static constexpr int64_t step = 32;
    using ints = __m512i;
    using shorts = __m512i;
    using floats = __m512;
    static ints zeros() { return _mm512_setzero_si512(); }
    static floats none() { return _mm512_setzero_ps(); }
    static shorts load(const int16_t* x) { return _mm512_loadu_si512(x); }
    static shorts widen(const int8_t* w) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)w)); }
    static ints add_product(ints sum, shorts w, shorts x) {
#if defined(__AVX512VNNI__)
        return _mm512_dpwssd_epi32(sum, w, x);
#else
        return _mm512_add_epi32(sum, _mm512_madd_epi16(w, x));
#endif
    }
    static floats add_scaled(floats sum, ints v, float scale) {
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(v), _mm512_set1_ps(scale), sum);
    }
    static float total(floats v) { return _mm512_reduce_add_ps(v); }
};
#elif defined(__AVX2__) && defined(__FMA__)
struct Vector {
    static constexpr int64_t step = 16;
    using ints = __m256i;
    using shorts = __m256i;
    using floats = __m256;
    static ints zeros() { return _mm256_setzero_si256(); }
    static floats none() { return _mm256_setzero_ps(); }
    static shorts load(const int16_t* x) { return _mm256_loadu_si256((const __m256i*)x); }
    static shorts widen(const int8_t* w) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)w)); }
    static ints add_product(ints sum, shorts w, shorts x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)); }
    static floats add_scaled(floats sum, ints v, float scale) {
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(v), _mm256_set1_ps(scale), sum);
    }
    static float total(floats v) {
        float parts[8], sum = 0.0f;
        _mm256_storeu_ps(parts, v);
        for (float part : parts) sum += part;
        return sum;
    }
};
#else
struct Vector {
    static constexpr int64_t step = 1;
    using ints = int32_t;
    using shorts = int32_t;
    using floats = float;
    static ints zeros() { return 0; }
    static floats none() { return 0.0f; }
    static shorts load(const int16_t* x) { return *x; }
    static shorts widen(const int8_t* w) { return *w; }
    static ints add_product(ints sum, shorts w, shorts x) { return sum + w * x; }
    static floats add_scaled(floats sum, ints v, float scale) { return sum + float(v) * scale; }
    static float total(floats v) { return v; }
};
#endif

inline int32_t bits_of(float v) {
    int32_t bits;
    std::memcpy(&bits, &v, 4);
    return bits;
}

// A row as 16-bit integers: q = x / scale rounded to nearest, scale = max |x| / 32767 of its block. A value that is not
// finite makes the scale of its block NaN, and with it all that the row yields.
template <class T>
void round_row(int64_t D, const typename T::storage* x, int16_t* q, float* scale) {
    constexpr int32_t infinity = 0x7f800000;
    constexpr float to_low_bits = 12582912.0f;  // 1.5 · 2^23: added to a number, its rounded value fills the low bits
    for (int64_t begin = 0; begin < D; begin += block, ++scale) {
        const int64_t end = std::min(begin + block, D);
        int32_t most_bits = 0;  // of numbers without a sign, order is that of their bits
        for (int64_t d = begin; d < end; ++d) most_bits = std::max(most_bits, bits_of(T::load(x[d])) & 0x7fffffff);
        float most;
        std::memcpy(&most, &most_bits, 4);
        const float inverse = most_bits < infinity && most > smallest ? 32767.0f / most : 0.0f;
        for (int64_t d = begin; d < end; ++d) q[d] = int16_t(bits_of(T::load(x[d]) * inverse + to_low_bits));
        *scale = most_bits < infinity ? most / 32767.0f : std::nanf("");
    }
}

// Bytes from those in use to those asked for, in the nearest cache and the next: the rows of a group lie one after
// another, and are asked for in that order, which the processor's own prefetcher follows.
constexpr int64_t ahead = 8192, far_ahead = 32768;

// Rows of 16-bit integers are padded with zeros to whole steps.
inline int64_t padded(int64_t D) { return (D + Vector::step - 1) / Vector::step * Vector::step; }

// products[r][n] += w[r] · x[n] over one step; rows of w lie w_stride apart, those of x x_stride.
template <int R, int N>
inline void add_step(const int8_t* w, int64_t w_stride, const int16_t* x, int64_t x_stride,
                     typename Vector::ints (&products)[R][N]) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const auto m = Vector::widen(w + r * w_stride);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
            products[r][n] = Vector::add_product(products[r][n], m, Vector::load(x + n * x_stride));
    }
}

// y[n][r] = w[r] · x[n] · w_scale[r] for R rows of the matrix and N rows of x.
template <class T, int R, int N>
inline void int8_dots(int64_t D, int64_t B, const int8_t* w, const float* w_scale, const int16_t* x,
                      const float* x_scale, typename T::storage* y, int64_t y_stride) {
    constexpr int64_t step = Vector::step;
    const int64_t x_stride = padded(D);
    typename Vector::floats sums[R][N];
    for (auto& row : sums)
        for (auto& sum : row) sum = Vector::none();
    for (int64_t b = 0; b < B; ++b) {
        const int64_t end = std::min((b + 1) * block, D);
        int64_t d = b * block;
        typename Vector::ints products[R][N];
        for (auto& row : products)
            for (auto& product : row) product = Vector::zeros();
        for (; d + step <= end; d += step) {
            if constexpr (R * step >= 64)
                for (int64_t line = 0; line < R * step; line += 64) {
                    __builtin_prefetch(w + ahead + d * R + line);
                    __builtin_prefetch(w + far_ahead + d * R + line, 0, 2);
                }
            add_step<R, N>(w + d, D, x + d, x_stride, products);
        }
        if (d < end) {
            int8_t last[R * step] = {};
            for (int r = 0; r < R; ++r) std::memcpy(last + r * step, w + r * D + d, end - d);
            add_step<R, N>(last, step, x + d, x_stride, products);
        }
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) sums[r][n] = Vector::add_scaled(sums[r][n], products[r][n], x_scale[n * B + b]);
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) y[n * y_stride + r] = T::store(Vector::total(sums[r][n]) * w_scale[r]);
}

// The same for any number n of rows of x.
template <class T, int R>
void int8_rows(int64_t n, int64_t D, int64_t B, const int8_t* w, const float* w_scale, const int16_t* x,
               const float* x_scale, typename T::storage* y, int64_t y_stride) {
    for (; n >= 4; n -= 4, x += 4 * padded(D), x_scale += 4 * B, y += 4 * y_stride)
        int8_dots<T, R, 4>(D, B, w, w_scale, x, x_scale, y, y_stride);
    if (n == 3) int8_dots<T, R, 3>(D, B, w, w_scale, x, x_scale, y, y_stride);
    if (n == 2) int8_dots<T, R, 2>(D, B, w, w_scale, x, x_scale, y, y_stride);
    if (n == 1) int8_dots<T, R, 1>(D, B, w, w_scale, x, x_scale, y, y_stride);
}

// y_s = W_e(s) x_s for the experts with at most `most` rows; the rows of others stay as they are.
template <class T, class V = typename T::storage>
void int8_linear_of(int threads, int64_t E, int64_t H, int64_t D, int64_t most, const V* x, const int8_t* weight,
                    const float* scale, const int64_t* counts, V* y) {
    constexpr int64_t R = 4;
    const int64_t B = (D + block - 1) / block, groups = (H + R - 1) / R;
    std::vector<int64_t> hit, start;
    int64_t S = 0;
    for (int64_t e = 0; e < E; S += counts[e++])
        if (counts[e] && counts[e] <= most) hit.push_back(e), start.push_back(S);
    const int64_t stride = padded(D);
    std::vector<int16_t> rounded(S * stride);
    std::vector<float> x_scale(S * B);
    for (size_t i = 0; i < hit.size(); ++i)
        for (int64_t s = start[i]; s < start[i] + counts[hit[i]]; ++s)
            round_row<T>(D, x + s * D, &rounded[s * stride], &x_scale[s * B]);
    parallel(int64_t(hit.size()) * groups, grain_of(R * D), threads, [&](int64_t begin, int64_t end) {
        for (int64_t g = begin; g < end; ++g) {
            const int64_t e = hit[g / groups], s = start[g / groups], h = g % groups * R;
            const int8_t* w = weight + (e * H + h) * D;
            const float* w_scale = scale + e * H + h;
            const int16_t* rows = &rounded[s * stride];
            if (h + R <= H) {
                int8_rows<T, R>(counts[e], D, B, w, w_scale, rows, &x_scale[s * B], y + s * H + h, H);
                continue;
            }
            for (int64_t r = 0; r < H - h; ++r)
                int8_rows<T, 1>(counts[e], D, B, w + r * D, w_scale + r, rows, &x_scale[s * B], y + s * H + h + r, H);
        }
    });
}

// The SwiGLU layer for few tokens; ids are in -1 to E, of which the ends mean no expert.
template <class T, class V = typename T::storage>
void int8_swiglu_of(int threads, int64_t tokens, int64_t E, int64_t K, int64_t D, int64_t F, const V* x,
                    const int64_t* ids, const int8_t* gate_up, const float* gate_up_scale, const int8_t* down,
                    const float* down_scale, const float* weights, V* out) {
    std::vector<int64_t> counts(E), position(tokens * K, -1);
    for (int64_t i = 0; i < tokens * K; ++i)
        if (ids[i] >= 0 && ids[i] < E) ++counts[ids[i]];
    std::vector<int64_t> next(E);
    int64_t S = 0, most = 0;
    for (int64_t e = 0; e < E; S += counts[e++]) next[e] = S, most = std::max(most, counts[e]);
    std::vector<float> in(S * D), h(S * 2 * F), a(S * F), rows(S * D);
    for (int64_t i = 0; i < tokens * K; ++i) {
        if (ids[i] < 0 || ids[i] >= E) continue;
        const int64_t s = position[i] = next[ids[i]]++;
        for (int64_t d = 0; d < D; ++d) in[s * D + d] = T::load(x[i / K * D + d]);
    }
    int8_linear_of<Float32>(threads, E, 2 * F, D, most, in.data(), gate_up, gate_up_scale, counts.data(), h.data());
    swiglu_forward_of<Float32>(threads, S, F, h.data(), a.data());
    int8_linear_of<Float32>(threads, E, D, F, most, a.data(), down, down_scale, counts.data(), rows.data());
    combine_of<Float32, T>(threads, tokens, K, D, rows.data(), position.data(), weights, out);
}

}  // namespace

extern "C" {

void int8_linear(int dtype, int threads, int64_t E, int64_t H, int64_t D, int64_t most, const void* x,
                 const int8_t* weight, const float* scale, const int64_t* counts, void* y) {
    if (dtype == 0)
        int8_linear_of<Float32>(threads, E, H, D, most, (const float*)x, weight, scale, counts, (float*)y);
    else
        int8_linear_of<BFloat16>(threads, E, H, D, most, (const uint16_t*)x, weight, scale, counts, (uint16_t*)y);
}

void int8_swiglu(int dtype, int threads, int64_t T, int64_t E, int64_t K, int64_t D, int64_t F, const void* x,
                 const int64_t* ids, const int8_t* gate_up, const float* gate_up_scale, const int8_t* down,
                 const float* down_scale, const float* weights, void* out) {
    if (dtype == 0)
        int8_swiglu_of<Float32>(threads, T, E, K, D, F, (const float*)x, ids, gate_up, gate_up_scale, down, down_scale,
                                weights, (float*)out);
    else
        int8_swiglu_of<BFloat16>(threads, T, E, K, D, F, (const uint16_t*)x, ids, gate_up, gate_up_scale, down,
                                 down_scale, weights, (uint16_t*)out);
}

}
