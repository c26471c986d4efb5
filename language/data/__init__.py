"""Texts: corpora, templates, tokenizers, sources."""
