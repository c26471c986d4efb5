"""The ``unlearn`` command."""
