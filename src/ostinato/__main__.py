"""`python -m ostinato` is the `ostinato` command."""

from ostinato.cli import main

if __name__ == "__main__":
    main()
