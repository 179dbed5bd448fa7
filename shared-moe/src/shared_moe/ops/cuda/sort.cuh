// Stable counting sort by expert: which rows a block has, which bucket an id falls in, its rank in a warp.
#pragma once
#include "common.cuh"

constexpr int BLOCK_ROWS = 1024;
constexpr int MOST_EXPERTS = 1024;
constexpr int WARP = 32;

HD constexpr index_t block_begin(index_t block) { return block * BLOCK_ROWS; }

HD constexpr index_t block_end(index_t block, index_t S) {
    const index_t end = block_begin(block) + BLOCK_ROWS;
    return end < S ? end : S;
}

static_assert(block_end(index_t(1) << 24, (index_t(1) << 34) + 5) == (index_t(1) << 34) + 5, "offsets overflow");

// The last bucket, E, holds the assignments without an expert.
HD int bucket(index_t id, int E) { return id < 0 || id >= E ? E : int(id); }

// How many lower lanes of the warp share this lane's bucket; `same` has one bit for each lane that does.
HD int lower_lanes(unsigned same, int lane) { return population(same & ((1u << lane) - 1)); }
