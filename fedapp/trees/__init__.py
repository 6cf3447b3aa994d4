"""Trees and models of them: grow, store, predict.

``model`` has a boosted model and the text of every kind, ``objective`` the losses, ``grow`` the
trees of one boosting round, ``rounds`` a whole boosting run, ``predict`` the walk down a tree,
``divided`` models whose splits are at several parties, ``forest`` random forests, ``stacked`` and
``linear`` the other kinds of model. The room knows nothing of Flower, messages or how parties
exchange sums: arrays and models only. Read ``model`` first, then ``grow``.
"""
