"""Deployment across organisations: certificates, keys, and files that start the processes."""
