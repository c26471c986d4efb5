"""Tables of an image classifier on data of their own, or on none."""
