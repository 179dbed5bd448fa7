// What of the headers the tests call alone, on the CPU. The headers stand above this text.
extern "C" double twin_gamma_derivative(double x, double b) { return gamma_derivative(x, b); }

#ifdef TWIN_MAIN
int main() {
    const double shapes[] = {1e-300, 1e-3, 0.5, 1, 30, 1e4, 1e9, -1, 0, INFINITY, NAN};
    double value, slope;
    for (long long seed = -50; seed < 50; ++seed)
        for (double a : shapes) log_gamma_sample(a, seed, 1ll << 40, value, slope);
    for (int lane = 0; lane < WARP; ++lane)
        if (lower_lanes(~0u, lane) != lane) return 1;
    const index_t outside[] = {-(index_t(1) << 62), -1, 1024, index_t(1) << 62};
    for (index_t id : outside)
        if (bucket(id, 1024) != 1024) return 1;
}
#endif
