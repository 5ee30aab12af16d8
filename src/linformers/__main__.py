"""`python -m linformers` is `linformers`."""

from .cli import main

main()
