"""What a suite with a grid shows: how forgiving its methods are to learning rate and lambda.

One start and one stream of batches for all methods, an acceptance rule against Retrain, and per
method the share of cells that pass it.  The cells come from :mod:`benchmarks.pipeline.sweeping`.
"""
