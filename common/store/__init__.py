"""The content-addressed stage store, records and weights."""
