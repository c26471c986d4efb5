"""Rehearsals: a suite end to end in minutes, with stand-ins for its model and data."""
