"""Scores over HTTP.

``scorer`` opens a whole model and scores rows. ``http`` and ``v2`` are what any application around
a model needs, ``app`` is that of ``fedapp serve``. Read ``scorer`` first.
"""
