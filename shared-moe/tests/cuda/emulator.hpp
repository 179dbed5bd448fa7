// CUDA kernels on the CPU, as they are: g++ compiles a .cu source below this text. Every thread of a block is a fiber
// that runs from barrier to barrier; blocks, and threads between two barriers, take turns in a shuffled order, so that
// a missing barrier shows as a wrong result. Shared memory keeps what the block before left in it. A barrier that some
// thread never reaches ends the launch with an error.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
constexpr size_t STACK = 64 * 1024;
constexpr unsigned WARP_THREADS = 32;

struct Barrier {
    unsigned arrived = 0, generation = 0;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK);
    bool done = false;
};

static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static std::function<void()> body;
static Barrier whole, warps[WARP_THREADS];
static unsigned char box[1024][8];
static bool moved;

static void enter() {
    body();
    fibers[threadIdx.x].done = moved = true;
}

static void wait(Barrier& barrier, unsigned members) {
    const unsigned generation = barrier.generation, self = threadIdx.x;
    moved = true;
    if (++barrier.arrived == members) {
        barrier.arrived = 0, ++barrier.generation;
        return;
    }
    while (barrier.generation == generation) swapcontext(&fibers[self].context, &scheduler);
    moved = true;
}

static void wait_warp() {
    const unsigned warp = threadIdx.x / WARP_THREADS;
    wait(warps[warp], std::min(WARP_THREADS, blockDim.x - warp * WARP_THREADS));
}

// false: some thread waits for ever.
static bool run_block(std::mt19937& random) {
    whole = {};
    std::fill(std::begin(warps), std::end(warps), Barrier{});
    for (unsigned t = 0; t < blockDim.x; ++t) {
        Fiber& fiber = fibers[t];
        fiber.done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, enter, 0);
    }
    std::vector<unsigned> order(blockDim.x);
    std::iota(order.begin(), order.end(), 0);
    for (;;) {
        std::shuffle(order.begin(), order.end(), random);
        moved = false;
        bool left = false;
        for (unsigned t : order)
            if (!fibers[t].done) {
                left = true;
                threadIdx.x = t;
                swapcontext(&scheduler, &fibers[t].context);
            }
        if (!left) return true;
        if (!moved) return false;
    }
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<A>*>(arguments[I])...);
}

template <class... A>
int launch(void (*kernel)(A...), unsigned blocks, unsigned threads, void** arguments, unsigned seed) {
    std::mt19937 random(seed);
    if (fibers.size() < threads) fibers = std::vector<Fiber>(threads);
    body = [=] { call(kernel, arguments, std::index_sequence_for<A...>()); };
    blockDim.x = threads, gridDim.x = blocks;
    std::vector<unsigned> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (unsigned block : order) {
        blockIdx.x = block;
        if (!run_block(random)) return 1;
    }
    return 0;
}

template <class T>
void publish(T value) {
    std::memcpy(box[threadIdx.x], &value, sizeof value);
    wait_warp();
}

template <class T>
T read(unsigned thread) {
    T value;
    std::memcpy(&value, box[thread], sizeof value);
    return value;
}
}  // namespace emulator

#define EMULATE(kernel)                                                                                     \
    extern "C" int emulate_##kernel(unsigned blocks, unsigned threads, void** arguments, unsigned seed) { \
        return emulator::launch(kernel, blocks, threads, arguments, seed);                                \
    }

static void __syncthreads() { emulator::wait(emulator::whole, blockDim.x); }
static void __syncwarp() { emulator::wait_warp(); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
    const unsigned self = threadIdx.x;
    emulator::publish(value);
    const T found = emulator::read<T>(self ^ lanes);
    emulator::wait_warp();
    return found;
}

static unsigned __match_any_sync(unsigned, int value) {
    const unsigned first = threadIdx.x & ~31u;
    emulator::publish(value);
    unsigned same = 0;
    for (unsigned lane = 0; lane < 32 && first + lane < blockDim.x; ++lane)
        if (emulator::read<int>(first + lane) == value) same |= 1u << lane;
    emulator::wait_warp();
    return same;
}

template <class T>
T atomicAdd(T* at, T value) {
    const T before = *at;
    *at += value;
    return before;
}
