"""Unlearning methods of the literature that look at pixels or into a ViT."""
