"""Errors, configs, seeds, registries, processes."""
