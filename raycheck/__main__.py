"""`python -m raycheck` is the command `raycheck`."""

from raycheck.cli import main

main()
