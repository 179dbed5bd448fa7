// What every kernel's header needs. Compiles with NVRTC, nvcc and g++.
#pragma once

#ifdef __CUDACC__
#define HD __host__ __device__ inline
#define INFINITE __int_as_float(0x7f800000)
#else
#include <cmath>
#define HD inline
#define INFINITE HUGE_VALF
#endif

using index_t = long long;
static_assert(sizeof(index_t) == 8, "offsets must not overflow at 2^31 elements");

HD int population(unsigned bits) {
#ifdef __CUDA_ARCH__
    return __popc(bits);
#else
    return __builtin_popcount(bits);
#endif
}
