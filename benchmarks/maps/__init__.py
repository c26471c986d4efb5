"""Stability maps: how forgiving a method is to its learning rate and its forget weight.

A grid of effective rate x lambda x steps, one start and one stream of batches for all methods, an
acceptance rule against Retrain, and per method the share of cells that pass it: ``unlearn map``.
"""
