"""An HTTP endpoint that scores rows with a whole model."""
