// log of a Gamma(a) sample and its derivative in a. Random numbers by Philox 4x32-10 (Salmon et al. 2011), so that a
// sample depends on seed and element alone; Gamma(a + 1) by Marsaglia and Tsang (2000), lowered to Gamma(a) by
// U^(1/a) in logarithms; the derivative of Gamma(a + 1) is implicit, -(dF/da) / p (Figurnov et al. 2018).
#pragma once
#include "common.cuh"

struct Philox {
    unsigned key[2], counter[4];

    HD Philox(unsigned long long seed, unsigned long long element)
        : key{unsigned(seed), unsigned(seed >> 32)}, counter{0, 0, unsigned(element), unsigned(element >> 32)} {}

    // Two uniform numbers in (0, 1), of 52 random bits each.
    HD void uniforms(double& u, double& v) {
        unsigned c[4] = {counter[0], counter[1], counter[2], counter[3]}, k[2] = {key[0], key[1]};
        for (int round = 0; round < 10; ++round) {
            const unsigned long long p = 0xD2511F53ull * c[0], q = 0xCD9E8D57ull * c[2];
            const unsigned first = unsigned(q >> 32) ^ c[1] ^ k[0], third = unsigned(p >> 32) ^ c[3] ^ k[1];
            c[0] = first, c[1] = unsigned(q), c[2] = third, c[3] = unsigned(p);
            k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u;
        }
        if (++counter[0] == 0) ++counter[1];
        u = unit(c[0], c[1]), v = unit(c[2], c[3]);
    }

    HD static double unit(unsigned high, unsigned low) {
        return (double((((unsigned long long)high << 32) | low) >> 12) + 0.5) * 0x1p-52;
    }
};

// For b >= 1.
HD double digamma(double b) {
    double shift = 0;
    for (; b < 10; b += 1) shift -= 1 / b;
    const double r = 1 / (b * b);
    return shift + log(b) - 0.5 / b - r * (1. / 12 - r * (1. / 120 - r * (1. / 252 - r * (1. / 240 - r / 132))));
}

constexpr int MOST_TERMS = 100000;
constexpr double PRECISE = 1e-15;
constexpr double NORMAL = 1e7;  // shape above which the Gamma distribution is taken as nearly normal

// dx/db of a sample x ~ Gamma(b), b >= 1: the series of the lower tail below b + 1, above it the continued fraction
// of the upper tail, each with its derivative in b. For large b the Cornish-Fisher expansion at a fixed quantile z,
// x = b + z sqrt(b) + (z^2 - 1) / 3 + ..., whose error in the derivative is of order b^(-3/2).
HD double gamma_derivative(double x, double b) {
    if (b > NORMAL) {
        const double root = sqrt(b), r = (x - b) / root, z = r - (r * r - 1) / (3 * root);
        return 1 + z / (2 * root);
    }
    if (x < b + 1) {
        double term = 1, sum = 1, harmonic = 0, slope = 0;
        for (int n = 1; n < MOST_TERMS; ++n) {
            term *= x / (b + n);
            harmonic += 1 / (b + n);
            sum += term;
            slope -= term * harmonic;
            if (term * (1 + harmonic) < PRECISE * sum) break;
        }
        return -x / b * ((log(x) - digamma(b + 1)) * sum + slope);
    }
    // Modified Lentz; d_ marks derivatives in b.
    double d = 1 / (x + 1 - b), d_d = d * d, c = 1e300, d_c = 0, f = d, d_f = d_d;
    for (int n = 1; n < MOST_TERMS; ++n) {
        const double an = -n * (n - b), bn = x + 2 * n + 1 - b;
        const double d_inverse = n * d + an * d_d - 1;
        d = 1 / (an * d + bn), d_d = -d * d * d_inverse;
        const double next = bn + an / c;
        d_c = -1 + n / c - an * d_c / (c * c), c = next;
        const double factor = c * d, change = d_c * d + c * d_d;
        d_f = d_f * factor + f * change, f *= factor;
        if (fabs(factor - 1) < PRECISE && fabs(change) < PRECISE) break;
    }
    return x * ((log(x) - digamma(b)) * f + d_f);
}

// Writes log g of g ~ Gamma(a) and d log g / da; NaN for an `a` that is not a positive finite number.
HD void log_gamma_sample(double a, unsigned long long seed, unsigned long long element, double& value, double& slope) {
    if (!(a > 0) || a > 1e300) {
        value = slope = nan("");
        return;
    }
    Philox random(seed, element);
    const double b = a + 1, d = b - 1. / 3, c = 1 / sqrt(9 * d);
    double g = d;
    for (;;) {
        double u, v, w, unused;
        random.uniforms(u, v);
        random.uniforms(w, unused);
        const double p = 2 * u - 1, q = 2 * v - 1, radius = p * p + q * q;
        if (radius >= 1 || radius == 0) continue;
        const double normal = p * sqrt(-2 * log(radius) / radius), root = 1 + c * normal;  // polar method
        if (root <= 0) continue;
        const double cube = root * root * root;
        if (log(w) < 0.5 * normal * normal + d * (1 - cube + log(cube))) {
            g = d * cube;
            break;
        }
    }
    double u, unused;
    random.uniforms(u, unused);
    value = log(g) + log(u) / a;
    slope = gamma_derivative(g, b) / g - log(u) / (a * a);
}
