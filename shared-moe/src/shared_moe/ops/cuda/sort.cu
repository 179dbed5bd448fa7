// Count in blocks, scan (outside), place. Integer counts and ranks by warp votes: the order never varies.
#include "sort.cuh"

extern "C" __global__ void sort_count(const index_t* ids, index_t* counts, index_t S, int E) {
    __shared__ int held[MOST_EXPERTS + 1];
    const index_t block = blockIdx.x;
    for (int e = threadIdx.x; e <= E; e += blockDim.x) held[e] = 0;
    __syncthreads();
    for (index_t s = block_begin(block) + threadIdx.x; s < block_end(block, S); s += blockDim.x)
        atomicAdd(&held[bucket(ids[s], E)], 1);
    __syncthreads();
    for (int e = threadIdx.x; e <= E; e += blockDim.x) counts[block * (E + 1) + e] = held[e];
}

// One warp a block.
extern "C" __global__ void sort_place(const index_t* ids, const index_t* start, index_t* order, index_t S, int E) {
    __shared__ index_t next[MOST_EXPERTS + 1];
    const index_t block = blockIdx.x;
    const int lane = threadIdx.x;
    for (int e = lane; e <= E; e += WARP) next[e] = start[block * (E + 1) + e];
    __syncwarp();
    const index_t end = block_end(block, S);
    for (index_t first = block_begin(block); first < end; first += WARP) {
        const index_t s = first + lane;
        const int e = s < end ? bucket(ids[s], E) : -1;
        const unsigned same = __match_any_sync(0xffffffffu, e);
        const int rank = lower_lanes(same, lane);
        if (e >= 0) order[next[e] + rank] = s;
        __syncwarp();
        if (e >= 0 && rank == 0) next[e] += population(same);
        __syncwarp();
    }
}
