"""Models whose splits lie at several parties."""
