"""What is asked of a causal model: likelihoods, continuations."""
