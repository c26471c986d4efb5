"""Batches, loaders, labels and frozen splits."""
