constexpr int WIDTH = 16;
#include "slot_mix.cuh"
