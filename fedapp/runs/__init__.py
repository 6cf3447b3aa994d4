"""Everything that a command does: train, compare, tune, predict, log, and delete runs.

A command or a Python call collects its arguments; a file here carries them out, from the settings
to the report. ``session`` starts a run: in this process, in Flower's simulation, or through a
SuperLink. The room knows nothing of terminals, and of methods only what `load_strategy` returns.
Read ``session`` first, which is one run from beginning to end; ``compare`` and ``tune`` carry out
many, and ``run`` is what Python gets back.
"""
