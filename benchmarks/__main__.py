"""``python -m stable_forgetting.benchmarks`` is ``unlearn``."""

from stable_forgetting.benchmarks.cli.main import main

if __name__ == "__main__":
    main()
