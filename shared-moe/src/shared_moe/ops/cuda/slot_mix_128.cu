constexpr int WIDTH = 128;
#include "slot_mix.cuh"
