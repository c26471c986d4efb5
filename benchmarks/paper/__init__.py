"""What the paper prints: its tables, what in them does not follow, and which suites measure it."""
