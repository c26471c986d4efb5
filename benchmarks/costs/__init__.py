"""What the bounded layer costs, derived from a config alone."""
