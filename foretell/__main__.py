"""`python -m foretell` is the command `foretell`."""

from foretell.cli import main

if __name__ == "__main__":
    main()
