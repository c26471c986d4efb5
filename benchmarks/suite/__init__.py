"""Suite files: rows, tuning spaces, published tables."""
