"""Bounded adapters: the layer, its kernels, files and constraints."""
