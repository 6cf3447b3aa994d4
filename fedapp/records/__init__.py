"""Records: values of declared types, as JSON and arrays, and in a file that grows.

``codec`` takes values apart and puts them together, by their declared types; ``journal`` keeps
named values in one file from which a killed process continues; ``document`` has the text of models.
"""
