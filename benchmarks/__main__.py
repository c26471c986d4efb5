"""``python -m benchmarks`` is ``unlearn``."""

from benchmarks.cli.main import main

if __name__ == "__main__":
    main()
