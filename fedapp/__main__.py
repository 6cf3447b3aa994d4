"""``python -m fedapp``."""

from fedapp.start import main

main()
