"""Stages: their keys, plans, work, schedule and executors."""
