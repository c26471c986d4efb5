"""Losses per position, terms per part, objectives."""
