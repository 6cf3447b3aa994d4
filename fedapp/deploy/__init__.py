"""What a deployment across organisations needs on disk: certificates, keys, scripts."""
