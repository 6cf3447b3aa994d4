"""``python -m fedapp``."""

from fedapp.cli import main

main()
