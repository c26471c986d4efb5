"""Per-sample scores, metrics, gaps and the noise floor."""
