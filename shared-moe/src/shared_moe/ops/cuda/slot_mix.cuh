// Forward by an online softmax over the columns, of which each block takes a share; backward by recomputing the weights
// from the logarithm of their sum, once along the columns (gradient of the rows), once along the rows (gradients of
// keys and values). No matrix of R x C is stored, no atomics: the results never vary.
#pragma once
#include "attention_tiles.cuh"

__device__ bool sees(const unsigned char* mask, const Sizes& n, index_t batch, index_t column) {
    return column < n.columns && (!mask || mask[batch * n.columns + column]);
}

// out and lse have splits x B batches; a share without a column to see gives 0 and -inf.
extern "C" __global__ void __launch_bounds__(THREADS, 1) slot_forward(
    float* lse, Sizes n, Matrix q, Matrix k, Matrix v, const unsigned char* mask, Matrix out) {
    __shared__ Shared shared;
    const Work w = work_of(blockIdx.x, n, n.rows, n.columns);
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const Rows queries = q.rows(w.batch, w.head, w.first, n.rows, n.width);
    Mixed mixed = {};
    float top[EACH], total[EACH];
    for (int i = 0; i < EACH; ++i) top[i] = -INFINITE, total[i] = 0;
    for (index_t c = w.begin; c < w.end; c += TILE) {
        float score[EACH][EACH];
        product(score, shared, queries, k.rows(w.batch, w.head, c, n.columns, n.width));
        for (int j = 0; j < EACH; ++j)
            if (!sees(mask, n, w.batch, c + x + SIDE * j))
                for (int i = 0; i < EACH; ++i) score[i][j] = -INFINITE;
        for (int i = 0; i < EACH; ++i) {
            float best = top[i];
            for (int j = 0; j < EACH; ++j) best = fmaxf(best, score[i][j]);
            for (int lanes = SIDE / 2; lanes; lanes /= 2)
                best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, lanes));
            const float base = best == -INFINITE ? 0 : best, shrink = expf(top[i] - base);
            total[i] *= shrink, top[i] = best;
            for (int j = 0; j < EACH; ++j) {
                const float weight = expf(score[i][j] - base);
                total[i] += weight;
                shared.weight[y + SIDE * i][x + SIDE * j] = weight;
            }
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
                for (int j = 0; j < COLS; ++j) mixed[chunk][i][j] *= shrink;
        }
        mix<false>(mixed, shared, v.rows(w.batch, w.head, c, n.columns, n.values));
    }
    const index_t batch = w.split * n.batches + w.batch;
    for (int i = 0; i < EACH; ++i) {
        for (int lanes = SIDE / 2; lanes; lanes /= 2) total[i] += __shfl_xor_sync(0xffffffffu, total[i], lanes);
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            for (int j = 0; j < COLS; ++j) mixed[chunk][i][j] = total[i] == 0 ? 0 : mixed[chunk][i][j] / total[i];
        const index_t r = w.first + y + SIDE * i;
        if (x == 0 && r < n.rows) lse[(batch * n.heads + w.head) * n.rows + r] = top[i] + logf(total[i]);
    }
    store(mixed, out, batch, w.head, w.first, n.rows, n.values);
}

// mean is the sum of grad x out along a row; grad_q has splits x B batches.
extern "C" __global__ void __launch_bounds__(THREADS, 1) slot_backward_rows(
    const float* lse, Sizes n, Matrix q, Matrix k, Matrix v, const unsigned char* mask, Matrix grad, const float* mean,
    Matrix grad_q) {
    __shared__ Shared shared;
    const Work w = work_of(blockIdx.x, n, n.rows, n.columns);
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const Rows queries = q.rows(w.batch, w.head, w.first, n.rows, n.width);
    const Rows grads = grad.rows(w.batch, w.head, w.first, n.rows, n.values);
    Mixed sum = {};
    float lse_row[EACH] = {}, mean_row[EACH] = {};
    for (int i = 0; i < EACH; ++i) {
        const index_t r = w.first + y + SIDE * i, at = (w.batch * n.heads + w.head) * n.rows + r;
        if (r < n.rows) lse_row[i] = lse[at], mean_row[i] = mean[at];
    }
    for (index_t c = w.begin; c < w.end; c += TILE) {
        const Rows keys = k.rows(w.batch, w.head, c, n.columns, n.width);
        float score[EACH][EACH], change[EACH][EACH];
        product(score, shared, queries, keys);
        product(change, shared, grads, v.rows(w.batch, w.head, c, n.columns, n.values));
        for (int j = 0; j < EACH; ++j) {
            const bool seen = sees(mask, n, w.batch, c + x + SIDE * j);
            for (int i = 0; i < EACH; ++i)
                shared.weight[y + SIDE * i][x + SIDE * j] =
                    seen ? expf(score[i][j] - lse_row[i]) * (change[i][j] - mean_row[i]) : 0;
        }
        mix<false>(sum, shared, keys);
    }
    store(sum, grad_q, w.split * n.batches + w.batch, w.head, w.first, n.rows, n.width);
}

// grad_k and grad_v have splits x B batches; without grad_v the values are the keys, and grad_k gets both.
extern "C" __global__ void __launch_bounds__(THREADS, 1) slot_backward_columns(
    const float* lse, Sizes n, Matrix q, Matrix k, Matrix v, const unsigned char* mask, Matrix grad, const float* mean,
    Matrix grad_k, Matrix grad_v) {
    __shared__ Shared shared;
    const Work w = work_of(blockIdx.x, n, n.columns, n.rows);
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const index_t head_rows = (w.batch * n.heads + w.head) * n.rows;
    const Rows keys = k.rows(w.batch, w.head, w.first, n.columns, n.width);
    const Rows values = v.rows(w.batch, w.head, w.first, n.columns, n.values);
    Mixed sum_k = {}, sum_v = {};
    bool seen[EACH];
    for (int j = 0; j < EACH; ++j) seen[j] = sees(mask, n, w.batch, w.first + x + SIDE * j);
    for (index_t first = w.begin; first < w.end; first += TILE) {
        const Rows queries = q.rows(w.batch, w.head, first, n.rows, n.width);
        const Rows grads = grad.rows(w.batch, w.head, first, n.rows, n.values);
        float score[EACH][EACH], change[EACH][EACH];
        product(score, shared, queries, keys);
        product(change, shared, grads, values);
        for (int i = 0; i < EACH; ++i) {
            const index_t r = first + y + SIDE * i;
            const bool real = r < n.rows;
            const float lse_row = real ? lse[head_rows + r] : 0, mean_row = real ? mean[head_rows + r] : 0;
            for (int j = 0; j < EACH; ++j) {
                const bool counts = real && seen[j];
                const float weight = counts ? expf(score[i][j] - lse_row) : 0;
                shared.weight[y + SIDE * i][x + SIDE * j] = weight;
                score[i][j] = counts ? weight * (change[i][j] - mean_row) : 0;
            }
        }
        mix<true>(sum_v, shared, grads);
        for (int i = 0; i < EACH; ++i)
            for (int j = 0; j < EACH; ++j) shared.weight[y + SIDE * i][x + SIDE * j] = score[i][j];
        mix<true>(sum_k, shared, queries);
    }
    const index_t batch = w.split * n.batches + w.batch;
    if (grad_v.data) {
        store(sum_v, grad_v, batch, w.head, w.first, n.columns, n.values);
    } else {
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            for (int i = 0; i < EACH; ++i)
                for (int j = 0; j < COLS; ++j) sum_k[chunk][i][j] += sum_v[chunk][i][j];
    }
    store(sum_k, grad_k, batch, w.head, w.first, n.columns, n.width);
}
