"""The ``audit`` job: its plan, cost, work and report."""
