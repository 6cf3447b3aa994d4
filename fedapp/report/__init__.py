"""What a person sees of a run: progress during training, its summary, its HTML page."""
