// What every kernel's header needs. Compiles with NVRTC, nvcc and g++.
#pragma once

#ifdef __CUDACC__
#define HD __host__ __device__ inline
#else
#include <cmath>
#define HD inline
#endif

using index_t = long long;
static_assert(sizeof(index_t) == 8, "offsets must not overflow at 2^31 elements");
