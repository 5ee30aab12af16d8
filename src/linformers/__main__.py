"""`python -m linformers` and `torchrun -m linformers`."""

from linformers_cli import main

if __name__ == "__main__":
    main()
