import os

# A worker of pytest has a core: threads of XGBoost and of NumPy would wait for each other. Each of
# the two reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

# On a busy machine an example may take any time. The same examples are drawn each time, so that the
# same faults are found; `make test-all` draws others, by --hypothesis-profile.
hypothesis.settings.register_profile("fedapp", deadline=None, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.load_profile("fedapp")

# What helpers find wrong is shown as what tests do.
HELPERS = ("contract.methods", "network", "pooled", "tampering", "transcript")
pytest.register_assert_rewrite(*(f"tests.{name}" for name in HELPERS))
