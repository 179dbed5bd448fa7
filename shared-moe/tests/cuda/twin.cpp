// The kernels' headers on the CPU, with a loop in place of the grid. The headers stand above this text.
#include <cstdint>
#include <vector>

extern "C" void twin_sort(const int64_t* ids, int64_t* order, int64_t* counts, int64_t S, int E) {
    const int64_t blocks = (S + BLOCK_ROWS - 1) / BLOCK_ROWS;
    std::vector<index_t> start(blocks * (E + 1), 0);
    for (int64_t b = 0; b < blocks; ++b)
        for (index_t s = block_begin(b); s < block_end(b, S); ++s) ++start[b * (E + 1) + bucket(ids[s], E)];
    index_t before = 0;
    for (int e = 0; e <= E; ++e) {
        const index_t first = before;
        for (int64_t b = 0; b < blocks; ++b) {
            const index_t held = start[b * (E + 1) + e];
            start[b * (E + 1) + e] = before, before += held;
        }
        if (e < E) counts[e] = before - first;
    }
    for (int64_t b = 0; b < blocks; ++b) {
        index_t* next = start.data() + b * (E + 1);
        for (index_t first = block_begin(b); first < block_end(b, S); first += WARP) {
            const int lanes = int(block_end(b, S) - first < WARP ? block_end(b, S) - first : WARP);
            unsigned same[WARP] = {};
            for (int i = 0; i < lanes; ++i)
                for (int j = 0; j < lanes; ++j)
                    if (bucket(ids[first + i], E) == bucket(ids[first + j], E)) same[i] |= 1u << j;
            for (int i = 0; i < lanes; ++i)
                order[next[bucket(ids[first + i], E)] + lower_lanes(same[i], i)] = first + i;
            for (int i = 0; i < lanes; ++i) ++next[bucket(ids[first + i], E)];
        }
    }
}

extern "C" void twin_log_gamma(const double* a, double* value, double* slope, int64_t n, int64_t seed) {
    for (int64_t i = 0; i < n; ++i) log_gamma_sample(a[i], seed, i, value[i], slope[i]);
}

extern "C" double twin_gamma_derivative(double x, double b) { return gamma_derivative(x, b); }
extern "C" int64_t twin_block_begin(int64_t block) { return block_begin(block); }
extern "C" int64_t twin_block_end(int64_t block, int64_t S) { return block_end(block, S); }

#ifdef TWIN_MAIN
int main() {
    for (int64_t S : {0, 1, 31, 33, 1024, 1025, 5000})
        for (int E : {1, 3, 1024}) {
            std::vector<int64_t> ids(S), order(S), counts(E);
            for (int64_t s = 0; s < S; ++s) ids[s] = s * 7919 % (E + 4) - 2;
            twin_sort(ids.data(), order.data(), counts.data(), S, E);
            int64_t sum = 0;
            for (int64_t s : order) sum += s;
            if (sum != S * (S - 1) / 2) return 1;
        }
    std::vector<double> a = {1e-300, 1e-3, 0.5, 1, 30, 1e4, -1, 0, INFINITY, NAN}, value(a.size()), slope(a.size());
    for (int64_t seed = -50; seed < 50; ++seed)
        twin_log_gamma(a.data(), value.data(), slope.data(), int64_t(a.size()), seed);
}
#endif
