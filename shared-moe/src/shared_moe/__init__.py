"""Mixture-of-Experts core: routers, experts, losses, dispatch and kernels for CPU and GPU."""

__version__ = "0.1.0"
