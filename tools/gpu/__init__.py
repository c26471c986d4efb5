"""First contact with a GPU: one command per question, each with a table of its own.

``python -m tools.gpu ls`` says which there are; ``docs/scale.md`` says which come first where a
card is lent for minutes.
"""
