"""An HTTP endpoint that scores rows with a run's model; start with scorer.py."""
