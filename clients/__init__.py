"""The parties' side: one module a method, functions from a request to a reply."""
