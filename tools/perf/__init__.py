"""Speed of our parts beside a naive version or a peer: ratios of runs in turns, and counts."""
