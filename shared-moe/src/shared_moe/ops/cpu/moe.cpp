// Elementwise passes of the expert layer, fused so that each operand is read once. Arithmetic is in float32;
// storage is float32 or bfloat16. Single-threaded: the matrix products around them hold the threads.
// Shapes: S rows, F hidden width, D width, T tokens, K slots a token.

#include <cstdint>
#include <cstring>

namespace {

struct Float32 {
    using storage = float;
    static inline float load(float v) { return v; }
    static inline float store(float v) { return v; }
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
};

// exp by range reduction and a degree-6 polynomial; relative error below 2e-7 in [-87, 88]. Vectorises.
inline float exponential(float x) {
    float clamped = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float scaled = clamped * 1.44269504088896341f;
    float whole = __builtin_floorf(scaled + 0.5f);
    float r = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = (int32_t(whole) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power + (x - x);  // x - x carries NaN through
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

template <class T>
void swiglu_forward_of(int64_t S, int64_t F, const typename T::storage* h, typename T::storage* out) {
    for (int64_t s = 0; s < S; ++s) {
        const auto* gate = h + s * 2 * F;
        const auto* up = gate + F;
        auto* row = out + s * F;
        for (int64_t f = 0; f < F; ++f) {
            float g = T::load(gate[f]);
            row[f] = T::store(g * sigmoid(g) * T::load(up[f]));
        }
    }
}

template <class T>
void swiglu_backward_of(int64_t S, int64_t F, const typename T::storage* h, const typename T::storage* grad,
                        const float* weight, typename T::storage* grad_h, typename T::storage* scaled,
                        float* grad_weight) {
    for (int64_t s = 0; s < S; ++s) {
        const auto* gate = h + s * 2 * F;
        const auto* up = gate + F;
        const auto* incoming = grad + s * F;
        auto* grad_gate = grad_h + s * 2 * F;
        auto* grad_up = grad_gate + F;
        auto* row = scaled + s * F;
        const float w = weight[s];
        float dot = 0.0f;
        for (int64_t f = 0; f < F; ++f) {
            float g = T::load(gate[f]), u = T::load(up[f]), d = T::load(incoming[f]);
            float sig = sigmoid(g);
            float act = g * sig;
            float a = act * u;
            dot += d * a;
            row[f] = T::store(w * a);
            float wd = w * d;
            grad_up[f] = T::store(wd * act);
            grad_gate[f] = T::store(wd * u * (sig + act * (1.0f - sig)));
        }
        grad_weight[s] = dot;
    }
}

template <class T>
void combine_of(int64_t tokens, int64_t K, int64_t D, const typename T::storage* rows, const int64_t* position,
                const float* weights, typename T::storage* out) {
    constexpr int64_t block = 256;
    float total[block];
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t start = 0; start < D; start += block) {
            const int64_t width = D - start < block ? D - start : block;
            for (int64_t d = 0; d < width; ++d) total[d] = 0.0f;
            for (int64_t k = 0; k < K; ++k) {
                const int64_t p = position[t * K + k];
                if (p < 0) continue;
                const float w = weights ? weights[t * K + k] : 1.0f;
                const auto* row = rows + p * D + start;
                for (int64_t d = 0; d < width; ++d) total[d] += w * T::load(row[d]);
            }
            auto* target = out + t * D + start;
            for (int64_t d = 0; d < width; ++d) target[d] = T::store(total[d]);
        }
    }
}

}  // namespace

extern "C" {

void swiglu_forward(int dtype, int64_t S, int64_t F, const void* h, void* out) {
    if (dtype == 0) swiglu_forward_of<Float32>(S, F, (const float*)h, (float*)out);
    else swiglu_forward_of<BFloat16>(S, F, (const uint16_t*)h, (uint16_t*)out);
}

void swiglu_backward(int dtype, int64_t S, int64_t F, const void* h, const void* grad, const float* weight,
                     void* grad_h, void* scaled, float* grad_weight) {
    if (dtype == 0)
        swiglu_backward_of<Float32>(S, F, (const float*)h, (const float*)grad, weight, (float*)grad_h,
                                    (float*)scaled, grad_weight);
    else
        swiglu_backward_of<BFloat16>(S, F, (const uint16_t*)h, (const uint16_t*)grad, weight, (uint16_t*)grad_h,
                                     (uint16_t*)scaled, grad_weight);
}

void combine(int dtype, int64_t T, int64_t K, int64_t D, const void* rows, const int64_t* position,
             const float* weights, void* out) {
    if (dtype == 0) combine_of<Float32>(T, K, D, (const float*)rows, position, weights, (float*)out);
    else combine_of<BFloat16>(T, K, D, (const uint16_t*)rows, position, weights, (uint16_t*)out);
}

}
