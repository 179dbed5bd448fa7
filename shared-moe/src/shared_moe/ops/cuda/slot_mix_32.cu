constexpr int WIDTH = 32;
#include "slot_mix.cuh"
