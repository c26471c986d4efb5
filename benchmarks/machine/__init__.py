"""Checks of this machine and of published logs."""
