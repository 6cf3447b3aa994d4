"""Tree models trained across organisations that may not pool their rows."""
