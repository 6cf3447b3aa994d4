"""What one party has: its table, its state on disk, and how it answers."""
