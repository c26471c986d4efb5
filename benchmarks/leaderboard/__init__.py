"""The ``run`` job: rows of a suite, their leaderboard and its report."""
