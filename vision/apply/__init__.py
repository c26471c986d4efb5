"""``unlearn apply`` on images."""
