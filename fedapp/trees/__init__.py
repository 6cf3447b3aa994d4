"""Trees and models of them: grow, store, predict.

``model`` has a boosted model and the text of every kind, ``objective`` the losses, ``grow`` the
trees of one boosting round, ``rounds`` a whole boosting run, ``predict`` the walk down a tree,
``curves`` and ``edited`` additive models by column, ``divided`` models whose splits are at several
parties, ``forest`` random forests, ``stacked`` and ``linear`` the other kinds of model. The room
knows nothing of Flower, messages or how parties exchange sums: arrays and models only. Read
``model`` first, then ``grow``.

Where XGBoost's bits come from
------------------------------
Of the same rows, trees are those of XGBoost 3.2 to the last bit. That depends on which numbers are
float32, and on the order of operations: the last bit of a leaf value moves all rows of the leaf.
``docs/explanation/exactness.md`` says for which methods this holds, and what is excepted. A round
in XGBoost's order; names are relative to ``fedapp``:

Parameters
    ``trees.grow.Shape.of`` rounds penalties and eta to float32, and divides eta among parallel
    trees in float32. Parameters of a loss are rounded where it reads them.
Cuts
    ``histograms.sketch.quantile_cuts`` asks XGBoost itself.
    ``histograms.sketch.fuse_sketches`` makes those of several tables; a column ends by
    ``histograms.sketch.upper_edge``.
Base score
    ``trees.objective.base_score`` is the mean label, or a Newton step from margin 0. With several
    classes it is summed in float32, in the order of the rows on one thread.
    ``trees.objective.base_margin`` is the same as a margin.
Objective
    ``trees.losses.LOSSES`` has each loss in float32, in XGBoost's order of multiplication.
    ``trees.c_math.exp32`` and its like are the C library's: numpy's may differ in the last bit.
    Losses of times, risk sets and ranks have float64 within: ``trees.survival.aft_pairs``,
    ``trees.survival.cox_pairs``, ``trees.ranking.ranking_pairs``.
Gradients
    ``trees.objective.gradients`` multiplies the weight of a row by that of its label first, and
    then gradient and hessian by both, in float32.
Sums
    ``histograms.build.build_histograms`` adds them up in float64, rows in order. Only the child of
    smaller hessian is summed, the left one if equal (``trees.grow.Growth.wanted``); its sibling is
    the parent minus it.
Gain
    ``histograms.split.side_gain`` squares in float64 and divides in float32. Where weights have
    bounds, ``histograms.split.gain_of_weight`` takes the float32 weight instead. Both sides are
    added in float32, then the node's gain is subtracted. There is no factor 1/2.
Split search
    ``histograms.split.best_splits``: lower columns first, bins ascending with missing rows right,
    then descending with them left; the first of equal gains wins. With one tree for all outputs
    the rules are others, ``histograms.split.best_vector_splits``. Which columns may split
    a node is ``trees.limits.Limits``; which nodes are split, ``trees.grow.Queue``.
Leaf
    ``histograms.split.leaf_weight`` is computed in float64 and rounded to float32. Where alpha
    leaves nothing of a gradient it is -0.0. ``trees.grow.Growth`` multiplies it by eta in float32.
    Leaves that are quantiles are ``trees.quantiles.quantile``, vectors
    ``histograms.split.vector_weights``.
Margins
    ``trees.predict.add_trees`` adds leaf values in float32, in the order of the trees.
    ``trees.losses.Link`` makes predictions of margins.
Files
    ``trees.xgboost.to_xgboost_json`` writes XGBoost's format, ``trees.xgboost.tree_of_xgboost``
    reads a tree of it, and ``trees.xgboost.stock_ensemble`` a whole file. A node here is
    ``trees.model.NODE``.
"""
