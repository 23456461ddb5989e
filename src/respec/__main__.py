"""`python -m respec`: the command, where it is not on the path."""

from respec.cli import main

main()
