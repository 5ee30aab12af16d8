"""All sections of the reproduction: `python -m paper --data DIR`."""

from .sections import SECTIONS, main

if __name__ == "__main__":
    main(SECTIONS)
