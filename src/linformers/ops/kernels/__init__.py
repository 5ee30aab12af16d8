"""Triton kernels. Triton is imported with them, so nothing imports them before the first launch."""
