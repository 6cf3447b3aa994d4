"""Tables: how they are read from files, which are known by name, how they are split."""
