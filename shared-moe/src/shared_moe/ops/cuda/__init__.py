"""Kernels in CUDA C++, compiled at first use. The maths lies in headers that g++ compiles too."""
