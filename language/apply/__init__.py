"""``unlearn apply`` on text."""
