"""One fit of interpret's models, in a Python that has interpret but not fedapp.

``python glassbox_fits.py FOLDER`` reads ``rows.npz`` and ``how.json``, and writes ``fit.npz``.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path


def fit(folder: Path) -> None:
    """Fit with the arguments in ``how.json``; margins of the test rows, and CPU seconds."""
    np = import_module("numpy")
    how = json.loads((folder / "how.json").read_text())
    rows, seed = np.load(folder / "rows.npz"), how.pop("seed")
    values, labels = rows["values"], rows["labels"]
    kinds = ["nominal" if is_coded else "continuous" for is_coded in rows["coded"].tolist()]
    is_private, is_numbers = "epsilon" in how, how.pop("is_numbers")
    test = rows["test"]
    if is_private:  # what a user would know of each column: here of the training rows
        medians = np.nanmedian(values, axis=0)  # it takes no missing values
        values, test = (np.where(np.isnan(part), medians, part) for part in (values, test))
        lows, highs = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        how["privacy_bounds"] = dict(enumerate(zip(lows, highs, strict=True)))
        if is_numbers:
            how |= {"privacy_target_min": labels.min(), "privacy_target_max": labels.max()}
    name = "DP" * is_private + "ExplainableBoosting" + ("Regressor" if is_numbers else "Classifier")
    kind = getattr(import_module("interpret.privacy" if is_private else "interpret.glassbox"), name)
    start = time.process_time()
    model = kind(feature_types=kinds, random_state=seed, n_jobs=1, **how).fit(values, labels)
    seconds = time.process_time() - start
    scored = model.predict if is_numbers else model.decision_function
    np.savez(folder / "fit.npz", margins=scored(test), seconds=seconds)


if __name__ == "__main__":
    fit(Path(sys.argv[1]))
