"""Apps of a user's own on fedapp's strategies."""
