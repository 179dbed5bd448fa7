constexpr int WIDTH = 64;
#include "slot_mix.cuh"
