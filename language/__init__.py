"""The language arm: nothing is registered yet."""
