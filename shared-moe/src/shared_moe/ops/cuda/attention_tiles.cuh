// Attention in tiles: R rows (queries) attend to C columns (keys, values) in each of B x H heads, in float32. What a block
// works on, and the tile products that the kernels are made of. WIDTH, the widest head, is set before this file. A block
// has 16 x 16 threads; the thread at (x, y) holds the elements (y + 16 i, x + 16 j) of a tile.
#pragma once
#include "common.cuh"

constexpr int SIDE = 16;
constexpr int THREADS = SIDE * SIDE;
constexpr int TILE = 64;
constexpr int EACH = TILE / SIDE;

struct Sizes {
    index_t batches, heads, rows, columns;
    index_t splits;  // shares of the loop over rows or columns
    int width, values;
};

// Rows of one head, from the first that a tile takes.
struct Rows {
    const float* data;
    index_t stride, count;
    int width;
};

// (B, H, rows, width) with any strides but a contiguous last dimension.
struct Matrix {
    float* data;
    index_t batch, head, row;

    HD constexpr index_t offset(index_t b, index_t h, index_t r) const { return b * batch + h * head + r * row; }

    HD Rows rows(index_t b, index_t h, index_t first, index_t end, int width) const {
        return {data + offset(b, h, first), row, end - first, width};
    }
};

// One block's head, tile, share of the loop, and the rows or columns [begin, end) of that share.
struct Work {
    index_t batch, head, first, split, begin, end;
};

HD constexpr index_t tiles(index_t length) { return (length + TILE - 1) / TILE; }

HD constexpr index_t smaller(index_t a, index_t b) { return a < b ? a : b; }

// `tiled` is what blocks are tiled over, `looped` what each of them walks along.
HD constexpr Work work_of(index_t block, const Sizes& n, index_t tiled, index_t looped) {
    const index_t split = block % n.splits, tile = block / n.splits % tiles(tiled);
    const index_t group = block / n.splits / tiles(tiled);
    const index_t share = (tiles(looped) + n.splits - 1) / n.splits * TILE;
    const index_t begin = smaller(split * share, looped);
    return {group / n.heads, group % n.heads, tile * TILE, split, begin, smaller(begin + share, looped)};
}

constexpr index_t FAR = index_t(1) << 34;
static_assert(Matrix{nullptr, FAR, FAR, 128}.offset(1, 1, FAR) == 130 * FAR, "offsets overflow");
static_assert(work_of(FAR / TILE, {1, 1, 2 * FAR, 1, 1, 1, 1}, 2 * FAR, 1).first == FAR, "offsets overflow");
static_assert(work_of(1, {1, 1, 1, 2 * FAR, 2, 1, 1}, 1, 2 * FAR).begin == FAR, "offsets overflow");

constexpr int DEPTH = WIDTH < 32 ? WIDTH : 32;  // of the width, what a product loads at once
constexpr int CHUNK = WIDTH < 64 ? WIDTH : 64;  // of the width, what is mixed at once
constexpr int CHUNKS = WIDTH / CHUNK;
constexpr int COLS = CHUNK / SIDE;

struct Shared {
    float weight[TILE][TILE + 1];
    union {
        struct {
            float left[TILE][DEPTH + 1], right[TILE][DEPTH + 1];
        } pair;
        float wide[TILE][CHUNK];
    };
};

using Mixed = float[CHUNKS][EACH][COLS];

// Columns `from` to `from` + COLUMNS of up to TILE rows; zeros outside.
template <int COLUMNS, int PITCH>
__device__ void load(float (&to)[TILE][PITCH], const Rows& rows, int from) {
#pragma unroll 4
    for (int i = threadIdx.x; i < TILE * COLUMNS; i += THREADS) {
        const int r = i / COLUMNS, c = i % COLUMNS;
        to[r][c] = r < rows.count && from + c < rows.width ? rows.data[r * rows.stride + from + c] : 0;
    }
}

// sum = left right^T, over their common width.
__device__ void product(float (&sum)[EACH][EACH], Shared& shared, const Rows& left, const Rows& right) {
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    for (int i = 0; i < EACH; ++i)
        for (int j = 0; j < EACH; ++j) sum[i][j] = 0;
    for (int from = 0; from < left.width; from += DEPTH) {
        load<DEPTH>(shared.pair.left, left, from);
        load<DEPTH>(shared.pair.right, right, from);
        __syncthreads();
#pragma unroll 4
        for (int d = 0; d < DEPTH; ++d) {
            float a[EACH], b[EACH];
            for (int i = 0; i < EACH; ++i) a[i] = shared.pair.left[y + SIDE * i][d];
            for (int j = 0; j < EACH; ++j) b[j] = shared.pair.right[x + SIDE * j][d];
            for (int i = 0; i < EACH; ++i)
                for (int j = 0; j < EACH; ++j) sum[i][j] += a[i] * b[j];
        }
        __syncthreads();
    }
}

// sum += weight values, or weight^T values; the weights need not be synchronised before.
template <bool TRANSPOSED>
__device__ void mix(Mixed& sum, Shared& shared, const Rows& values) {
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        load<CHUNK>(shared.wide, values, chunk * CHUNK);
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < TILE; ++k) {
            float a[EACH], b[COLS];
            for (int i = 0; i < EACH; ++i)
                a[i] = TRANSPOSED ? shared.weight[k][y + SIDE * i] : shared.weight[y + SIDE * i][k];
            for (int j = 0; j < COLS; ++j) b[j] = shared.wide[k][x + SIDE * j];
            for (int i = 0; i < EACH; ++i)
                for (int j = 0; j < COLS; ++j) sum[chunk][i][j] += a[i] * b[j];
        }
        __syncthreads();
    }
}

// Row y + 16 i of the tile goes to row `first` + y + 16 i, if that is before `end`.
__device__ void store(const Mixed& sum, const Matrix& to, index_t b, index_t h, index_t first, index_t end,
                      int width) {
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    for (int i = 0; i < EACH; ++i) {
        const index_t r = first + y + SIDE * i;
        if (r >= end) continue;
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            for (int j = 0; j < COLS; ++j) {
                const int column = chunk * CHUNK + x + SIDE * j;
                if (column < width) to.data[to.offset(b, h, r) + column] = sum[chunk][i][j];
            }
    }
}
