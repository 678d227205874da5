"""`python -m microparallel`, which is also how torchrun starts it."""

from microparallel.cli import main

main()
