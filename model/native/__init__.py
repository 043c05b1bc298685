"""Kernels in C++ for CPUs, optional: built at install where a compiler is, called through a plain C ABI."""
