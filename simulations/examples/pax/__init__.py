"""An example app."""
