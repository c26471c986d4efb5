"""Tables of a causal model on data of their own."""
