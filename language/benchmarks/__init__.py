"""Text benchmarks."""
