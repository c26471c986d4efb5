"""Suites, planning, running and reporting: the only package that imports all the others.

Importing it registers every built-in method and benchmark, and imports nothing heavy.
"""

from stable_forgetting import (
    language,  # noqa: F401 - registers
    vision,  # noqa: F401 - registers
)
