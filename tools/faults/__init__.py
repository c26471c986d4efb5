"""Faults on purpose: kills, full disks, damaged bytes, side-by-side runs, hostile files.

``python -m tools.faults --seed 7 --minutes 10 --out FOLDER`` prints a table and writes
``FAULTS.md``.  Nothing of the product knows of it: traps are audit hooks of a forked process.
"""
