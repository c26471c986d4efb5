"""Unlearning methods that need answers, refusals or hidden states, one family a file."""
