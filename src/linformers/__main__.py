"""The command line: `linformers` is `python -m linformers`."""

import sys


def main() -> None:
    """Run the command line; interrupted while that is imported, end without a word, as the package does."""
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
