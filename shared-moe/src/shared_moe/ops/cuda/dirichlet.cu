#include "dirichlet.cuh"

extern "C" __global__ void log_gamma(const double* a, const index_t* seed, double* value, double* slope, index_t n) {
    const index_t step = index_t(gridDim.x) * blockDim.x;
    for (index_t i = index_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
        log_gamma_sample(a[i], *seed, i, value[i], slope[i]);
}
