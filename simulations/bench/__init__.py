"""How fast and how large: the result is held against a reference first, then measured."""
