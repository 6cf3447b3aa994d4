"""What a person sees of a run: progress while it trains, its summary, its HTML page."""
